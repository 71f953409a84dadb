"""Measures this machine for the time model: `python -m megatron_lite.tools.calibrate --output
here.json`

The file has the figures of plan/hardware.py, and `load_hardware("here.json")` reads it. The tool
measures matmuls of a few shapes in bfloat16 and float32, flash attention, the bandwidth of memory,
and an all-reduce of two ranks: gloo on a CPU, NCCL on two GPUs. It takes less than a minute. First
set OMP_NUM_THREADS to the threads of one rank, as for training.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence

import torch

from megatron_lite.config.checks import InputError
from megatron_lite.config.parser import Parser
from megatron_lite.data.durable_files import replacing
from megatron_lite.plan.hardware import load_hardware, machine_names
from megatron_lite.tools.command import exit_status
from megatron_lite.tools.device_rates import Effort, measure

# The smallest dimension varies most, because the fit is a function of it.
SHAPES = ((1024, 1024, 1024), (512, 512, 512), (1024, 1024, 128), (128, 1024, 1024), (64, 512, 512))
LARGER = 8  # on a GPU every dimension is so many times as large
LARGE_BYTES = 1 << 24


def main(
    argv: Sequence[str] | None = None,
    *,
    shapes: Sequence[tuple[int, int, int]] = SHAPES,
    large_bytes: int = LARGE_BYTES,
) -> int:
    """Measures and writes the file. Returns the exit status. shapes, large_bytes: see `run`."""
    parser = Parser(
        prog="python -m megatron_lite.tools.calibrate",
        allow_abbrev=False,
        description="Measures this machine for the prediction of step times.",
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="a file that ends in .json")
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="default: cuda where there is a GPU",
    )
    parser.add_argument(
        "--links-of",
        metavar="MACHINE",
        help=f"take the networks of a known machine ({', '.join(machine_names())}) instead of "
        "measuring an all-reduce; needed with one GPU",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=1.0,
        help="time of each of about 20 measurements (default: 1)",
    )
    args = parser.parse_args(argv)
    return exit_status(
        lambda: run(
            args.output,
            device=args.device,
            links_of=args.links_of,
            seconds=args.seconds,
            shapes=shapes,
            large_bytes=large_bytes,
        ),
        parser.prog,
    )


def run(
    output: str,
    *,
    device: str,
    links_of: str | None,
    seconds: float,
    shapes: Sequence[tuple[int, int, int]] = SHAPES,
    large_bytes: int = LARGE_BYTES,
) -> None:
    """Writes the figures of this machine to the file `output`.

    shapes: of the matmuls on a CPU. large_bytes: of its largest all-reduce. A GPU gets larger ones.
    Raises InputError for settings that cannot be measured, and for a file that cannot be written.
    """
    if not output.endswith(".json"):
        raise InputError(
            f"--output {output} must end in .json, so that it can be given by its path"
        )
    if not 0.0 < seconds <= 60.0:
        raise InputError(f"--seconds must be above 0 and at most 60 (got {seconds})")
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no GPU; give --device cpu")
    if kind == "cuda" and torch.cuda.device_count() < 2 and links_of is None:
        raise InputError(
            "one GPU cannot measure a network between GPUs: give --links-of MACHINE "
            f"({', '.join(machine_names())})"
        )
    larger = LARGER if kind == "cuda" else 1
    scale = Effort(
        seconds=seconds,
        shapes=tuple((m * larger, n * larger, k * larger) for m, n, k in shapes),
        elements=(1 << 24) * larger,
        all_reduce_bytes=large_bytes * larger,
    )
    known = None if links_of is None else load_hardware(links_of)
    machine = measure(torch.device(kind), scale, known)
    with replacing(output) as tmp, open(tmp, "w", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(machine), indent=2) + "\n")
    for rates, name in ((machine.bf16, "bfloat16"), (machine.fp32, "float32")):
        print(
            f"{name}: {rates.peak_flops / 1e12:.3g} TFLOP/s, half of it at a smallest dimension of "
            f"{rates.half_dimension:.0f}"
        )
    print(
        f"memory: {machine.memory_bandwidth / 1e9:.3g} GB/s, of which kernels reach "
        f"{machine.memory_efficiency:.0%}\n"
        f"all-reduce: {machine.inside.latency_s * 1e6:.3g} us a step, "
        f"{machine.inside.bandwidth / 1e9:.3g} GB/s\n{output}: written"
    )


if __name__ == "__main__":
    sys.exit(main())
