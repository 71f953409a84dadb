#!/usr/bin/env bash
# Llama-3-70B, Meta's shape.
# 64 GPUs: tensor-parallel 8, pipeline-parallel 4 with 5 virtual stages per rank,
# data-parallel 2. It recomputes nothing: with flash attention and sequence
# parallelism the run fits in 80 GB.
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
#    5,646,819,648          23       25,900,123,584         62.2
#   RECOMPUTE=pointwise
#    3,801,162,048          23       17,468,818,880         54.3
#   RECOMPUTE=full
#      335,719,808          23        1,813,267,600         39.8
#
# SIZE=tiny runs a small version on a CPU. README.md beside this file explains the
# other variables. Flags after the script's name override those of the script.
set -euo pipefail

NNODES=${NNODES:-8}  # set MASTER_ADDR and NODE_RANK (from 0) on each
NPROC_PER_NODE=${NPROC_PER_NODE:-8}
DATA_PATH=${DATA_PATH:-}  # if empty: made-up tokens
VOCAB_SIZE=128256
TRAIN_ITERS=${TRAIN_ITERS:-100}
RECOMPUTE=${RECOMPUTE:-none}
source "$(dirname "${BASH_SOURCE[0]}")/workload.sh"

GPT_MODEL_ARGS=(
    --num-layers 80
    --hidden-size 8192
    --ffn-hidden-size 28672
    --num-attention-heads 64
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
    --lr 1.5e-4
    --min-lr 1.5e-5
    --init-method-std 0.02
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --sequence-parallel
    --pipeline-model-parallel-size 4
    --num-virtual-stages-per-pipeline-rank 5
    --distributed-backend nccl
)

launch_model "$@"
