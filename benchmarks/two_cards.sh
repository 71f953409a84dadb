#!/usr/bin/env bash
# On a machine with two CUDA GPUs, in some 10 minutes: every layout of two ranks against one rank, under five policies.
#   bash benchmarks/two_cards.sh                  DEVICE=cpu bash benchmarks/two_cards.sh    (a rehearsal over gloo)
# With TORCH_CUDA_SANITIZER=1 in the environment torch also looks for kernels that race.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    if [[ -x $root/.venv/bin/python ]]; then PYTHON=$root/.venv/bin/python; fi
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
cd "$root"
exec "$PYTHON" benchmarks/two_cards.py --device "${DEVICE:-cuda}" "$@"
