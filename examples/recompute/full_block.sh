#!/usr/bin/env bash
# Full recompute, block: the first RECOMPUTE_NUM_LAYERS layers are units, the others keep everything.
# Keeps 2sbh/t bytes on each rank for a layer among the first, (34 + 5as/h)sbh/t for each of the others.
# Rebuilds the first layers, each as full_uniform.sh does.
# Choose it where full_uniform.sh leaves memory unused: lower the number until the memory is full, and each layer less saves time.
# Runs as it is on a CPU; README.md beside this file shows the variables for 8 GPUs. Further flags are handed on, and win.
set -euo pipefail

NPROC_PER_NODE=${NPROC_PER_NODE:-2}
TP=${TP:-2}
NUM_LAYERS=${NUM_LAYERS:-4}
HIDDEN_SIZE=${HIDDEN_SIZE:-128}
NUM_ATTENTION_HEADS=${NUM_ATTENTION_HEADS:-8}
SEQ_LENGTH=${SEQ_LENGTH:-128}
RECOMPUTE_NUM_LAYERS=${RECOMPUTE_NUM_LAYERS:-2}
source "$(dirname "${BASH_SOURCE[0]}")/workload.sh"  # GPT_MODEL_ARGS, TRAINING_ARGS, DATA_ARGS, EVAL_AND_LOGGING_ARGS

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP"
    --sequence-parallel
)

RECOMPUTE_ARGS=(
    --recompute-granularity full
    --recompute-method block
    --recompute-num-layers "$RECOMPUTE_NUM_LAYERS"
)

launch \
    "${GPT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${RECOMPUTE_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    "$@"
