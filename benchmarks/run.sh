#!/usr/bin/env bash
# One command, one run: forward and backward of the same models in megatron_lite and in every peer
# that can be installed, side by side on this machine's CPU. benchmarks/README.md says what is
# measured, and benchmarks/METHOD.md how.
#
#     bash benchmarks/run.sh                  everything: hours
#     bash benchmarks/run.sh --quick          a small shape, a few minutes
#     bash benchmarks/run.sh --shapes 8x512 --dtype float32 --threads 1 --tp 1
#     bash benchmarks/run.sh --contestants 'plain,megatron-core SDPA none'   only these, and ours
#     bash benchmarks/run.sh --minutes 15     at most 15 minutes for a setting: fewer rounds
#     bash benchmarks/run.sh --continue       adds what the results lack
#
# The peers are installed into an environment of their own: $BENCH_VENV, by default runs/peers. The
# environment of the project is neither used nor changed. PYTHON names the interpreter to make it
# with. Results: benchmarks/results/cpu/side-by-side.json, which docs/performance-peers.md shows, or
# with --output NAME benchmarks/results/NAME.json and two pictures beside it.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
: "${PYTHON:=python3}" "${BENCH_VENV:=$root/runs/peers}"
unset PYTHONHOME
export PYTHONPATH=

install() {
    "$PYTHON" -m venv "$BENCH_VENV"
    local pip=("$BENCH_VENV/bin/python" -m pip install --quiet --constraint "$root/constraints.txt")
    # On Linux the package index has torch with CUDA only; the CPU wheel has an index of its own.
    "${pip[@]}" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
    "${pip[@]}" numpy safetensors tokenizers rich tensorboard PyYAML transformers matplotlib
    # Their own requirements would bring GPU packages, or another torch.
    "${pip[@]}" --no-deps megatron-core==0.16.1 einops packaging
    "${pip[@]}" --no-deps litgpt==0.5.13 lightning lightning-utilities torchmetrics psutil \
        jsonargparse tqdm || echo "run.sh: litgpt cannot be installed: it is left out" >&2
}

# The mark changes with what is to be installed.
mark=$BENCH_VENV/.peers
state=$({ cat "$root/constraints.txt" && declare -f install; } | cksum)
if [[ $(cat "$mark" 2>/dev/null) != "$state" ]]; then
    echo "installing the peers into $BENCH_VENV"
    install
    echo "$state" >"$mark"
fi

export PYTHONPATH=$root PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore TOKENIZERS_PARALLELISM=false
cd "$root"
exec "$BENCH_VENV/bin/python" benchmarks/side_by_side.py "$@"
