#!/usr/bin/env bash
# GPT of 530 billion parameters (MT-NLG), as in table 3 of arXiv 2205.05198.
# 280 GPUs: tensor-parallel 8, pipeline-parallel 35 with 3 virtual stages per
# rank.
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
#      540,440,624         139       25,164,933,296         58.0
#   RECOMPUTE=pointwise
#      320,227,472         139       15,003,666,944         48.5
#   RECOMPUTE=full
#       36,733,856         139        1,994,427,056         36.4
#   --attention-backend unfused
#    1,546,680,320         139       71,787,372,544        101.4
#   RECOMPUTE=core_attn --attention-backend unfused
#      540,062,624         139       25,357,132,448         58.2
#
# SIZE=tiny runs a small version on a CPU. README.md beside this file explains the
# other variables. Flags after the script's name override those of the script.
set -euo pipefail

NNODES=${NNODES:-35}  # set MASTER_ADDR and NODE_RANK (from 0) on each
NPROC_PER_NODE=${NPROC_PER_NODE:-8}
DATA_PATH=${DATA_PATH:-}  # if empty: made-up tokens
VOCAB_SIZE=50257  # GPT-2's; padded to the paper's 51200
TRAIN_ITERS=${TRAIN_ITERS:-100}
RECOMPUTE=${RECOMPUTE:-none}
source "$(dirname "${BASH_SOURCE[0]}")/workload.sh"

GPT_MODEL_ARGS=(
    --num-layers 105
    --hidden-size 20480
    --num-attention-heads 128
    --seq-length 2048
    --max-position-embeddings 2048
)

TRAINING_ARGS+=(
    --micro-batch-size 1
    --global-batch-size 280
    --lr 5.0e-5
    --min-lr 5.0e-6
    --init-method-std 0.004
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --sequence-parallel
    --pipeline-model-parallel-size 35
    --num-virtual-stages-per-pipeline-rank 3
    --distributed-backend nccl
)

launch_model "$@"
