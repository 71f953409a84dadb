# The scripts beside this file source it. The model, its batches and its log are
# the same for every policy, so that you can compare memory, time and losses.
# Attention is unfused: flash attention rebuilds its scores by itself, so that
# recomputing core_attn would free nothing. Dropout is Megatron's default of 0.1.
# shellcheck disable=SC2034  # the scripts use the arrays

source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"

GPT_MODEL_ARGS=(
    --num-layers "$NUM_LAYERS"
    --hidden-size "$HIDDEN_SIZE"
    --num-attention-heads "$NUM_ATTENTION_HEADS"
    --seq-length "$SEQ_LENGTH"
    --max-position-embeddings "$SEQ_LENGTH"
    --attention-backend unfused
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 8
    --train-iters 20
    --lr 6.0e-4
    --min-lr 6.0e-5
    --lr-decay-style cosine
    --lr-warmup-fraction .1
    --clip-grad 1.0
)

DATA_ARGS=(
    --mock-data
    --tokenizer-type NullTokenizer
    --vocab-size 1023
)

EVAL_AND_LOGGING_ARGS=(
    --log-interval 5
    --eval-iters 0
)
