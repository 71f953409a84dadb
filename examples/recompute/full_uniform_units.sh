#!/usr/bin/env bash
# Full recompute, uniform, in units of several layers.
# Keeps one input per unit, 2sbh/t bytes on each rank, and during backward what all layers of one unit keep without recompute.
# Rebuilds each unit as a whole, but for the linear_fc2 of its last layer.
# Choose it for very deep models only: units of 2 lower the peak from more than 34 + 5as/h layers on (without
# --sequence-parallel from more than 10 + 24/t + 5as/(ht) on); with fewer layers they raise it.
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
    --recompute-method uniform
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
