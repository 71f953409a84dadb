#!/usr/bin/env bash
# A check of time and memory beside plain PyTorch, in at most two minutes. Every figure is a ratio
# within one run, so any machine may run it. It uses the Python of the project ($PYTHON, or .venv).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    if [[ -x $root/.venv/bin/python ]]; then PYTHON=$root/.venv/bin/python; fi
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1
cd "$root"
status=0
timeout 120 "$PYTHON" benchmarks/smoke.py || status=$?
# The limit of time is for a machine that does too much else: it says nothing about this program.
if ((status == 124)); then echo "smoke.sh: not finished in 120 s: this machine is too busy to tell"; exit 0; fi
exit "$status"
