"""The time from the command to the first iteration, of the quickstart's model on two ranks.

    wall s | processor s | processor s of the launcher alone

It starts `torchrun .. pretrain_gpt.py` on made-up tokens, as the quickstart does on its text, with
a line for each iteration, and stops the clock at the first line. The processor time is that of all
processes of a run of one iteration, from start to end. `python -c "import torch"` is measured
beside it: a launcher and two ranks import torch three times.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RUN = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 128 "
    "--max-position-embeddings 128 --position-embedding-type rope --hidden-dropout 0.0 "
    "--attention-dropout 0.0 --micro-batch-size 8 --train-iters 1 --lr 3e-3 --clip-grad 1.0 "
    "--tensor-model-parallel-size 2 --sequence-parallel --distributed-backend gloo --mock-data "
    "--vocab-size 4095 --log-interval 1 --eval-iters 0 --log-peak-memory"
)
FIRST = " 1/1 "


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write every sample")
    args = parser.parse_args()
    rows = [measure() for _ in range(args.repeats)]
    middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    print(f"medians of {args.repeats} starts on {os.cpu_count()} processors:")
    for name, value in middle.items():
        print(f"  {name:32}{value:6.2f} s")
    if args.json:
        report = {"run": RUN, "python": sys.version.split()[0], "samples": rows, "medians": middle}
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


def measure() -> dict[str, Any]:
    """One start, and one import of torch."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--local-addr", "127.0.0.1", "--nproc_per_node", "2", "pretrain_gpt.py"]
    first, whole = clocked([*command, *RUN.split()], FIRST)
    _, alone = clocked([sys.executable, "-c", "import torch"], "")
    return {
        "wall to the first iteration": first,
        "processor, whole run": whole,
        "processor, import torch": alone,
    }


def clocked(command: list[str], line: str) -> tuple[float, float]:
    """Returns the wall time until a line of the output contains a text, and the processor time."""
    before = processor_time()
    start = time.perf_counter()
    seen = 0.0
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for text in process.stdout:
            if line and line in text and not seen:
                seen = time.perf_counter() - start
    if process.returncode or (line and not seen):
        raise SystemExit(f"error: {' '.join(command)} ended with status {process.returncode}")
    return seen, processor_time() - before


def processor_time() -> float:
    """The processor seconds of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
