#!/usr/bin/env bash
# GPT of 175 billion parameters (GPT-3), as in table 3 of arXiv 2205.05198.
# 64 GPUs: tensor-parallel 8, pipeline-parallel 8 with 3 virtual stages per rank.
# It recomputes nothing: the run fits in 80 GB, because flash attention keeps no
# attention scores. The paper's attention is unfused and keeps them, so the paper
# recomputes core attention. Both ways keep about the same bytes per layer.
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
#    1,287,850,176          31       13,325,715,392         59.7
#   RECOMPUTE=pointwise
#      759,319,104          31        7,889,393,456         54.7
#   RECOMPUTE=full
#       78,722,688          31          932,163,728         48.2
#   --attention-backend unfused
#    4,306,569,216          31       44,519,145,472         88.8
#   RECOMPUTE=core_attn --attention-backend unfused
#    1,286,731,392          31       13,490,313,344         59.9
#
# SIZE=tiny runs a small version on a CPU. README.md beside this file explains the
# other variables. Flags after the script's name override those of the script.
set -euo pipefail

NNODES=${NNODES:-8}  # set MASTER_ADDR and NODE_RANK (from 0) on each
NPROC_PER_NODE=${NPROC_PER_NODE:-8}
DATA_PATH=${DATA_PATH:-}  # if empty: made-up tokens
VOCAB_SIZE=50257  # GPT-2's; padded to the paper's 51200
TRAIN_ITERS=${TRAIN_ITERS:-100}
RECOMPUTE=${RECOMPUTE:-none}
source "$(dirname "${BASH_SOURCE[0]}")/workload.sh"

GPT_MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
)

TRAINING_ARGS+=(
    --micro-batch-size 1
    --global-batch-size 64
    --lr 6.0e-5
    --min-lr 6.0e-6
    --init-method-std 0.006
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --sequence-parallel
    --pipeline-model-parallel-size 8
    --num-virtual-stages-per-pipeline-rank 3
    --distributed-backend nccl
)

launch_model "$@"
