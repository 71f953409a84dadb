#!/usr/bin/env bash
# The test-suite for work in progress, in .venv (or $VENV): ruff, mypy, pytest. CONTRIBUTING.md says how long it takes.
# Further arguments go to pytest: bash tests/run.sh -k resume. Fails if any of the three fails.
# Left out are tests marked `gpu` (benchmarks/gpu.sh runs them), `long` and `weekly`. .ci/run runs the long ones too
# (-m 'not weekly'). Everything, in an hour: FULL_GRIDS=1 bash tests/run.sh -m ''
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/examples/environment.sh"
PIP_QUIET=1 use_environment "$root" test
export OMP_NUM_THREADS=1  # the tests start several processes
# Without compiled files each of the processes compiles all of the tests again, in ten seconds of processor time.
unset PYTHONDONTWRITEBYTECODE
cd "$root"

types=$(mktemp)
checker=
trap 'if [[ $checker ]]; then kill "$checker" 2>/dev/null || true; fi; rm -f "$types"' EXIT

failed=()
ruff check . || failed+=("ruff check")
ruff format --check --quiet . || { echo "these files are not formatted: run ruff format ." && ruff format --check .; failed+=("ruff format"); }
mypy >"$types" 2>&1 &  # one process, which beside the tests leaves no core idle
checker=$!
# One process more than there are cores, since tests wait for their ranks. worksteal: a process gets tests that lie together,
# which share what a file prepares.
cores=$(getconf _NPROCESSORS_ONLN)
python -m pytest --numprocesses "${PYTEST_WORKERS:-$((cores < 8 ? cores + 1 : 8))}" --dist worksteal -m 'not long and not weekly' "$@" || failed+=(pytest)
wait "$checker" || failed+=(mypy)
checker=
cat "$types"
if ((${#failed[@]})); then
    printf 'failed: %s\n' "${failed[@]}"
    exit 1
fi
