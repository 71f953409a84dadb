"""Trains one small model in every layout of two ranks, and compares it with one rank.

For each layout: the largest difference of a loss from that of one rank, whether the bytes kept for
backward are the predicted ones, and the time of a step over that of one rank with the same global
batch. Two policies of one layout must give the same text of every loss. On two GPUs the ranks talk
through NCCL; `--device cpu` rehearses over gloo.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median

from tests.support.commands import run_command

LAYOUTS = {
    "TP 2": "--tensor-model-parallel-size 2",
    "TP 2, SP": "--tensor-model-parallel-size 2 --sequence-parallel",
    "PP 2": "--pipeline-model-parallel-size 2",
    "CP 2": "--context-parallel-size 2",
    "DP 2, overlap": "--overlap-grad-reduce",
    "ZeRO-1, overlap": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "FSDP2": "--use-torch-fsdp2",
}
POLICIES = {
    "none": "*:none",
    "full": "*:full",
    "pointwise": "*:pointwise",
    "full@split": "*:full@split",
    "full@host": "*:full@host",
}
SIZES = {
    "cpu": (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 255 "
        "--max-position-embeddings 64"
    ),
    "cuda": (
        "--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096 --bf16 "
        "--vocab-size 32000 --max-position-embeddings 4096"
    ),
}
COMMON = (
    "--micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --mock-data --eval-iters 0 --swiglu "
    "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--hidden-dropout 0 --attention-dropout 0 --deterministic-mode"
)
TOLERANCE = {"cpu": 1e-5, "cuda": 2e-2}  # of a loss; the order of sums differs between layouts


def rows_of(device, ranks, flags, steps):
    """Returns what each step of a run wrote, or the end of its errors."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "metrics.jsonl"
        backend = "gloo" if device == "cpu" else "nccl"
        words = (
            f"{SIZES[device]} {COMMON} "
            f"--train-iters {steps} --distributed-backend {backend} --metrics-jsonl {file} {flags}"
        )
        done = run_command(*words.split(), ranks=ranks, timeout=None)
        if done.returncode:
            lines = done.stderr.splitlines() or ["no output"]
            own = [line for line in lines if "pretrain_gpt.py: error" in line]
            return (own or lines)[0][:160]
        return [json.loads(line) for line in file.read_text().splitlines() if "lm_loss" in line]


def main(argv=None):
    """Returns 0, or 1 if a loss differs, a policy changes one, or bytes are not as predicted."""
    parser = argparse.ArgumentParser(prog="two_cards.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=list(SIZES), default="cuda")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    args = parser.parse_args(argv)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    alone = rows_of(args.device, 1, "", args.steps)
    if isinstance(alone, str):
        print(f"one rank: {alone}", file=sys.stderr)
        return 1
    status, first = 0, {}
    print(f"{'layout':18}{'policy':12}{'loss differs':>13}{'ms':>9}{'/ one rank':>11}  kept bytes")
    for layout, policy in itertools.product(args.layouts, args.policies):
        flags = f"{LAYOUTS[layout]} --recompute-policy {POLICIES[policy]}"
        rows = rows_of(args.device, 2, flags, args.steps)
        start = f"{layout:18}{policy:12}"
        if isinstance(rows, str):
            refused = "@" in policy  # no group to split over, or no memory of a host
            status |= not refused
            print(f"{start}{'refused' if refused else 'FAILED'}: {rows}")
            continue
        losses = [row["lm_loss"] for row in rows]
        differs = max(abs(a["lm_loss"] - b) for a, b in zip(alone, losses, strict=True))
        ms, base = (median(row["iteration_ms"] for row in of[1:]) for of in (rows, alone))
        exact = all(
            row["activation_bytes_predicted"] == row["activation_bytes_measured"] for row in rows
        )
        kept = "as predicted" if exact else "NOT as predicted"
        print(f"{start}{differs:13.2g}{ms:9.1f}{ms / base:11.2f}  {kept}", flush=True)
        if first.setdefault(layout, losses) != losses:
            print(f"{layout}: A POLICY CHANGES A LOSS: {first[layout]}, {losses}")
            exact = False
        status |= not exact or differs > TOLERANCE[args.device]
    return status


if __name__ == "__main__":
    sys.exit(main())
