"""The message of a run whose memory runs out, and the limit that --memory-limit sets.

An allocation that fails ends every rank with one message: the predicted peak, what holds it, the
memory that is there, and the cheapest recompute policy that fits, as flags. docs/memory.md says
what else helps.
"""

from __future__ import annotations

import contextlib
import resource
import shlex
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_lite.config.checks import InputError
from megatron_lite.config.run import RunConfig
from megatron_lite.config.units import parse_bytes, size
from megatron_lite.memory.predict.step_peak import StepPeak
from megatron_lite.parallel.state import ParallelState
from megatron_lite.training.capacity import FIX, least_bytes, memory_bytes, require
from megatron_lite.training.peak_memory import own_step_peak

# Texts in torch's RuntimeError. numpy raises MemoryError, and CUDA usually an OutOfMemoryError.
WORDS = (
    "can't allocate memory",
    "not enough memory",
    "bad_alloc",
    "Storage size calculation overflowed",
    "integer multiplication overflow",
    "CUDA out of memory",
)
# Libraries allocate for themselves while a run lasts: threads' stacks, gloo's messages, modules
# that are imported late. --memory-limit leaves them so much on top.
LIBRARIES = 256 * 2**20
LARGEST_TERMS = 3
# The share of each term of a predicted peak that counts as certain: a rank may hold less than a
# bound, and an estimate of a workspace may be off.
CERTAIN = {"exact": 1.0, "estimate": 0.5, "bound": 0.5}
STATUS = Path("/proc/self/status")


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether the error means that an allocation failed."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in WORDS)


def reason_of(error: BaseException) -> str:
    """Returns the first line of the error's message."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)


def allowed_bytes(config: RunConfig, device: torch.device) -> int | None:
    """Returns the bytes that one rank may allocate, or None if nothing is known."""
    if config.training.memory_limit is not None:
        return parse_bytes("--memory-limit", config.training.memory_limit)
    return memory_bytes(device)


@contextlib.contextmanager
def told_where_memory_runs_out(config: RunConfig, parallel: ParallelState) -> Iterator[None]:
    """Turns a failed allocation while a run is built into an InputError.

    The message has the bytes that the rank needs and the bytes that the device has.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        there = allowed_bytes(config, parallel.device)
        shown = "an unknown amount" if there is None else size(there)
        raise InputError(
            f"out of memory while the run was built ({reason_of(error)}). Weights, gradients and "
            f"optimizer state of this rank take {size(least_bytes(config, parallel))}, and "
            f"{parallel.device} has {shown} for all ranks on it: {FIX}"
        ) from error


@contextlib.contextmanager
def memory_limited(config: RunConfig, device: torch.device) -> Iterator[None]:
    """Makes allocations beyond --memory-limit fail within the block.

    On a CPU the limit counts from what the process has at the start of the block. It holds for
    private memory that can be written to, so neither for files in memory nor for code. On CUDA
    torch's allocator keeps the limit.
    Raises InputError if this system cannot limit a process.
    """
    if config.training.memory_limit is None:
        yield
        return
    limit = parse_bytes("--memory-limit", config.training.memory_limit)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
        yield
        return
    try:
        lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
        # VmData counts the memory that RLIMIT_DATA limits, in KiB.
        now = int(lines["VmData"].split()[0]) << 10
        before = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (now + limit + LIBRARIES, before[1]))
    except (OSError, KeyError, ValueError) as error:
        raise InputError(
            f"--memory-limit {config.training.memory_limit} cannot be kept on this system "
            f"({error}): leave it out"
        ) from error
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def above_limit(config: RunConfig, peak_bytes: int, device: torch.device) -> tuple[str, ...]:
    """Returns a line if the predicted peak of a step is above --memory-limit, else nothing."""
    limit = config.training.memory_limit
    if limit is None or peak_bytes <= parse_bytes("--memory-limit", limit):
        return ()
    more = ""
    if device.type == "cpu":
        more = f"; on a CPU it leaves {size(LIBRARIES)} on top for libraries"
    return (
        f"--memory-limit {limit} is less than the predicted peak, so an allocation may fail{more}",
    )


def advice(
    config: RunConfig, peak: StepPeak, *, num_ranks: int, device: torch.device, when: str
) -> str:
    """Returns the message about memory that ran out.

    peak: the predicted peak of this rank. when: the time, such as "in iteration 3".
    """
    allowed = allowed_bytes(config, device)
    limit = config.training.memory_limit
    may = "an unknown amount"
    if allowed is not None:
        may = size(allowed) + (f" by --memory-limit {limit}" if limit is not None else "")
    said = f"out of memory {when}. {_need(peak)}. It may allocate {may}. "
    if allowed is None:
        return said + "docs/memory.md lists what needs less"
    if peak.num_bytes <= allowed:
        return said + (
            "The step should fit, so something else takes memory: other processes on the device, "
            "or fragmentation (docs/memory.md)"
        )
    return said + _cheapest(config, allowed, num_ranks=num_ranks, device=device)


def check_peak_fits(config: RunConfig, parallel: ParallelState, *, num_microbatches: int) -> None:
    """Raises InputError if the predicted peaks of a host's ranks, or of a GPU's, exceed its memory.

    Only the certain part of a peak counts, so that a run that fits is never refused. It does
    nothing under --allow-predicted-out-of-memory, and for compiled code, whose temporaries are not
    known.
    """
    training = config.training
    if training.allow_predicted_out_of_memory or training.torch_compile:
        return
    peak = own_step_peak(config, parallel, num_microbatches)
    certain = round(sum(CERTAIN[term.tag] * term.num_bytes for term in peak.terms))

    def remedy(there: int) -> str:
        cheapest = _cheapest(config, there, num_ranks=parallel.world_size, device=parallel.device)
        return f"{cheapest}. --allow-predicted-out-of-memory starts the run all the same"

    need = f"the run does not fit. {_need(peak)}. {size(certain)} of it are certain"
    require(parallel, certain, need, remedy)


def _need(peak: StepPeak) -> str:
    largest = sorted(peak.terms, key=lambda term: -term.num_bytes)[:LARGEST_TERMS]
    terms = ", ".join(f"{term.name} {size(term.num_bytes)}" for term in largest)
    return (
        f"A step of this rank needs {size(peak.num_bytes)} at its peak ({peak.moment}), of which "
        f"the most are: {terms}"
    )


def _cheapest(config: RunConfig, allowed: int, *, num_ranks: int, device: torch.device) -> str:
    """Returns a sentence with the fastest recompute policy that fits, or that none does."""
    from megatron_lite.plan.auto_policy import choose_policy
    from megatron_lite.plan.hardware import machine_for_policy

    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    try:
        machine = machine_for_policy(config.logging.machine, device=device.type, gpu_name=gpu)
        policy = choose_policy(config, machine, allowed, num_ranks)
    except (InputError, ValueError) as error:
        return f"With this layout there is no way to fit: {error}; docs/memory.md lists others"
    return (
        f"The fastest setting that fits: --recompute-policy {shlex.quote(policy)} (docs/memory.md)"
    )
