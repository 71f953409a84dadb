"""Checks whether a model can fit its machine at all, before the first tensor is allocated.

The sum here is a lower bound: weights, gradients and optimizer state, without activations. A run
whose lower bound exceeds all memory of its machine cannot succeed. Any other run starts, and an
allocation that fails while it is built ends it with a message in the same words.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megatron_lite.config.checks import InputError
from megatron_lite.config.run import RunConfig
from megatron_lite.config.units import size
from megatron_lite.memory.predict.parameter_counts import rank_parameter_count
from megatron_lite.memory.predict.states import rank_states
from megatron_lite.parallel.state import ParallelState, gather_texts

MANY_LAYERS = 10_000
MEMINFO = Path("/proc/meminfo")
CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
FIX = (
    "give more ranks (--tensor-model-parallel-size, --pipeline-model-parallel-size, "
    "--use-distributed-optimizer, --use-torch-fsdp2), or smaller sizes"
)


def check_fits(config: RunConfig, parallel: ParallelState) -> None:
    """Raises InputError if what a rank holds for its parameters cannot fit into its memory."""
    needed = least_bytes(config, parallel)
    require(
        parallel,
        needed,
        "the model does not fit: weights, gradients and optimizer state of one rank take "
        f"{size(needed)}",
        lambda there: FIX,
    )


def require(
    parallel: ParallelState, num_bytes: int, need: str, remedy: Callable[[int], str]
) -> None:
    """Raises InputError if a host's ranks, or a GPU's rank, need more memory than it has.

    The other ranks raise PeerError. On a CPU this all-gathers the needs, because the ranks of a
    host share its memory.
    need: the beginning of the message. remedy: returns its end from the bytes that a rank may have.
    """
    device, host = parallel.device, socket.gethostname()
    here, place = [num_bytes], str(device)
    if device.type == "cpu":
        rows = [text.rpartition(" ") for text in gather_texts(f"{host} {num_bytes}", parallel)]
        here, place = [int(number) for name, _, number in rows if name == host], host

    def check() -> None:
        there = memory_bytes(device)
        if there is not None and sum(here) > there:
            of_all = f" ({size(sum(here))} for the {len(here)} ranks there)" if here[1:] else ""
            end = remedy(there // len(here))
            raise InputError(f"{need}{of_all}, and {place} has {size(there)}: {end}")

    parallel.together("the memory of the machine", check)


def least_bytes(config: RunConfig, parallel: ParallelState) -> int:
    """Returns a lower bound of the bytes that one rank holds for its parameters all the time.

    With more than MANY_LAYERS layers it is one byte for each parameter, since `rank_states` visits
    every layer and --num-layers may be any number.
    """
    count = rank_parameter_count(config, parallel.pp_rank)
    if config.model.num_layers > MANY_LAYERS:
        return count // parallel.dp_cp_size
    return rank_states(
        config, parallel.pp_rank, dp_cp_size=parallel.dp_cp_size, dp_cp_rank=parallel.dp_cp_rank
    ).total


def memory_bytes(
    device: torch.device, *, meminfo: Path = MEMINFO, cgroup_limits: Sequence[Path] = CGROUP_LIMITS
) -> int | None:
    """Returns the bytes of all memory of a GPU, or of all memory and swap of this host.

    The limit of the control group counts if it is lower. Returns None if nothing is known.
    meminfo, cgroup_limits: the files of the kernel that have the figures.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = []
    with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        limits.append(sum(int(lines[name].split()[0]) << 10 for name in ("MemTotal", "SwapTotal")))
    for path in cgroup_limits:
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            limits.append(int(path.read_text()))
    if not limits and hasattr(os, "sysconf"):
        with contextlib.suppress(OSError, ValueError):
            limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(limits, default=None)
