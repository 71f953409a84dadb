#!/usr/bin/env bash
# Trains a small Mixtral-style model on the text of the quickstart, which must
# have run before. Each layer has 8 experts, of which a token chooses 2. The
# experts are spread over EP ranks, which share all other weights. The log tells
# how full the fullest expert and the fullest rank are. On a laptop's CPU:
#   bash examples/quickstart.sh && bash examples/pretrain_moe_small.sh
#
# Flags after the script's name override those of the script. The run saves to
# CHECKPOINT_PATH, and a second start continues from there, also at another EP.
set -euo pipefail

NPROC_PER_NODE=${NPROC_PER_NODE:-2}
TP=${TP:-2}
EP=${EP:-2}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
CHECKPOINT_PATH=${CHECKPOINT_PATH:-$root/runs/moe_small}
DATA=${DATA:-$root/runs/quickstart/data-auto}

GPT_MODEL_ARGS=(
    --num-layers 4
    --hidden-size 128
    --num-attention-heads 4
    --seq-length 128
    --max-position-embeddings 128
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --num-experts 8
    --moe-router-topk 2
    --moe-ffn-hidden-size 176
    --moe-router-dtype fp32
    --moe-aux-loss-coeff 1e-2
)

TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 16
    --train-iters 120
    --lr 3.0e-3
    --min-lr 3.0e-4
    --lr-decay-style cosine
    --lr-warmup-fraction .1
    --clip-grad 1.0
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP"
    --sequence-parallel
    --expert-tensor-parallel-size 1
    --expert-model-parallel-size "$EP"
    --moe-token-dispatcher-type alltoall
)

DATA_ARGS=(
    --data-path "$DATA/corpus_text_document"
    --split 949,50,1
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$DATA/tokenizer.json"
)

EVAL_AND_LOGGING_ARGS=(
    --log-interval 20
    --eval-interval 60
    --eval-iters 2
    --save "$CHECKPOINT_PATH"
    --save-interval 60
    --load "$CHECKPOINT_PATH"
    --allow-fresh-start
    --metrics-jsonl "$CHECKPOINT_PATH/metrics.jsonl"
)

launch \
    "${GPT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    "$@"
