#!/usr/bin/env bash
# Full recompute, block: only the first RECOMPUTE_NUM_LAYERS layers are
# recomputed.
#   keeps     2sbh/t bytes on each rank for each of these layers, and (34 +
#             5as/h)sbh/t for each of the others
#   rebuilds  the first layers, each as in full_uniform.sh
#   choose it if full_uniform.sh leaves memory unused. Lower the number until the
#             memory is full: each layer that is not recomputed saves time.
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
RECOMPUTE_NUM_LAYERS=${RECOMPUTE_NUM_LAYERS:-2}
# It defines GPT_MODEL_ARGS, TRAINING_ARGS, DATA_ARGS and EVAL_AND_LOGGING_ARGS.
source "$(dirname "${BASH_SOURCE[0]}")/workload.sh"

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
