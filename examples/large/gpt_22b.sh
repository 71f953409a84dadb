#!/usr/bin/env bash
# GPT of 22 billion parameters, as in table 3 of arXiv 2205.05198.
# 8 GPUs: tensor-parallel 8, no pipeline.
# Recomputes nothing: all fits in 80 GB, since flash attention keeps no scores. To recompute core attention, as the paper does,
# frees them only where attention is unfused, and then as much is kept as here.
#
# Of a GPU of the first pipeline rank, as EXPLAIN=1 prints it: kept of one micro-batch, forwards in flight, at the peak of all of
# them. In all: with the weights, gradients and optimizer states of its parameters, 18 bytes each.
#   kept, bytes   in flight   at the peak, bytes   in all, GiB   with
#  10,417,528,832           1       10,417,528,832          56.2   as it is
#  6,188,885,504           1        6,188,885,504          52.2   RECOMPUTE=pointwise
#   740,727,296           1          812,194,304          47.2   RECOMPUTE=full
#  42,617,200,640           1       42,617,200,640          86.2   --attention-backend unfused
#  10,405,190,144           1       10,795,137,536          56.5   RECOMPUTE=core_attn --attention-backend unfused
#
# SIZE=tiny runs on a CPU. README.md beside this file has the other variables. Further flags are handed on, and win.
set -euo pipefail

NNODES=${NNODES:-1}
NPROC_PER_NODE=${NPROC_PER_NODE:-8}
DATA_PATH=${DATA_PATH:-}  # made-up tokens without it
VOCAB_SIZE=50257  # GPT-2's; padded to the paper's 51200
TRAIN_ITERS=${TRAIN_ITERS:-100}
RECOMPUTE=${RECOMPUTE:-none}
source "$(dirname "${BASH_SOURCE[0]}")/workload.sh"

GPT_MODEL_ARGS=(
    --num-layers 48
    --hidden-size 6144
    --num-attention-heads 64
    --seq-length 2048
    --max-position-embeddings 2048
)

TRAINING_ARGS+=(
    --micro-batch-size 4
    --global-batch-size 4
    --lr 1.0e-4
    --min-lr 1.0e-5
    --init-method-std 0.007
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --sequence-parallel
    --distributed-backend nccl
)

launch_model "$@"
