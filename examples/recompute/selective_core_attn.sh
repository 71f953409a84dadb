#!/usr/bin/env bash
# Selective recompute of core attention, Megatron's default: what grows with the square of the sequence.
# Keeps all but the attention scores, their softmax and its dropout: 34sbh/t bytes a layer on each rank.
# Rebuilds these from query, key and value: one batched matmul, 2bs^2h FLOPs a layer.
# Choose it with unfused attention. Flash attention does this by itself, and leaves it nothing to save.
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
    --recompute-modules core_attn
)

launch \
    "${GPT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${RECOMPUTE_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    "$@"
