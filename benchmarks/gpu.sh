#!/usr/bin/env bash
# Everything that needs a GPU, in one command and in about 5 minutes: a Llama-8B-shaped stack in bf16 beside the peers that are
# installed, the tests marked `gpu`, and the benchmarks of step time and of recomputation.
# Needs one CUDA device and a Python (3.10 or newer) with torch; other packages are used where they are there, and the report
# names those that are not. No network. Writes one JSON to the given file.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ ${1:-} == -h || ${1:-} == --help || $# -gt 1 ]]; then
    cat <<USAGE
Usage: bash benchmarks/gpu.sh [FILE]        writes FILE, by default benchmarks/results/gpu.json

Read from the environment: PYTHON (default python3), PRESETS (shapes, of which the first that step_time.py runs is
reported; default "gpt2 medium"), DEVICE=cpu (a rehearsal without a GPU; try PRESETS=tiny with it).
USAGE
    if [[ $# -gt 1 ]]; then exit 2; else exit 0; fi
fi
output=${1:-$root/benchmarks/results/gpu.json}
[[ $output == /* ]] || output=$PWD/$output
: "${PYTHON:=python3}" "${PRESETS:=gpt2 medium}" "${DEVICE:=cuda}"
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
If you have this GPU for 5 minutes only, know this:
  - The first part, of at most 100 s, answers the main question: how near a bf16 step is to the card's own matmul rate ("of
    GEMM", target 55%), and whether a peer is faster ("/ ours" below 1). Peers: transformers and litgpt, where they are installed.
  - Then come the tests (110 s), the step times (60 s) and recomputation (100 s). Each part ends by itself at its limit.
  - Every part writes what it has finished, so $output has results even if a part was cut short.
    If you stop the whole script, the printed tables remain.
  - Nothing else should run on the card. No clock or power setting is changed. Method: benchmarks/README.md.
FIRST
if [[ $DEVICE == cuda ]]; then
    nvidia-smi --query-gpu=name,driver_version,memory.used,memory.total,clocks.sm,power.limit,temperature.gpu --format=csv,noheader \
        2>/dev/null || echo "nvidia-smi is not there"
fi

echo "[1/5] A Llama-8B-shaped stack in bf16"
size=(--device "$DEVICE")
if [[ $DEVICE == cpu ]]; then size+=(--preset tiny --rounds 2); fi
timeout 100 "$PYTHON" benchmarks/gpu_step.py "${size[@]}" --json "$parts/stack.json"
stack_status=$?

echo "[2/5] Tests"
CUBLAS_WORKSPACE_CONFIG=:4096:8 timeout 110 "$PYTHON" tests/gpu/run.py --device "$DEVICE" --json "$parts/tests.json"
tests_status=$?

echo "[3/5] Step time"
for preset in $PRESETS; do
    rm -f "$parts/step_time.json"
    timeout 60 "$PYTHON" benchmarks/step_time.py --device "$DEVICE" --preset "$preset" --repeats 5 --steps-per-round 3 \
        --json "$parts/step_time.json"
    step_time_status=$?
    # Cut short, it leaves the blocks that it finished.
    if [[ -s $parts/step_time.json ]]; then break; fi
done

echo "[4/5] Recomputation, $preset"
timeout 100 "$PYTHON" benchmarks/recompute.py --device "$DEVICE" --preset "$preset" --dtype bf16 --dropout 0.1 \
    --repeats 3 --steps-per-round 1 --json "$parts/recompute.json" --engines none "uniform 1" "uniform 2" core_attn mlp \
    "*:pointwise" "*:full@host" "torch layers, reentrant" "torch layers, non-reentrant" "torch mlp, reentrant" \
    "transformers, none" "transformers, reentrant"
recompute_status=$?

echo "[5/5] Report"
DEVICE=$DEVICE "$PYTHON" - "$parts" "$output" "$tests_status" "$step_time_status" "$recompute_status" \
    "$stack_status" <<'REPORT'
import datetime, importlib.metadata, json, os, platform, subprocess, sys
from collections import Counter
from pathlib import Path

import torch

parts, output = Path(sys.argv[1]), Path(sys.argv[2])
tests_status, step_time_status, recompute_status, stack_status = map(int, sys.argv[3:])


def part(name):
    path = parts / name
    return json.loads(path.read_text()) if path.is_file() else None


def git(*arguments):
    try:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def version(package):
    try:
        __import__(package)
        return importlib.metadata.version(package)
    except ImportError:
        return None


device = {"name": platform.machine()}
if os.environ["DEVICE"] == "cuda":
    properties = torch.cuda.get_device_properties(0)
    device = {"name": properties.name, "memory_bytes": properties.total_memory,
              "compute_capability": f"{properties.major}.{properties.minor}"}
tests, step_time, recompute = part("tests.json"), part("step_time.json"), part("recompute.json")
counts = Counter(test["outcome"] for test in (tests or {}).values())
packages = {name: version(name) for name in ("numpy", "pytest", "rich", "safetensors", "tokenizers", "transformers")}
changes = git("status", "--porcelain")
report = {
    "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    "git_commit": git("rev-parse", "HEAD"), "git_changed_files": None if changes is None else len(changes.splitlines()),
    "device": device, "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
    "packages": packages, "missing_packages": [name for name, found in packages.items() if found is None],
    "stack_status": stack_status, "stack": part("stack.json"),
    "tests_status": tests_status, "tests_counts": counts, "tests": tests,
    "step_time_status": step_time_status, "step_time": step_time,
    "recompute_status": recompute_status, "recompute": recompute,
}
temporary = output.with_name(output.name + ".tmp")
temporary.write_text(json.dumps(report, indent=1) + "\n")
temporary.replace(output)
print(f"{output}: tests {dict(counts)}, {len(step_time['rows']) if step_time else 0} rows of step times, "
      f"{len(recompute['rows']) if recompute else 0} of recomputation, not installed: {', '.join(report['missing_packages']) or 'nothing'}")
sys.exit(0 if tests_status == step_time_status == recompute_status == stack_status == 0 else 1)
REPORT
