"""What the commands of the pages print, and the parts of it that a page shows."""

import os
import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from tests.docs.marks import ROOT
from tests.support.commands import environment
from tests.support.limits import HANG_S

RECORDS = ROOT / "docs" / "records"
# The command that an installation makes: tests may run without one.
INSTALLED = 'megatron-lite() { python -m megatron_lite "$@"; }; '
# Runs that take long. `python -m tests.docs.generate --record NAME` writes docs/records/NAME.txt.
COMMANDS = {
    "quickstart": "bash examples/quickstart.sh",
    "peak": (
        "python pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 8"
        " --seq-length 256 --max-position-embeddings 256 --micro-batch-size 4 --global-batch-size 4"
        " --train-iters 2 --lr 1e-3 --mock-data --vocab-size 4095 --log-peak-memory"
        " --eval-iters 0 --log-interval 1 --distributed-backend gloo"
    ),
    "fit": "python -c \"$(sed -n '/^import torch, transformers/,/^print(fit/p' README.md)\"",
    "budgets": (
        "python benchmarks/budgets.py --threads 1 --clock cpu --picture docs/pictures/budgets.svg"
        " 2>/dev/null"
    ),
    "verified": "python -c \"$(sed -n '/^import time, random/,/^print(f/p' docs/any-model.md)\"",
    "dry_run": (
        "NPROC_PER_NODE=1 bash examples/large/llama3_8b.sh --dry-run-memory"
        " --dry-run-world-size 8 --dry-run-ranks 0 --dry-run-device cpu"
    ),
    "one_card": (
        "for gpu in rtx4090 l40s h100-80gb; do"
        " for model in qwen3-0.6b qwen3-1.7b qwen3-4b qwen3-8b; do echo $model;"
        " megatron-lite plan --model $model --seq-length 4096 --gpus 1 --gpu $gpu"
        " --micro-batch-size 1 | grep -A1 '^1 ' | grep -v '^--\\|^$\\|^The' || true; done; done"
    ),
    "long_plan": (
        "megatron-lite plan --model llama3-8b --seq-length 1048576 --gpus 8 --gpu h100-80gb"
    ),
    "experts_plan": "megatron-lite plan --model mixtral-8x7b --gpus 64 --gpu h100-80gb",
}

# The runs of the first page's picture: docs/records/memory_NAME.json, by name the policy.
MEMORY_RUNS = {"none": "*:none", "every2": "every-2:full", "full": "*:full"}
MEMORY = (
    "python pretrain_gpt.py --num-layers 6 --hidden-size 256 --num-attention-heads 8"
    " --seq-length 256 --max-position-embeddings 256 --micro-batch-size 4 --global-batch-size 4"
    " --train-iters 2 --lr 1e-3 --mock-data --vocab-size 1000 --attention-dropout 0.0"
    " --eval-iters 0 --distributed-backend gloo"
)


@contextmanager
def folder():
    """A new folder with links to what the repository's root has, to run commands in."""
    with tempfile.TemporaryDirectory() as name:
        for entry in ROOT.iterdir():
            if not entry.name.startswith(".") or entry.name == ".venv":
                Path(name, entry.name).symlink_to(entry)
        yield Path(name)


def run(command, where, *, timeout=HANG_S):
    """Returns what the command prints on both streams. An exit status above 1 is an error.

    Status 1 is that of `tools/plan` if a plan fits only in a part of the reserve.
    """
    python = Path(sys.executable).parent
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", INSTALLED + command],
        cwd=where,
        env=environment(
            PYTHONPATH=str(ROOT), PATH=f"{python}{os.pathsep}{os.environ['PATH']}", COLUMNS="100"
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    text = done.stdout.replace(f"{where.resolve()}/", "").replace(f"{ROOT}/", "")
    text = text.replace(str(ROOT), ".")
    if done.returncode > 1 or "Traceback" in text:
        raise RuntimeError(f"{command}\nended with status {done.returncode}:\n{text}")
    return "\n".join(line.rstrip() for line in text.splitlines())


@lru_cache
def output(command):
    """Returns what a command that takes seconds prints, in a folder of its own."""
    with folder() as where:
        return run(command, where)


def record(name):
    """Returns the output in docs/records. Its first line must have the command of COMMANDS."""
    first, _, text = (RECORDS / f"{name}.txt").read_text(encoding="utf-8").partition("\n")
    if first != f"$ {COMMANDS[name]}":
        raise ValueError(f"docs/records/{name}.txt is of {first!r}: record it again")
    return text.rstrip("\n")


def write_record(name):
    """Runs the command of a record, in minutes, and writes the record.

    The quickstart runs in the repository itself, whose environment it uses. OUTPUT names the folder
    for its files. A timeline has bytes and no times: a busy machine may record it.
    """
    with folder() as where:
        if name == "memory":
            for run_name, policy in MEMORY_RUNS.items():
                run(f"{MEMORY} --recompute-policy '{policy}' --memory-timeline one.json", where)
                (RECORDS / f"memory_{run_name}.json").write_bytes((where / "one.json").read_bytes())
            return
        os.environ["OUTPUT"] = str(where / "runs" / "quickstart")
        text = run(COMMANDS[name], ROOT if name == "quickstart" else where, timeout=3600)
    text = f"$ {COMMANDS[name]}\n{text.replace(f'{where}/', '')}\n"
    (RECORDS / f"{name}.txt").write_text(text, encoding="utf-8")


def kept(text, ranges):
    """Returns the lines that a page shows, cut to 104 characters.

    ranges: "A .. B" goes from the first line that contains A, after those kept before, to the next
    one that contains B. "A" alone: one line. "A ++ 3": three more.
    """
    lines = text.splitlines()
    shown = []
    last = 0
    for each in ranges:
        start, stop = _range(lines, last, each)
        shown += ["..."] * (start > last > 0) + lines[start:stop]
        last = stop
    if last:
        lines = shown + ["..."] * (last < len(lines))
    return "\n".join(line if len(line) <= 104 else line[:100] + " ..." for line in lines)


def _range(lines, place, value):
    more = re.fullmatch(r"(.*) \+\+ (\d+)", value)
    first, dots, last = value.partition(" .. ")
    if more:
        first = more[1]
    start = _find(lines, place, first) if first else place
    if more:
        return start, start + 1 + int(more[2])
    return start, (_find(lines, start, last) if dots else start) + 1


def _find(lines, place, text):
    for number in range(place, len(lines)):
        if text in lines[number]:
            return number
    raise ValueError(f"no line of the output contains {text!r} (after line {place})")
