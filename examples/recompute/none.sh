#!/usr/bin/env bash
# No recompute: the yardstick for the other scripts here, in memory and in time.
# Keeps everything that backward reads: (34 + 5as/h)sbh/t bytes a layer on each rank.
# Rebuilds nothing.
# Choose it whenever it fits.
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

launch \
    "${GPT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    "$@"
