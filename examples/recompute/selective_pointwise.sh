#!/usr/bin/env bash
# Selective recompute of what is cheap: core attention, the outputs of both norms
# and of the MLP's activation.
#   keeps     the tensors that these are rebuilt from: 22sbh/t bytes per layer on
#             each rank
#   rebuilds  the norms and the activation, without a matmul or a collective, and
#             core attention: 2bs^2h FLOPs per layer
#   choose it first, because no linear layer runs again. With flash attention
#             leave out core_attn.
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
    --recompute-modules core_attn layernorm activation
)

launch \
    "${GPT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${RECOMPUTE_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    "$@"
