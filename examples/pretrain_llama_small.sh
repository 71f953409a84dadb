#!/usr/bin/env bash
# Trains a small Llama-style model on mock data: rotary positions, RMSNorm,
# SwiGLU, grouped-query attention, no biases, untied embeddings. It runs on a
# laptop's CPU. On a machine with 8 GPUs this command gives a data-parallel size
# of 8 / 4 = 2:
#   NPROC_PER_NODE=8 TP=4 bash examples/pretrain_llama_small.sh --bf16
#
# It needs an environment with megatron_lite: bash examples/quickstart.sh makes
# .venv. Flags after the script's name override those of the script. The run saves
# to CHECKPOINT_PATH, and a second start continues from there. To start anew,
# remove that directory or name another one.
set -euo pipefail

NPROC_PER_NODE=${NPROC_PER_NODE:-2}
TP=${TP:-2}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
CHECKPOINT_PATH=${CHECKPOINT_PATH:-$root/runs/llama_small}

GPT_MODEL_ARGS=(
    --num-layers 4
    --hidden-size 128
    --num-attention-heads 8
    --seq-length 128
    --max-position-embeddings 128
    --position-embedding-type rope
    --rotary-base 10000
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --ffn-hidden-size 352
    --group-query-attention
    --num-query-groups 4
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
)

TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 16
    --train-iters 20
    --lr 6.0e-4
    --min-lr 6.0e-5
    --lr-decay-style cosine
    --lr-warmup-fraction .1
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.02
    --clip-grad 1.0
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP"
    --sequence-parallel
)

DATA_ARGS=(
    --mock-data
    --tokenizer-type NullTokenizer
    --vocab-size 1023
)

EVAL_AND_LOGGING_ARGS=(
    --log-interval 5
    --eval-interval 10
    --eval-iters 2
    --save "$CHECKPOINT_PATH"
    --save-interval 10
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
