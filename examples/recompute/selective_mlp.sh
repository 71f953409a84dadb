#!/usr/bin/env bash
# Selective recompute of the MLP.
# Keeps the MLP's input, and all of attention: (18 + 5as/h)sbh/t bytes a layer on each rank.
# Rebuilds linear_fc1 (with its all-gather) and the activation, not linear_fc2: 8bsh^2 FLOPs a layer.
# Choose it with flash attention where selective_pointwise.sh does not quite fit: the wider the MLP, the more it saves.
# Runs as it is on a CPU; README.md beside this file shows the variables for 8 GPUs. Further flags are handed on, and win.
set -euo pipefail

NPROC_PER_NODE=${NPROC_PER_NODE:-2}
TP=${TP:-2}
NUM_LAYERS=${NUM_LAYERS:-4}
HIDDEN_SIZE=${HIDDEN_SIZE:-128}
NUM_ATTENTION_HEADS=${NUM_ATTENTION_HEADS:-8}
SEQ_LENGTH=${SEQ_LENGTH:-128}
source "$(dirname "${BASH_SOURCE[0]}")/workload.sh"  # GPT_MODEL_ARGS, TRAINING_ARGS, DATA_ARGS, EVAL_AND_LOGGING_ARGS

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP"
    --sequence-parallel
)

RECOMPUTE_ARGS=(
    --recompute-granularity selective
    --recompute-modules mlp
)

launch \
    "${GPT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${RECOMPUTE_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    "$@"
