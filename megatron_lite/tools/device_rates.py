"""Measures the rates of a device: matmuls, attention, memory and an all-reduce of two ranks.

calibrate.py writes them into a file of plan/hardware.py.
"""

from __future__ import annotations

import datetime
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.plan.hardware import Hardware, Link, Matmuls

SMALL_BYTES = 8
RENDEZVOUS = datetime.timedelta(seconds=120)


class Effort(NamedTuple):
    """The extent of the measurements. seconds: the time that each of them may take."""

    seconds: float
    shapes: tuple[tuple[int, int, int], ...]
    elements: int
    all_reduce_bytes: int


class Fit(NamedTuple):
    """The rate of matmuls as peak x smallest / (smallest + half_dimension), in FLOP/s."""

    peak: float
    half_dimension: float


def measure(device: torch.device, scale: Effort, known: Hardware | None) -> Hardware:
    """Returns the figures of this machine.

    known: the machine whose networks are taken instead of measured ones.
    """
    clock = _Stopwatch(device, scale.seconds)
    copy_bandwidth = _copy_bandwidth(clock, scale)
    inside = known.inside if known else _all_reduce(device, scale)
    between = known.between if known else inside
    network = f"those of {known.name}" if known else "an all-reduce of two ranks on this machine"
    cuda = device.type == "cuda"
    ranks = torch.cuda.device_count() if cuda else os.cpu_count() or 1
    return Hardware(
        name=platform.node() or "this machine",
        device=device.type,
        ranks_per_node=known.ranks_per_node if known else ranks,
        memory_bytes=_memory_bytes(device) // (1 if cuda else ranks),
        memory_bandwidth=copy_bandwidth,
        memory_efficiency=min(1.0, _kernel_bandwidth(clock, scale) / copy_bandwidth),
        multiprocessors=1,
        tile_m=1,
        tile_n=1,
        kernel_s=_kernel_seconds(clock),
        bf16=_matmuls(clock, scale, torch.bfloat16),
        fp32=_matmuls(clock, scale, torch.float32),
        inside=inside,
        between=between,
        host_bandwidth=_host_bandwidth(clock, scale) if cuda else copy_bandwidth / 2,
        shares_cores=not cuda,
        sources={
            "all figures": f"measured by megatron_lite.tools.calibrate with torch "
            f"{torch.__version__} and {torch.get_num_threads()} threads",
            "peak_flops, half_dimension": "a fit to matmuls of several shapes",
            "memory_efficiency": "gelu, softmax and layer norm, forward and backward",
            "inside, between": network,
        },
    )


class _Stopwatch:
    """Times an action on a device.

    One thread on a CPU is timed by its processor time, which other programs hardly disturb.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device, self._seconds = device, seconds
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        self._now = time.process_time if alone else time.perf_counter

    def best(self, action: Callable[[], object]) -> float:
        """Returns the seconds of the fastest of the calls that fit into the given time.

        The first call warms up. The fastest call is the one that other programs disturb least.
        """
        action()
        best, end = math.inf, time.perf_counter() + self._seconds
        while best == math.inf or time.perf_counter() < end:
            self._wait()
            start = self._now()
            action()
            self._wait()
            best = min(best, max(self._now() - start, 1e-9))
        return best

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def fit(samples: Sequence[tuple[int, float]]) -> Fit:
    """Returns the curve through (smallest dimension, rate) with the least relative errors.

    1 / rate = 1 / peak + (half_dimension / peak) / dimension is a line. Each sample is scaled by
    its rate, so that errors are relative. A slope below 0, which noise can cause, becomes 0.
    """
    weights = [rate for _, rate in samples]
    slopes = [rate / dimension for dimension, rate in samples]
    # Minimizes sum (1 - a weight - b slope)^2.
    ww, ws, ss = (_dot(weights, weights), _dot(weights, slopes), _dot(slopes, slopes))
    w1, s1 = sum(weights), sum(slopes)
    determinant = ww * ss - ws * ws
    # It is 0 if all samples have one smallest dimension, which says nothing about the slope.
    a = (w1 * ss - s1 * ws) / determinant if determinant > 1e-12 * ww * ss else w1 / ww
    b = (s1 * ww - w1 * ws) / determinant if determinant > 1e-12 * ww * ss else 0.0
    if b < 0.0 or a <= 0.0:
        a, b = w1 / ww, 0.0
    return Fit(1.0 / a, b / a)


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(left, right, strict=True))


def _matmuls(clock: _Stopwatch, scale: Effort, dtype: torch.dtype) -> Matmuls:
    """Returns the rates of matmuls in one format."""
    samples = []
    for m, n, k in scale.shapes:
        x = torch.randn(m, k, device=clock.device).to(dtype)
        weight = torch.randn(n, k, device=clock.device).to(dtype)
        seconds = clock.best(lambda x=x, weight=weight: F.linear(x, weight))  # type: ignore[misc]
        samples.append((min(m, n, k), 2.0 * m * n * k / seconds))
    curve = fit(samples)
    return Matmuls(
        peak_flops=curve.peak,
        max_efficiency=1.0,
        half_dimension=curve.half_dimension,
        flash_efficiency=min(1.0, _flash_rate(clock, scale, dtype) / curve.peak),
    )


def _flash_rate(clock: _Stopwatch, scale: Effort, dtype: torch.dtype) -> float:
    """Returns the FLOP/s of causal flash attention, forward and backward.

    Forward has two matmuls and backward five. A causal mask leaves half of them.
    """
    heads, length, channels = 8, min(2048, scale.shapes[0][0]), 64
    query, key, value = (
        torch.randn(1, heads, length, channels, device=clock.device).to(dtype).requires_grad_()
        for _ in range(3)
    )

    def step() -> None:
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended.backward(attended.detach())

    done = 7 * 2 * heads * length * length * channels / 2
    return done / clock.best(step)


def _copy_bandwidth(clock: _Stopwatch, scale: Effort) -> float:
    """Returns the bytes per second that a copy reads and writes."""
    source = torch.ones(scale.elements, device=clock.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / clock.best(lambda: target.copy_(source))


def _kernel_bandwidth(clock: _Stopwatch, scale: Effort) -> float:
    """Returns the bytes per second that memory-bound kernels of a layer move."""
    width = 1024
    hidden = torch.randn(scale.elements // width // 4, width, device=clock.device).requires_grad_()
    kernels: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: F.softmax(x, -1),
        lambda x: F.layer_norm(x, (width,)),
    )

    def step() -> None:
        for kernel in kernels:
            output = kernel(hidden)
            output.backward(output.detach())
            hidden.grad = None

    # Forward reads and writes; backward reads two tensors and writes one.
    return len(kernels) * 5 * hidden.nbytes / clock.best(step)


def _host_bandwidth(clock: _Stopwatch, scale: Effort) -> float:
    """Returns the bytes per second of a copy to pinned host memory."""
    source = torch.ones(scale.elements, device=clock.device)
    target = torch.empty(scale.elements, pin_memory=True)
    return source.nbytes / clock.best(lambda: target.copy_(source, non_blocking=True))


def _kernel_seconds(clock: _Stopwatch) -> float:
    """Returns the fixed time of one kernel, with the bookkeeping of torch and autograd.

    It is the mean over the kernels of a chain of operators on a few elements. A linear layer has
    two kernels in backward, and the others have one.
    """
    hidden = torch.ones(2, 4, device=clock.device, requires_grad=True)
    weight = torch.ones(4, 4, device=clock.device, requires_grad=True)

    def step() -> None:
        normed = F.layer_norm(hidden, (4,))
        output = F.gelu(F.linear(normed, weight), approximate="tanh") + hidden
        output.backward(output.detach())

    return clock.best(step) / (4 + 5)


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _all_reduce(device: torch.device, scale: Effort) -> Link:
    """Returns the network between two ranks: this process, and one that it starts."""
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "store")
        other = get_context("spawn").Process(
            target=_time_all_reduce, args=(1, file, device.type, scale), daemon=True
        )
        other.start()
        try:
            small, large = _time_all_reduce(0, file, device.type, scale)
        finally:
            other.join(10.0)
            if other.is_alive():
                other.kill()
    # An all-reduce of two ranks has two steps, and each rank receives every byte once.
    return Link(
        latency_s=small / 2, bandwidth=scale.all_reduce_bytes / max(large - small, large / 2)
    )


def _time_all_reduce(rank: int, file: str, device: str, scale: Effort) -> tuple[float, float]:
    """Returns the seconds of a small and of a large all-reduce. Two ranks call it together."""
    target = torch.device(device, rank) if device == "cuda" else torch.device(device)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=dist.FileStore(file, 2),
        rank=rank,
        world_size=2,
        timeout=RENDEZVOUS,
    )
    try:
        times = []
        for num_bytes in (SMALL_BYTES, scale.all_reduce_bytes):
            tensor = torch.ones(num_bytes // 4, device=target)
            times.append(_fastest_together(tensor, scale.seconds))
        return times[0], times[1]
    finally:
        dist.destroy_process_group()


def _fastest_together(tensor: Tensor, seconds: float) -> float:
    """Returns the time of the fastest all-reduce. Rank 0 decides when to stop, for all ranks."""
    best, end = math.inf, time.perf_counter() + seconds
    goes_on = torch.ones(1, device=tensor.device)
    dist.all_reduce(tensor)
    while goes_on.item():
        dist.barrier()  # so the time holds no wait for a late rank
        start = time.perf_counter()
        dist.all_reduce(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        best = min(best, time.perf_counter() - start)
        goes_on.fill_(float(time.perf_counter() < end))
        dist.broadcast(goes_on, 0)
    return best
