"""Measures this machine for the time model: `python -m megatron_lite.tools.calibrate --output
here.json`

The file has the figures of plan/hardware.py, and `load_hardware("here.json")` reads it. The tool
measures matmuls of a few shapes in bfloat16 and float32, flash attention, the bandwidth of memory,
and an all-reduce of two ranks: gloo on a CPU, NCCL on two GPUs. Two short training runs then give
what depends on this engine: the host's time for a launch, and the bandwidth of its pointwise
kernels. It takes about a minute. First set OMP_NUM_THREADS to the threads of one rank, as for
training.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.benchmark import Timer

from megatron_lite.config.checks import InputError
from megatron_lite.config.parser import Parser
from megatron_lite.config.plain import parse_json
from megatron_lite.config.run import RunConfig
from megatron_lite.config.run_flags import build_run, flags_of
from megatron_lite.data.durable_files import replacing
from megatron_lite.plan.hardware import Flash, Hardware, Link, Matmuls, load_hardware, machine_names
from megatron_lite.plan.step_time import step_time
from megatron_lite.tools.command import exit_status

# The smallest dimension varies most, because the fit is a function of it.
SHAPES = ((1024, 1024, 1024), (512, 512, 512), (1024, 1024, 128), (128, 1024, 1024), (64, 512, 512))
ELEMENTS, ALL_REDUCE_BYTES = 1 << 24, 1 << 24  # of memory-bound kernels, and of a large all-reduce
LARGER = 8  # on a GPU every dimension and both of these are so many times as large
SMALL_BYTES, HALVINGS = 8, 30
PROBES = ((64, 32), (512, 256))  # hidden sizes and sequence lengths of two short training runs
BAND = 0.15  # relative error that a plan is expected to have after a calibration


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and writes the file. Returns the exit status."""
    parser = Parser(
        prog="python -m megatron_lite.tools.calibrate",
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
    return exit_status(lambda: run(**vars(parser.parse_args(argv))), parser.prog)


def run(output: str, *, device: str, links_of: str | None, seconds: float) -> None:
    """Writes the figures of this machine to the file `output`.

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
    machine = measure(kind, seconds, None if links_of is None else load_hardware(links_of))
    with replacing(output) as tmp, open(tmp, "w", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(machine), indent=2) + "\n")
    for rates, name in ((machine.bf16, "bfloat16"), (machine.fp32, "float32")):
        print(
            f"{name}: {rates.peak_flops / 1e12:.3g} TFLOP/s, half of it at a smallest dimension of "
            f"{rates.half_dimension:.0f}"
        )
    print(
        f"memory: {machine.memory_bandwidth / 1e9:.3g} GB/s, of which pointwise kernels reach "
        f"{machine.eager.memory_efficiency:.0%}\n"
        f"launch of a kernel: {machine.eager.launch_s * 1e6:.3g} us\n"
        f"all-reduce: {machine.inside.latency_s * 1e6:.3g} us a step, "
        f"{machine.inside.bandwidth / 1e9:.3g} GB/s\n{output}: written"
    )


def measure(device: str, seconds: float, known: Hardware | None) -> Hardware:
    """Returns the figures of this machine.

    seconds: the time of each measurement. known: the machine whose networks are taken.
    """
    cuda = device == "cuda"
    elements = ELEMENTS * (LARGER if cuda else 1)
    source = torch.ones(elements, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / _seconds(lambda: target.copy_(source), seconds)
    pinned = torch.empty(elements, pin_memory=cuda)
    to_host = source.nbytes / _seconds(lambda: pinned.copy_(source, non_blocking=True), seconds)
    inside = known.inside if known else _all_reduce(device, seconds)
    ranks = torch.cuda.device_count() if cuda else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
    like = load_hardware(known.name if cuda and known else "h100-80gb" if cuda else "cpu")
    measured = dataclasses.replace(
        like,
        name=platform.node() or "this machine",
        ranks_per_node=known.ranks_per_node if known else ranks,
        memory_bytes=torch.cuda.get_device_properties(0).total_memory if cuda else memory,
        memory_bandwidth=copied,
        memory_efficiency=1.0,
        multiprocessors=1,
        tile_m=1,
        tile_n=1,
        bf16=_matmuls(device, torch.bfloat16, seconds),
        fp32=_matmuls(device, torch.float32, seconds),
        band=BAND,
        inside=inside,
        between=known.between if known else inside,
        host_bandwidth=to_host,
        sources={
            "all figures": f"measured by megatron_lite.tools.calibrate with torch "
            f"{torch.__version__} and {torch.get_num_threads()} threads",
            "peak_flops, half_dimension": "a fit to matmuls of several shapes",
            "eager, compiled": "training runs of this engine",
            "captured, loss_traffic, overlap": f"those of {like.name}",
            "inside, between": f"those of {known.name}"
            if known
            else "an all-reduce of two ranks on this machine",
        },
    )
    for mode in ("eager", "compiled") if cuda else ("eager",):
        measured = _with_mode(measured, mode)
    return measured if cuda else dataclasses.replace(measured, compiled=measured.eager)


def _with_mode(machine: Hardware, name: str) -> Hardware:
    """Returns the machine with the figures of a mode with which it predicts two training runs.

    The smaller run launches kernels that compute next to nothing. The larger one moves memory.
    """
    factor = LARGER if machine.device == "cuda" else 1
    figures = (("launch_s", 1e-9, 1e-3), ("memory_efficiency", 1.0, 1e-2))
    for (figure, fast, slow), sizes in zip(figures, PROBES, strict=True):
        config = _probe(*(size * factor for size in sizes), compiled=name == "compiled")
        measured = _step_seconds(config)
        for _ in range(HALVINGS):  # bisects the logarithm, as the time only grows towards `slow`
            middle = math.sqrt(fast * slow)
            mode = dataclasses.replace(getattr(machine, name), **{figure: middle})
            machine = dataclasses.replace(machine, **{name: mode})
            if step_time(config, machine, 1).seconds < measured:
                fast = middle
            else:
                slow = middle
    return machine


def _probe(hidden_size: int, seq_length: int, *, compiled: bool) -> RunConfig:
    """Returns a short run of a small model."""
    return build_run(
        {
            "model": {
                "num_layers": 4,
                "hidden_size": hidden_size,
                "num_attention_heads": max(1, hidden_size // 64),
                "max_position_embeddings": seq_length,
                "position_embedding_type": "rope",
                "normalization": "RMSNorm",
                "swiglu": True,
                "add_bias_linear": False,
                "hidden_dropout": 0.0,
                "attention_dropout": 0.0,
            },
            "training": {
                "micro_batch_size": 2,
                "global_batch_size": 2,
                "train_iters": 12,
                "torch_compile": compiled,
            },
            "data": {"seq_length": seq_length, "mock_data": True},
            "tokenizer": {"vocab_size": 1023},
            "lr_schedule": {"lr": 1e-4},
        }
    )


def _step_seconds(config: RunConfig) -> float:
    """Returns a time that the later steps of a run reach, in a process of its own.

    It is their lower quartile, since other programs disturb the slower ones.

    Raises InputError if the run fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "metrics.jsonl")
        words = [*flags_of(config), "--metrics-jsonl", file, "--log-interval", "1"]
        command = [sys.executable, "-m", "megatron_lite", "train", *words]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise InputError(f"a short training run failed: {ran.stderr.strip()[-500:]}")
        with open(file, encoding="utf-8") as lines:
            records = [parse_json(line) for line in lines]
    times = [one["iteration_ms"] for one in records if one.get("iteration_ms")]
    return statistics.quantiles(times[len(times) // 3 :], n=4)[0] / 1000.0


def _seconds(action: Callable[[], object], seconds: float) -> float:
    """Returns the time of the fastest block of calls: other programs disturb that one least."""
    timer = Timer("action()", globals=dict(action=action), num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=seconds).times)


class Fit(NamedTuple):
    """The rate of matmuls as peak x smallest / (smallest + half_dimension), in FLOP/s."""

    peak: float
    half_dimension: float


def fit(samples: Sequence[tuple[int, float]]) -> Fit:
    """Returns the curve through (smallest dimension, rate) with the least relative errors.

    1 / rate = 1 / peak + (half_dimension / peak) / dimension is a line. A slope below 0, which
    noise can cause, becomes 0.
    """
    dimensions, rates = np.array(samples, dtype=float).T
    if len({*dimensions}) > 1:
        slope, inverse = np.polyfit(1 / dimensions, 1 / rates, 1, w=rates)
        if slope >= 0 and inverse > 0:
            return Fit(float(1 / inverse), float(slope / inverse))
    return Fit(float(np.sum(rates**2) / np.sum(rates)), 0.0)


def _matmuls(device: str, dtype: torch.dtype, seconds: float) -> Matmuls:
    """Returns the rates of matmuls in one format."""
    samples, larger = [], LARGER if device == "cuda" else 1
    for shape in SHAPES:
        m, n, k = (larger * one for one in shape)
        x = torch.randn(m, k, device=device).to(dtype)
        weight = torch.randn(n, k, device=device).to(dtype)
        taken = _seconds(partial(F.linear, x, weight), seconds)
        samples.append((min(m, n, k), 2.0 * m * n * k / taken))
    curve = fit(samples)
    return Matmuls(
        peak_flops=curve.peak,
        max_efficiency=1.0,
        half_dimension=curve.half_dimension,
        flash=_flash(device, dtype, seconds, curve.peak),
    )


def _flash(device: str, dtype: torch.dtype, seconds: float, peak: float) -> Flash:
    """Returns the rates of causal flash attention, as shares of the peak of matmuls.

    Forward has two matmuls and backward five, and the mask leaves half.
    """
    heads, length, channels = 8, min(2048, (LARGER if device == "cuda" else 1) * 1024), 64
    query, key, value = (
        torch.randn(1, heads, length, channels, device=device).to(dtype).requires_grad_()
        for _ in range(3)
    )

    def shares() -> list[float]:
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        gradient = attended.detach()
        forward = _seconds(
            lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True), seconds
        )
        backward = _seconds(lambda: attended.backward(gradient, retain_graph=True), seconds)
        flops = heads * length * length * channels
        return [min(1.0, flops * n / time / peak) for n, time in ((2, forward), (5, backward))]

    usual = shares()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        deterministic = shares() if device == "cuda" else usual
    names = [field.name for field in dataclasses.fields(Flash)]
    return Flash(**dict(zip(names, [*usual, *deterministic], strict=True)))


def _all_reduce(device: str, seconds: float) -> Link:
    """Returns the network between two ranks."""
    num_bytes = ALL_REDUCE_BYTES * (LARGER if device == "cuda" else 1)
    with tempfile.TemporaryDirectory() as folder:
        args = (folder, device, seconds, (SMALL_BYTES, num_bytes))
        mp.spawn(_time_all_reduce, args=args, nprocs=2)
        with open(os.path.join(folder, "times"), encoding="utf-8") as file:
            small, large = parse_json(file.read(), longest=None)
    # An all-reduce of two ranks has two steps, and each rank receives every byte once.
    return Link(latency_s=small / 2, bandwidth=num_bytes / max(large - small, large / 2))


def _time_all_reduce(
    rank: int, folder: str, device: str, seconds: float, sizes: Sequence[int]
) -> None:
    """Writes the seconds of an all-reduce of each size. Two ranks call it together."""
    target = torch.device(device, rank) if device == "cuda" else torch.device(device)
    store = dist.FileStore(os.path.join(folder, "store"), 2)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=120),
    )
    try:
        times = []
        for num_bytes in sizes:
            tensor = torch.ones(num_bytes // 4, device=target)
            timer = Timer("reduce(tensor)", globals=dict(reduce=dist.all_reduce, tensor=tensor))
            # Both ranks make as many calls, as rank 0 finds that fit into the time.
            calls = torch.tensor([seconds / timer.timeit(2).mean], device=target)
            dist.broadcast(calls, 0)
            times.append(timer.timeit(max(int(calls.item()), 1)).mean)
        if rank == 0:
            with open(os.path.join(folder, "times"), "w", encoding="utf-8") as file:
                json.dump(times, file)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
