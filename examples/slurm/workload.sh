# The job scripts beside this file source it. It defines FLAGS, the flags of the training. To change
# the training, edit this file, set the variables below, or give flags to the job script.
#
#   MODEL             a known model (`megatron-lite plan --help`) in place of the GPT below
#   EP, POLICY        expert-parallel ranks of a MODEL with experts, and its --recompute-policy
#   TP, PP            sizes of the tensor- and pipeline-parallel groups. TP defaults to the number
#                     of ranks of a node, so that no tensor-parallel group spans two nodes.
#   CHECKPOINT_PATH   where to save, and to continue from: a directory that every node sees
#   DATA_PATH         PREFIX of PREFIX.bin and PREFIX.idx, with tokens of TOKENIZER_MODEL. Without
#                     it the run trains on made-up tokens.
# shellcheck disable=SC2034,SC2154  # the scripts read FLAGS and define root

TP=${TP:-$RANKS_PER_NODE}
PP=${PP:-1}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-$root/runs/$SLURM_JOB_NAME}

GPT_MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --num-attention-heads 32
    --seq-length 4096
    --max-position-embeddings 4096
    --position-embedding-type rope
)

if [[ ${MODEL:-} ]]; then GPT_MODEL_ARGS=(--model "$MODEL" --seq-length 4096); fi

TRAINING_ARGS=(
    --bf16
    --micro-batch-size 1
    --global-batch-size 128
    --train-iters 100000
    --lr 3.0e-4
    --min-lr 3.0e-5
    --lr-decay-style cosine
    --lr-warmup-fraction .01
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --exit-signal-handler
    --distributed-timeout-minutes 10
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
)
if ((TP > 1)); then MODEL_PARALLEL_ARGS+=(--sequence-parallel); fi
if [[ ${EP:-} ]]; then
    MODEL_PARALLEL_ARGS+=(
        --expert-model-parallel-size "$EP"
        --moe-token-dispatcher-type alltoall
        --use-distributed-optimizer
        --overlap-grad-reduce
        --recompute-policy "${POLICY:-*:none}"
    )
fi

if [[ ${DATA_PATH:-} ]]; then
    DATA_ARGS=(
        --data-path "$DATA_PATH"
        --tokenizer-type HuggingFaceTokenizer
        --tokenizer-model "${TOKENIZER_MODEL:?is not set: DATA_PATH needs its tokenizer}"
    )
else
    DATA_ARGS=(
        --mock-data
        --tokenizer-type NullTokenizer
        --vocab-size 32767
    )
fi

EVAL_AND_LOGGING_ARGS=(
    --log-interval 10
    --eval-interval 1000
    --eval-iters 10
    --save "$CHECKPOINT_PATH"
    --save-interval 500
    --load "$CHECKPOINT_PATH"
    --allow-fresh-start
    --metrics-jsonl "$CHECKPOINT_PATH/metrics.jsonl"
)

FLAGS=(
    "${GPT_MODEL_ARGS[@]}"
    "${TRAINING_ARGS[@]}"
    "${MODEL_PARALLEL_ARGS[@]}"
    "${DATA_ARGS[@]}"
    "${EVAL_AND_LOGGING_ARGS[@]}"
)
