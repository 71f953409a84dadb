"""The figures of a machine and its software that decide how long a training step takes.

    matmul        peak x highest efficiency x (what the shape lets it reach), or the time that its
                  tensors need to pass through memory, if that is longer
    attention     FLOPs / (peak x efficiency of the kernel)
    memory        bytes / bandwidth, by mode for the pointwise kernels of a layer
    host          launches x the time of one, by mode
    collective    steps x latency + bytes / bandwidth, inside a node or between nodes

Each machine is a JSON file in machines/, which also states the source of each figure. "like" names
a machine there of which a file takes every figure, and its source, that it does not have.
`python -m megatron_lite.tools.calibrate` writes such a file for the machine it runs on. Standard
library only.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lite.config.checks import InputError, input_faults, quoted, shown
from megatron_lite.config.input_file import read_json
from megatron_lite.config.setting import from_plain
from megatron_lite.data.durable_files import write_text
from megatron_lite.description.operations import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    SHIFT,
    Collective,
    Matmul,
)

MACHINES = Path(__file__).parent / "machines"
ALIASES = {"a100": "a100-80gb", "h100": "h100-80gb", "h200-141gb": "h200", "b200-180gb": "b200"}
CPU_MACHINE = "cpu"
LARGEST_FIGURE = 1e24
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class Flash:
    """The shares of the peak that flash attention reaches, by default and in deterministic mode."""

    forward_efficiency: float
    backward_efficiency: float
    deterministic_forward_efficiency: float
    deterministic_backward_efficiency: float


@dataclass(frozen=True, kw_only=True)
class Matmuls:
    """The rate of matmuls in one format.

    peak_flops: the dense peak in FLOP/s.
    max_efficiency: the largest share of the peak that a matmul reaches.
    half_dimension: the smallest dimension at which a matmul reaches half of that; 0 if the rate
        does not depend on it.
    flash: the shares of the peak that flash attention reaches.
    """

    peak_flops: float
    max_efficiency: float
    half_dimension: float
    flash: Flash


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One way to run the kernels of a layer: eager, compiled, or captured in a graph.

    launch_s: the host's time to launch one kernel, with the bookkeeping of torch and autograd.
    replay_s: the host's further time to start the replay of a unit or region.
    memory_efficiency: the share of the memory's bandwidth that pointwise kernels reach.
    """

    launch_s: float
    replay_s: float
    memory_efficiency: float


@dataclass(frozen=True, kw_only=True)
class Link:
    """A network between ranks.

    latency_s: the seconds of one step of a collective besides its bytes.
    bandwidth: the bytes per second that one rank receives in a large collective.
    """

    latency_s: float
    bandwidth: float


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The figures of one machine and of the software that runs on it. Bandwidths are bytes/s.

    device: "cuda" or "cpu".
    ranks_per_node: the GPUs of a node, or on a CPU the ranks that a node runs.
    memory_bytes: the device memory of one rank.
    memory_bandwidth: the data-sheet bandwidth of that memory.
    memory_efficiency: the share of it that kernels reach which stream through whole buffers, such
        as the optimizer's.
    multiprocessors, tile_m, tile_n: a matmul computes tiles of its result, one for each of the
        multiprocessors at a time. Unfinished rounds waste time. A CPU has 1, 1 and 1.
    tile_s: the time of a tile besides its products: its first loads, and its stores.
    kernel_s: the fixed time of one kernel on the device.
    bf16, fp32: the rates of matmuls. fp16 has the rates of bf16.
    eager, compiled, captured: the ways to run kernels.
    loss_traffic: the bytes that a compiled loss moves, as a share of those of torch's operators.
    fused_accumulation: whether a matmul adds a 16-bit weight's gradient to its float32 sum.
    overlap: the share of the collectives of weights and gradients that computation hides at most.
    band, band_of_several: the largest relative error of a step's time that is expected, on one
        rank and on several.
    pace: the factor of every predicted time, which `report --calibration` learns from runs.
    inside, between: the networks inside a node and between nodes, per rank.
    host_bandwidth: the bandwidth to host memory, in each direction.
    host_memory_bandwidth: that with which the host updates weights in its memory, for each rank of
        a node whose ranks all do.
    shares_cores: whether computing ranks slow a collective down as much as it slows them, so that
        nothing overlaps. It is so on a CPU.
    sources: the source of each figure, in words.
    """

    name: str
    device: str
    ranks_per_node: int
    memory_bytes: int
    memory_bandwidth: float
    memory_efficiency: float
    multiprocessors: int
    tile_m: int
    tile_n: int
    tile_s: float
    kernel_s: float
    bf16: Matmuls
    fp32: Matmuls
    eager: Mode
    compiled: Mode
    captured: Mode
    loss_traffic: float
    fused_accumulation: bool
    overlap: float
    band: float
    band_of_several: float
    inside: Link
    between: Link
    host_bandwidth: float
    host_memory_bandwidth: float
    shares_cores: bool
    sources: Mapping[str, str] = dataclasses.field(hash=False)
    pace: float = 1.0

    def __post_init__(self) -> None:
        if not self.name.isprintable():
            raise ValueError(f"name must be of printable characters (got {quoted(self.name)})")
        if self.device not in DEVICES:
            raise ValueError(f"device must be one of {', '.join(DEVICES)} (got {self.device!r})")
        for where, value in _figures(dataclasses.asdict(self)):
            name = where.rpartition(".")[2]
            lowest = 0.0 if name in ZERO_ALLOWED else SMALLEST_FIGURE
            highest = 1.0 if name.endswith("efficiency") or name == "overlap" else LARGEST_FIGURE
            if not lowest <= value <= highest:
                raise ValueError(f"{where} must be in [{lowest:g}, {highest:g}] (got {value})")

    def matmuls(self, element_bytes: int) -> Matmuls:
        """Returns the rates of matmuls of elements with 2 or 4 bytes."""
        return self.bf16 if element_bytes == 2 else self.fp32

    def matmul_seconds(self, matmul: Matmul, element_bytes: int) -> float:
        """Returns the time of one matmul that is no part of a flash attention kernel."""
        rates = self.matmuls(element_bytes)
        m, n, k = matmul.m / matmul.groups, matmul.n, matmul.k / matmul.k_groups
        batch = matmul.batch * matmul.groups * matmul.k_groups
        smallest = min(m, n, k)
        rate = rates.peak_flops * rates.max_efficiency
        rate *= smallest / (smallest + rates.half_dimension)
        # Tiles lie in either direction; the better one counts. NVIDIA's guide to matrix
        # multiplication explains the rounds.
        tiles = min(
            math.ceil(m / rows) * math.ceil(n / columns)
            for rows, columns in ((self.tile_m, self.tile_n), (self.tile_n, self.tile_m))
        )
        rounds = math.ceil(batch * tiles / self.multiprocessors)
        # The share of the multiprocessors' time in which they compute elements that exist.
        fill = batch * m * n / (rounds * self.multiprocessors * self.tile_m * self.tile_n)
        computed = matmul.flops / (rate * fill) + rounds * self.tile_s
        moved = batch * (m * k + k * n + m * n) * element_bytes
        return max(computed, self.memory_seconds(moved)) + self.kernel_s

    def flash_seconds(
        self, matmul: Matmul, element_bytes: int, *, backward: bool, deterministic: bool
    ) -> float:
        """Returns the time of one matmul of a flash kernel, which skips what a mask hides."""
        rates = self.matmuls(element_bytes)
        kind = "backward" if backward else "forward"
        name = f"{'deterministic_' * deterministic}{kind}_efficiency"
        done = matmul.flops / 2 if matmul.causal else matmul.flops
        return done / (rates.peak_flops * float(getattr(rates.flash, name)))

    def memory_seconds(self, num_bytes: float, mode: Mode | None = None) -> float:
        """Returns the time in which kernels read and write so many bytes of device memory.

        mode: that of pointwise kernels of a layer; None: kernels that stream through buffers.
        """
        share = self.memory_efficiency if mode is None else mode.memory_efficiency
        return num_bytes / (self.memory_bandwidth * share)

    def collective_seconds(self, collective: Collective, group: Group) -> float:
        """Returns the time of one collective of a group of ranks.

        As measured, a part of a node takes as long as the whole of it: the kernels of a rank copy
        its own share too.
        """
        size, per_node, rounds = group.size, group.per_node(self), ROUNDS[collective.kind]
        if size == 1:
            return 0.0
        steps = rounds * math.ceil(math.log2(size))
        link, cards = self.inside, per_node
        shares: float = max(size, self.ranks_per_node)
        if per_node < size:
            # The ranks of a group that share a node use the network cards of all of them.
            link, shares = self.between, size
            if collective.kind == ALL_TO_ALL:
                # Each rank's own card brings what it gets from other nodes.
                cards, shares = 1, size / per_node
        received = rounds * collective.num_bytes * (1 - 1 / shares)
        if collective.kind == SHIFT:
            received, steps = collective.num_bytes, 1
        # No byte travels faster than inside a node.
        return steps * link.latency_s + received / min(
            link.bandwidth * cards, self.inside.bandwidth
        )


ZERO_ALLOWED = (
    "half_dimension",
    "tile_s",
    "kernel_s",
    "latency_s",
    "launch_s",
    "replay_s",
    "overlap",
    "band",
    "band_of_several",
)
SMALLEST_FIGURE = 1e-12
# How often each byte of the whole tensor reaches a rank.
ROUNDS = {ALL_REDUCE: 2, ALL_GATHER: 1, REDUCE_SCATTER: 1, ALL_TO_ALL: 1, SHIFT: 1}


class Group(NamedTuple):
    """The place of a group of ranks.

    stride: the distance between the global numbers of two neighbours in the group. Ranks with
        neighbouring numbers share nodes.
    """

    size: int
    stride: int = 1

    def per_node(self, hardware: Hardware) -> int:
        """Returns how many ranks of the group share a node."""
        return max(1, min(self.size, hardware.ranks_per_node // self.stride))


def machine_names() -> tuple[str, ...]:
    """Returns the names of the machines that come with the package."""
    return tuple(sorted(path.stem for path in MACHINES.glob("*.json")))


def load_hardware(name: str) -> Hardware:
    """Returns the machine with this name, or the one that a JSON file describes.

    name: a name of `machine_names()`, an alias of one, or the path of a file that ends in .json.
    Raises InputError for an unknown name, and for a file that is missing or wrong.
    """
    name = ALIASES.get(name, name)
    path = Path(name) if name.endswith(".json") else MACHINES / f"{name}.json"
    if not name.endswith(".json") and name not in machine_names():
        raise InputError(
            f"no machine is called {quoted(name)}: give one of {', '.join(machine_names())}, "
            "or the path of a .json file (python -m megatron_lite.tools.calibrate writes one)"
        )
    with input_faults(f"{path}: "):
        values = read_json(path)
        if isinstance(values, dict) and "like" in values:
            like = values.pop("like")
            if like not in machine_names():
                raise ValueError(f"like must be one of {', '.join(machine_names())} (got {like!r})")
            values = completed(values, read_json(MACHINES / f"{like}.json"))
        return from_plain(Hardware, values, "the machine")


def save_hardware(machine: Hardware, path: str) -> None:
    """Writes the file that `load_hardware` reads. Raises InputError if it cannot be written."""
    write_text(path, json.dumps(dataclasses.asdict(machine), indent=2) + "\n")


def machine_of_gpu(gpu_name: str) -> Hardware | None:
    """Returns the machine with such GPUs, or None. gpu_name: as CUDA gives it."""
    words = gpu_name.lower().replace(" ", "")
    # GB200 before B200
    names = sorted(machine_names(), key=len, reverse=True)
    return next((load_hardware(name) for name in names if name.split("-")[0] in words), None)


def machine_for_policy(machine: str | None, *, device: str, gpu_name: str | None) -> Hardware:
    """Returns the machine for which `--recompute-policy auto` compares times.

    machine: the value of --machine, or None.
    device: "cpu" or "cuda". gpu_name: the name of the GPU, or None if there is none here.
    Raises InputError if no machine is known for the GPU.
    """
    if machine is not None or device != "cuda":
        return load_hardware(machine or CPU_MACHINE)
    if found := machine_of_gpu(gpu_name or ""):
        return found
    raise InputError(
        f"--recompute-policy auto compares times, and no machine is known for "
        f"{shown(gpu_name or 'a GPU that is not here')}: give --machine, one of "
        f"{', '.join(machine_names())}, or a file of python -m "
        "megatron_lite.tools.calibrate"
    )


def completed(own: Any, whole: Any) -> Any:
    """Returns a value with the entries of objects that only the other one has."""
    if not (isinstance(own, dict) and isinstance(whole, dict)):
        return own
    return {**whole, **{name: completed(value, whole.get(name)) for name, value in own.items()}}


def _figures(values: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _figures(value, f"{where}{name}.")
        elif type(value) in (int, float):
            yield f"{where}{name}", value
