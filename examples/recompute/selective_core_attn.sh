#!/usr/bin/env bash
# Selective recompute of core attention, Megatron's default. Its memory grows with
# s squared.
#   keeps     all but the attention scores, their softmax and its dropout: 34sbh/t
#             bytes per layer on each rank
#   rebuilds  these from query, key and value: one batched matmul, 2bs^2h FLOPs
#             per layer
#   choose it with unfused attention. Flash attention does the same by itself, so
#             that recomputing core attention frees nothing.
#
# It runs on a CPU; README.md beside this file shows the variables for 8 GPUs.
# Flags after the script's name override those of the script. The letters s, b, h,
# a and t are explained there too.
set -euo pipefail

NPROC_PER_NODE=${NPROC_PER_NODE:-2}
TP=${TP:-2}
NUM_LAYERS=${NUM_LAYERS:-4}
HIDDEN_SIZE=${HIDDEN_SIZE:-128}
NUM_ATTENTION_HEADS=${NUM_ATTENTION_HEADS:-8}
SEQ_LENGTH=${SEQ_LENGTH:-128}
# It defines GPT_MODEL_ARGS, TRAINING_ARGS, DATA_ARGS and EVAL_AND_LOGGING_ARGS.
source "$(dirname "${BASH_SOURCE[0]}")/workload.sh"

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
