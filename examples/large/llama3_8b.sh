#!/usr/bin/env bash
# Llama-3-8B, Meta's shape.
# 8 GPUs: tensor-parallel 4, data-parallel 2.
# It recomputes nothing: with flash attention and sequence parallelism the run
# fits in 80 GB.
#
# The table has the memory of one GPU of the first pipeline rank, as EXPLAIN=1
# predicts it:
#   kept          activations that one micro-batch keeps for backward
#   in flight     micro-batches whose backward is still to come
#   at the peak   most activations held at once, of all micro-batches in flight
#   in all        the peak, and 18 bytes per parameter: weight, gradient and
#                 optimizer states
#
#      kept, bytes   in flight   at the peak, bytes  in all, GiB
#   as it is
#    9,698,992,640           1        9,698,992,640         42.7
#   RECOMPUTE=pointwise
#    6,745,678,336           1        6,745,678,336         39.9
#   RECOMPUTE=full
#    1,096,113,152           1        1,096,113,152         34.7
#
# SIZE=tiny runs a small version on a CPU. README.md beside this file explains the
# other variables. Flags after the script's name override those of the script.
set -euo pipefail

NNODES=${NNODES:-1}
NPROC_PER_NODE=${NPROC_PER_NODE:-8}
DATA_PATH=${DATA_PATH:-}  # if empty: made-up tokens
VOCAB_SIZE=128256
TRAIN_ITERS=${TRAIN_ITERS:-100}
RECOMPUTE=${RECOMPUTE:-none}
source "$(dirname "${BASH_SOURCE[0]}")/workload.sh"

GPT_MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type rope
    --rotary-base 500000
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --make-vocab-size-divisible-by 32  # no row is padding
    --attention-dropout 0.0
    --hidden-dropout 0.0
)

TRAINING_ARGS+=(
    --micro-batch-size 1
    --global-batch-size 512
    --lr 3.0e-4
    --min-lr 3.0e-5
    --init-method-std 0.02
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 4
    --sequence-parallel
    --distributed-backend nccl
)

launch_model "$@"
