#!/usr/bin/env bash
# Puts every small mistake into a file that cosmic-ray knows (another operator, number or condition), one at a time, and
# runs tests: a mistake that no test finds is printed. For a week's end, not for CI: each mistake is one start of pytest.
#   bash tests/mutate.sh megatron_lite/recompute/saved.py tests/recompute/test_saved.py tests/recompute/test_offload.py
# It works on a clone of HEAD in a temporary folder. AT_MOST=200 takes that many mistakes, chosen at random.
set -euo pipefail

if (($# < 2)); then sed -n '/^# Puts/,/^set /{/^set /d; s/^# //; p}' "$0"; exit 2; fi
file=$1
shift
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/examples/environment.sh"
PIP_QUIET=1 use_environment "$root" test
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python -m pip install --quiet --target "$work/tools" cosmic-ray 2>/dev/null
git clone --quiet "$root" "$work/clone"
cd "$work/clone"
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD:$work/tools
cat >"$work/settings.toml" <<EOF
[cosmic-ray]
module-path = "$file"
timeout = 300.0
test-command = "python -m pytest -q -x -p no:cacheprovider -m 'not long and not weekly and not gpu' $*"
[cosmic-ray.distributor]
name = "local"
EOF
python -m cosmic_ray.cli baseline "$work/settings.toml"  # the tests pass without a mistake
python -m cosmic_ray.cli init "$work/settings.toml" "$work/session.sqlite" --force
python - "$work/session.sqlite" "${AT_MOST:-0}" <<'EOF'
import random, sqlite3, sys

session = sqlite3.connect(sys.argv[1])
# `int | None` is an annotation, and no operation.
types = [job for (job,) in session.execute("select job_id from mutation_specs where operator_name like '%BitOr%'")]
jobs = [job for (job,) in session.execute("select job_id from work_items") if job not in types]
number = int(sys.argv[2]) or len(jobs)
left_out = types + random.sample(jobs, max(0, len(jobs) - number))
for table in ("mutation_specs", "work_items"):
    session.executemany(f"delete from {table} where job_id = ?", [(job,) for job in left_out])
session.commit()
EOF
python -m cosmic_ray.cli exec "$work/settings.toml" "$work/session.sqlite"
python -m cosmic_ray.tools.report --surviving-only --show-diff "$work/session.sqlite"
