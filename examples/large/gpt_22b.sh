#!/usr/bin/env bash
# GPT of 22 billion parameters, as in table 3 of arXiv 2205.05198.
# 8 GPUs: tensor-parallel 8, no pipeline.
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
#   10,417,529,600           1       10,417,529,600         56.2
#   RECOMPUTE=pointwise
#    6,188,886,272           1        6,188,886,272         52.2
#   RECOMPUTE=full
#      740,727,296           1          812,194,320         47.2
#   --attention-backend unfused
#   42,617,200,640           1       42,617,200,640         86.2
#   RECOMPUTE=core_attn --attention-backend unfused
#   10,405,190,144           1       10,795,137,536         56.5
#
# SIZE=tiny runs a small version on a CPU. README.md beside this file explains the
# other variables. Flags after the script's name override those of the script.
set -euo pipefail

NNODES=${NNODES:-1}
NPROC_PER_NODE=${NPROC_PER_NODE:-8}
DATA_PATH=${DATA_PATH:-}  # if empty: made-up tokens
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
