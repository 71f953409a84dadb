#!/usr/bin/env bash
# The whole test-suite in .venv (or $VENV): ruff, mypy, pytest. Further arguments go to pytest: bash tests/run.sh -k resume
# Fails if any of the three fails. Tests marked `gpu` are skipped here: benchmarks/gpu.sh runs them. Those marked `long` are left
# out: `bash tests/run.sh -m ''` runs all.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/examples/environment.sh"
PIP_QUIET=1 use_environment "$root" test
export OMP_NUM_THREADS=1  # the tests start several processes
cd "$root"

status=0
ruff check . || status=1
mypy || status=1
python -m pytest --numprocesses "${PYTEST_WORKERS:-2}" -m 'not long' "$@" || status=1
exit $status
