# The scripts beside this file source it. It has the flags that they share, and
# defines
#
#   launch_model FLAGS...   starts a run with the flags of all arrays and FLAGS,
#                           which override them
#
# A script adds to TRAINING_ARGS, and defines GPT_MODEL_ARGS and
# MODEL_PARALLEL_ARGS. Variables:
#
#   SIZE=tiny               replaces the value of each flag that TINY_ARGS has.
#                           The run then has the same kind of layout on the CPU of
#                           one machine.
#   RECOMPUTE               none, full, or the values of --recompute-modules
#   DATA_PATH               PREFIX of PREFIX.bin and PREFIX.idx, with tokens of
#                           TOKENIZER_MODEL. Without it the run trains on made-up
#                           tokens.
#   CHECKPOINT_PATH         where to save, and to continue from
#
# launch.sh reads NNODES and NPROC_PER_NODE. The scripts define the variables that
# are not set here.
# shellcheck disable=SC2034,SC2153,SC2154,SC2206

source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"

TRAINING_ARGS=(
    --bf16
    --train-iters "$TRAIN_ITERS"
    --lr-decay-style cosine
    --lr-warmup-fraction .01
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
)

case $RECOMPUTE in
    none) RECOMPUTE_ARGS=() ;;
    full) RECOMPUTE_ARGS=(--recompute-granularity full --recompute-method uniform) ;;
    # Not quoted: it may be several words.
    *) RECOMPUTE_ARGS=(--recompute-granularity selective --recompute-modules $RECOMPUTE) ;;
esac

if [[ $DATA_PATH ]]; then
    DATA_ARGS=(
        --data-path "$DATA_PATH"
        --tokenizer-type HuggingFaceTokenizer
        --tokenizer-model "${TOKENIZER_MODEL:?is not set: DATA_PATH needs its tokenizer}"
    )
else
    DATA_ARGS=(
        --mock-data
        --tokenizer-type NullTokenizer
        --vocab-size "$((VOCAB_SIZE - 1))"  # NullTokenizer adds one for the end of a document
    )
fi

EVAL_AND_LOGGING_ARGS=(
    --log-interval 1
    --eval-iters 0
)
if [[ ${CHECKPOINT_PATH:-} ]]; then
    EVAL_AND_LOGGING_ARGS+=(
        --log-throughput  # in the log file, beside the checkpoints
        --save "$CHECKPOINT_PATH"
        --save-interval 1000
        --load "$CHECKPOINT_PATH"
        --allow-fresh-start
    )
fi

TINY_ARGS=(
    --num-layers 4
    --hidden-size 64
    --ffn-hidden-size 96
    --num-attention-heads 4
    --num-query-groups 2
    --seq-length 64
    --max-position-embeddings 64
    --vocab-size 255
    --micro-batch-size 1
    --global-batch-size 4
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2
    --num-virtual-stages-per-pipeline-rank 2
    --distributed-backend gloo
)

launch_model() {
    local position flags=(
        "${GPT_MODEL_ARGS[@]}"
        "${TRAINING_ARGS[@]}"
        "${MODEL_PARALLEL_ARGS[@]}"
        ${RECOMPUTE_ARGS[@]+"${RECOMPUTE_ARGS[@]}"}  # bash < 4.4: may be empty
        "${DATA_ARGS[@]}"
        "${EVAL_AND_LOGGING_ARGS[@]}"
    )
    if [[ ${SIZE:-} == tiny ]]; then
        NNODES=1 NPROC_PER_NODE=2
        for ((position = 0; position < ${#TINY_ARGS[@]}; position += 2)); do
            if [[ " ${flags[*]} " == *" ${TINY_ARGS[position]} "* ]]; then
                flags+=("${TINY_ARGS[@]:position:2}")
            fi
        done
        if [[ " ${flags[*]} " == *" --pipeline-model-parallel-size "* ]]; then NPROC_PER_NODE=4; fi
    fi
    launch "${flags[@]}" "$@"
}
