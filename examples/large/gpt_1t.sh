#!/usr/bin/env bash
# GPT of one trillion parameters, as in table 3 of arXiv 2205.05198.
# 512 GPUs: tensor-parallel 8, pipeline-parallel 64.
# It recomputes nothing: the run fits in 80 GB, because flash attention keeps no
# attention scores. The paper's attention is unfused and keeps them, so the paper
# recomputes core attention. Both ways keep about the same bytes per layer.
# Two virtual stages per rank would lower the bubble from 12.3% to 6.2%. They fit
# with RECOMPUTE=pointwise, which repeats no matmul.
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
#      452,552,736          64       28,963,375,104         63.6
#   RECOMPUTE=pointwise
#      269,043,808          64       17,271,232,496         52.7
#   RECOMPUTE=full
#       32,796,608          64        2,308,866,064         38.7
#   --attention-backend unfused
#    1,291,085,824          64       82,629,492,736        113.5
#   RECOMPUTE=core_attn --attention-backend unfused
#      452,235,200          64       29,205,194,752         63.8
#   --num-virtual-stages-per-pipeline-rank 2
#      452,552,736         191       43,432,377,328         77.0
#   RECOMPUTE=pointwise --num-virtual-stages-per-pipeline-rank 2
#      269,043,808         191       25,959,703,488         60.8
#
# SIZE=tiny runs a small version on a CPU. README.md beside this file explains the
# other variables. Flags after the script's name override those of the script.
set -euo pipefail

NNODES=${NNODES:-64}  # set MASTER_ADDR and NODE_RANK (from 0) on each
NPROC_PER_NODE=${NPROC_PER_NODE:-8}
DATA_PATH=${DATA_PATH:-}  # if empty: made-up tokens
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
