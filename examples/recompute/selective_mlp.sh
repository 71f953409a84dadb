#!/usr/bin/env bash
# Selective recompute of the MLP.
#   keeps     the MLP's input, and all of attention: (18 + 5as/h)sbh/t bytes per
#             layer on each rank
#   rebuilds  linear_fc1 (with its all-gather) and the activation, but not
#             linear_fc2: 8bsh^2 FLOPs per layer
#   choose it with flash attention if selective_pointwise.sh does not quite fit.
#             The wider the MLP, the more memory it frees.
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
