"""Measures this machine for the time model: `python -m megatron_lite.tools.calibrate --output
here.json`

The file has the figures of plan/hardware.py, and `load_hardware("here.json")` reads it. The tool
measures matmuls of a few shapes in bfloat16 and float32, and the memory of a rank with its
bandwidth. All other figures are those of a known machine: the networks, and the shares that flash
attention and pointwise kernels reach. Then a small model is trained for some steps, and all times
get the factor that makes its time right. After a run of your own, `report --calibration` does so
for that. The tool takes half a minute. First set OMP_NUM_THREADS to the threads of one rank,
as for training.
"""

import dataclasses
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.benchmark import Timer

from megatron_lite.config.checks import InputError
from megatron_lite.config.run_flags import Parser
from megatron_lite.data.durable_files import replacing
from megatron_lite.plan.hardware import (
    CPU_MACHINE,
    Hardware,
    Matmuls,
    load_hardware,
    machine_names,
    machine_of_gpu,
    save_hardware,
)

from .command import check_ending, tool
from .report import read_run

# The smallest dimension varies most, because the fit is a function of it.
SHAPES = ((1024, 1024, 1024), (512, 512, 512), (1024, 1024, 128), (128, 1024, 1024), (64, 512, 512))
ELEMENTS = 1 << 24  # of memory-bound kernels
SECONDS = 1.0  # of each of about 12 measurements
LARGER = 8  # on a GPU every dimension and the elements are so many times as many
BAND = 0.2  # relative error that a plan is expected to have before a larger run says more
# The steps that tell the pace.
TRAINED = (
    "--train-iters 12 --lr 1e-4 --eval-iters 0 --mock-data --micro-batch-size 2 "
    "--global-batch-size 2 --hidden-dropout 0 --attention-dropout 0 --num-attention-heads 8 "
)
RUN = {
    "cpu": "--num-layers 4 --hidden-size 512 --seq-length 256 --max-position-embeddings 256 "
    "--vocab-size 5000",
    "cuda": "--bf16 --num-layers 4 --hidden-size 2048 --seq-length 2048 "
    "--max-position-embeddings 2048 --vocab-size 32000",
}


def _add_flags(parser: Parser) -> None:
    parser.add_argument("--output", required=True, metavar="FILE", help="a file that ends in .json")
    parser.add_argument(
        "--links-of",
        metavar="MACHINE",
        help="the machine whose networks and other figures are taken: "
        f"{', '.join(machine_names())} (default: cpu, or that of the GPU's name)",
    )


main = tool(
    "python -m megatron_lite.tools.calibrate",
    "Measures this machine for the prediction of step times.",
    _add_flags,
    lambda args: run(**vars(args)),
)


def run(output: str, links_of: str | None = None) -> None:
    """Writes the figures of this machine to the file `output`.

    Raises InputError for a machine that is of another kind, and for a file that cannot be written.
    """
    check_ending("--output", output, ".json")  # so that it can be given by its path
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if links_of is None and kind == "cuda":
        like = machine_of_gpu(torch.cuda.get_device_name(0))
    else:
        like = load_hardware(links_of or CPU_MACHINE)
    if like is None or like.device != kind:
        raise InputError(
            f"--links-of: name a known machine of this device, {kind}, whose networks and other "
            f"figures are taken: one of {', '.join(machine_names())}"
        )
    with replacing(output) as file:
        Path(file).touch()  # fails before anything is measured
        machine = measure(kind, like)
        pace = _pace(machine)
        save_hardware(dataclasses.replace(machine, pace=pace), file)
    for rates, name in ((machine.bf16, "bfloat16"), (machine.fp32, "float32")):
        print(
            f"{name}: {rates.peak_flops / 1e12:.3g} TFLOP/s, half of it at a smallest dimension of "
            f"{rates.half_dimension:.0f}"
        )
    print(
        f"memory: {machine.memory_bandwidth / 1e9:.3g} GB/s\n"
        f"steps of a small model took {pace:.2f} of what follows from these figures\n"
        f"{output}: written, to be corrected by "
        f"`report RUN_DIR --calibration {output} {output}` after a run with --machine {output}"
    )


def _pace(machine: Hardware) -> float:
    """Returns the time of steps of this engine, over what is predicted for a machine."""
    torch.cuda.empty_cache()  # the run is another process
    with TemporaryDirectory() as folder:
        file, metrics = (os.path.join(folder, one) for one in ("machine.json", "metrics.jsonl"))
        save_hardware(machine, file)
        words = [*TRAINED.split(), *RUN[machine.device].split(), "--machine", file]
        done = subprocess.run(
            [sys.executable, "-m", "megatron_lite", "train", *words, "--metrics-jsonl", metrics],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise InputError(f"a small model could not be trained: {done.stderr.strip()[-300:]}")
        found = read_run([metrics]).summary
    return float(found["step_ms_measured"] / found["step_ms_predicted"])


def measure(device: str, like: Hardware) -> Hardware:
    """Returns the figures of this machine. like: the machine whose other figures are taken."""
    cuda = device == "cuda"
    elements = ELEMENTS * (LARGER if cuda else 1)
    source = torch.ones(elements, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / _seconds(lambda: target.copy_(source))
    pinned = torch.empty(elements, pin_memory=cuda)
    # An update reads a weight, its gradient and two moments, and writes all but the gradient.
    weight = torch.ones(elements)
    weight.grad = torch.ones(elements)
    updated = 7 * source.nbytes / _seconds(torch.optim.AdamW([weight], fused=True).step)
    to_host = source.nbytes / _seconds(lambda: pinned.copy_(source, non_blocking=True))
    ranks = torch.cuda.device_count() if cuda else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
    return dataclasses.replace(
        like,
        name=platform.node() or "this machine",
        ranks_per_node=ranks,
        memory_bytes=torch.cuda.get_device_properties(0).total_memory if cuda else memory,
        memory_bandwidth=copied,
        memory_efficiency=1.0,
        multiprocessors=1,
        tile_m=1,
        tile_n=1,
        tile_s=0.0,
        bf16=_matmuls(like.bf16, device, torch.bfloat16),
        fp32=_matmuls(like.fp32, device, torch.float32),
        band=BAND,
        band_of_several=max(BAND, like.band_of_several),
        pace=1.0,
        host_bandwidth=to_host,
        host_memory_bandwidth=updated,
        sources={
            "all figures": f"measured by megatron_lite.tools.calibrate with torch "
            f"{torch.__version__} and {torch.get_num_threads()} threads",
            "peak_flops, half_dimension": "a fit to matmuls of several shapes",
            "pace": "some steps of a small model",
            "inside, between, flash, eager, compiled, captured, overlap": f"those of {like.name}",
        },
    )


def _seconds(action: Callable[[], object]) -> float:
    """Returns the time of the fastest block of calls: other programs disturb that one least."""
    timer = Timer("action()", globals=dict(action=action), num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=SECONDS).times)


def fit(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Returns the curve through (smallest dimension, rate) with the least relative errors, as the
    peak and the half dimension: rate = peak x dimension / (dimension + half_dimension), in FLOP/s.

    1 / rate = 1 / peak + (half_dimension / peak) / dimension is a line. A slope below 0, which
    noise can cause, becomes 0.
    """
    dimensions, rates = np.array(samples, dtype=float).T
    slope, inverse = np.polyfit(1 / dimensions, 1 / rates, 1, w=rates)
    if slope >= 0 and inverse > 0:
        return float(1 / inverse), float(slope / inverse)
    return float(np.sum(rates**2) / np.sum(rates)), 0.0


def _matmuls(like: Matmuls, device: str, dtype: torch.dtype) -> Matmuls:
    """Returns the measured rates of matmuls in one format. like: those of another machine."""
    samples, larger = [], LARGER if device == "cuda" else 1
    for shape in SHAPES:
        m, n, k = (larger * one for one in shape)
        x = torch.randn(m, k, device=device).to(dtype)
        weight = torch.randn(n, k, device=device).to(dtype)
        taken = _seconds(partial(F.linear, x, weight))
        samples.append((min(m, n, k), 2.0 * m * n * k / taken))
    peak, half_dimension = fit(samples)
    return dataclasses.replace(
        like, peak_flops=peak, max_efficiency=1.0, half_dimension=half_dimension
    )


if __name__ == "__main__":
    sys.exit(main())
