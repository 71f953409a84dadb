#!/usr/bin/env bash
# Full recompute, uniform: each layer is a unit of its own.
#   keeps     the input of every layer, 2sbh/t bytes on each rank. During backward
#             it also holds what one layer keeps without recompute.
#   rebuilds  each layer except linear_fc2, whose output backward does not read:
#             about 2/3 of a forward pass more
#   choose it if no selective policy fits
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
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)

launch \
    "${GPT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${RECOMPUTE_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    "$@"
