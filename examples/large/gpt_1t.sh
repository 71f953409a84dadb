#!/usr/bin/env bash
# GPT of one trillion parameters, as in table 3 of arXiv 2205.05198.
# 512 GPUs: tensor-parallel 8, pipeline-parallel 64.
# Recomputes nothing: all fits in 80 GB, since flash attention keeps no scores. To recompute core attention, as the paper does,
# frees them only where attention is unfused, and then as much is kept as here.
# Two virtual stages on each rank would lower the bubble from 12.3% to 6.2%. They fit with RECOMPUTE=pointwise, at no matmul.
#
# Of a GPU of the first pipeline rank, as EXPLAIN=1 prints it: kept of one micro-batch, forwards in flight, at the peak of all of
# them. In all: with the weights, gradients and optimizer states of its parameters, 18 bytes each.
#   kept, bytes   in flight   at the peak, bytes   in all, GiB   with
#   452,552,704          64       28,963,373,056          63.6   as it is
#   269,043,776          64       17,271,230,448          52.7   RECOMPUTE=pointwise
#    32,796,608          64        2,308,866,048          38.7   RECOMPUTE=full
#  1,291,085,824          64       82,629,492,736         113.5   --attention-backend unfused
#   452,235,200          64       29,205,194,752          63.8   RECOMPUTE=core_attn --attention-backend unfused
#   452,552,704         191       43,432,374,272          77.0   --num-virtual-stages-per-pipeline-rank 2
#   269,043,776         191       25,959,700,432          60.8   RECOMPUTE=pointwise --num-virtual-stages-per-pipeline-rank 2
#
# SIZE=tiny runs on a CPU. README.md beside this file has the other variables. Further flags are handed on, and win.
set -euo pipefail

NNODES=${NNODES:-64}  # on each: MASTER_ADDR, and NODE_RANK from 0
NPROC_PER_NODE=${NPROC_PER_NODE:-8}
DATA_PATH=${DATA_PATH:-}  # made-up tokens without it
VOCAB_SIZE=50257  # GPT-2's; padded to the paper's 51200
TRAIN_ITERS=${TRAIN_ITERS:-100}
RECOMPUTE=${RECOMPUTE:-none}
source "$(dirname "${BASH_SOURCE[0]}")/workload.sh"

GPT_MODEL_ARGS=(
    --num-layers 128
    --hidden-size 25600
    --num-attention-heads 160
    --seq-length 2048
    --max-position-embeddings 2048
)

TRAINING_ARGS+=(
    --micro-batch-size 1
    --global-batch-size 512
    --lr 5.0e-5
    --min-lr 5.0e-6
    --init-method-std 0.0036
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --sequence-parallel
    --pipeline-model-parallel-size 64
    --distributed-backend nccl
)

launch_model "$@"
