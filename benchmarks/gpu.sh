#!/usr/bin/env bash
# Everything that needs a GPU, in one command and in at most 9 minutes: training steps of five shapes in bf16 beside the peers
# that are installed, the tests marked `gpu`, and every recompute policy.
# Needs one CUDA device and a Python (3.10 or newer) with torch; other packages are used where they are there, and the report
# names those that are not. No network. Writes one JSON to the given file, and a page (.md) beside it.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ ${1:-} == -h || ${1:-} == --help || $# -gt 1 ]]; then
    cat <<USAGE
Usage: bash benchmarks/gpu.sh [FILE]        writes FILE, by default benchmarks/results/gpu.json

Read from the environment: PYTHON (default python3), DEVICE=cpu (a rehearsal without a GPU, with tiny shapes).
USAGE
    if [[ $# -gt 1 ]]; then exit 2; else exit 0; fi
fi
output=${1:-$root/benchmarks/results/gpu.json}
[[ $output == /* ]] || output=$PWD/$output
: "${PYTHON:=python3}" "${DEVICE:=cuda}"
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
cd "$root" || exit 2

if ! "$PYTHON" -c "import torch, numpy"; then
    echo "gpu.sh: error: $PYTHON has no torch, or no numpy: set PYTHON to one that has both" >&2
    exit 2
fi
if [[ $DEVICE == cuda ]] && ! "$PYTHON" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    echo "gpu.sh: error: torch sees no CUDA device (DEVICE=cpu rehearses without one)" >&2
    exit 2
fi
parts=$(mktemp -d) || exit 2
trap 'rm -rf "$parts"' EXIT
mkdir -p "$(dirname "$output")" || exit 2

cat <<FIRST
If you have this GPU for a few minutes only, know this:
  - The first part, of at most 108 s, answers the main question: how near a bf16 step of an 8B model's layers is to the card's
    own matmul rate, and whether a peer is faster ("/ ours" below 1). Peers: transformers, Liger, litgpt and megatron-core,
    where they are installed.
  - Then come a layer of Qwen3-30B-A3B (55 s), three smaller shapes (68 to 74 s), recomputation (60 s) and the tests (105 s).
  - Every part ends at its limit and writes what it has measured. If you stop the script, the tables remain.
  - Nothing else should run on the card. No clock or power setting is changed. Method: benchmarks/README.md.
FIRST
if [[ $DEVICE == cuda ]]; then
    nvidia-smi --query-gpu=name,driver_version,memory.used,memory.total,clocks.sm,power.limit,temperature.gpu --format=csv,noheader \
        2>/dev/null || echo "nvidia-smi is not there"
fi

# part NAME SECONDS ARGUMENTS: runs a program of this folder, and keeps its status
part() {
    local name=$1 seconds=$2 status=0
    shift 2
    echo "[$name]"
    timeout -k 15 "$seconds" "$PYTHON" "$@" --device "$DEVICE" --json "$parts/$name.json" || status=$?
    echo "$status" >"$parts/$name.status"
}
step=(benchmarks/step_time.py --dtype bf16 --dropout 0 --repeats 5)
rounds=(--repeats 3) big=(--preset 8b) llama=(--preset 1024) deep=(--preset 0.6b) experts=(--preset a3b) gpt2=(--preset gpt2) few=(--steps-per-round 3)
compile=() graph=()
if [[ $DEVICE == cpu ]]; then
    big=(--preset tiny) llama=(--preset tiny) deep=(--preset tiny) experts=(--preset tiny) gpt2=(--preset tiny) few=() rounds=(--repeats 1) step+=(--repeats 1)
else
    compile=(--compile) graph=(--cuda-graph)
fi
step+=("${compile[@]}")
part "stack-8b" 108 "${step[@]}" --seconds 102 --family llama "${big[@]}" --peers transformers --steps-per-round 1
part "experts-a3b" 55 "${step[@]}" --seconds 50 --family qwen3_moe "${experts[@]}" --steps-per-round 1
part "llama-28x1024" 74 "${step[@]}" --seconds 69 --family llama "${deep[@]}" --peers transformers --steps-per-round 1
part "llama-16x1024" 70 "${step[@]}" --seconds 65 --family llama "${llama[@]}" "${few[@]}"
part "gpt2" 68 "${step[@]}" --seconds 63 "${gpt2[@]}" --peers plain "${few[@]}"
part "recompute" 60 benchmarks/recompute.py "${gpt2[@]}" "${compile[@]}" "${graph[@]}" --dtype bf16 --dropout 0.1 "${rounds[@]}" --steps-per-round 1 \
    --engines none "uniform 1" "*:pointwise" "*:full@host" "*:pointwise@host"
export CUBLAS_WORKSPACE_CONFIG=:4096:8
part "tests" 105 tests/gpu/run.py
"$PYTHON" benchmarks/gpu_report.py "$parts" "$output"
