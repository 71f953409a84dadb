"""Is there enough memory: the checks before a run, the limit of --memory-limit, and the message of
a run whose memory runs out.

    when                                   what is compared with the memory of the machine
    before the first tensor is allocated   weights, gradients and optimizer state: a lower bound
    before the model is built              the certain part of the predicted peak of a step
    an allocation fails                    the predicted peak

Every message has the bytes that are needed and those that are there, and says what helps: the
cheapest recompute policy that fits, as flags, or more ranks. docs/memory.md says what else helps.
"""

import contextlib
import os
import resource
import shlex
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from megatron_lite.config.checks import InputError
from megatron_lite.config.run import RunConfig
from megatron_lite.config.units import size
from megatron_lite.memory.measure.live_storages import is_out_of_memory
from megatron_lite.memory.predict.states import rank_parameter_count
from megatron_lite.memory.predict.step_peak import StepPeak, fullest_step_peak
from megatron_lite.parallel.compiled import first_line
from megatron_lite.parallel.state import ParallelState

from .observe import own_states, own_step_peak

# Libraries allocate for themselves while a run lasts: threads' stacks, gloo's messages, modules
# that are imported late. --memory-limit leaves them so much on top.
LIBRARIES = 256 * 2**20
LARGEST_TERMS = 3
MANY_LAYERS = 10_000
NEAR = 0.02  # a prediction so near to the memory may be what ran out
STATUS, MEMINFO = Path("/proc/self/status"), Path("/proc/meminfo")
CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def check_fits(config: RunConfig, parallel: ParallelState, *, in_step: bool = False) -> None:
    """Raises InputError if the ranks of a host, or of a GPU, surely need more memory than it has.

    The other ranks raise PeerError. On a CPU this all-gathers the needs, because the ranks of a
    host share its memory. Only the certain part of a peak counts, so that a run that fits is never
    refused.
    in_step: whether the peak of a step counts. Otherwise only the weights, gradients and optimizer
        state do, which are known before anything else.
    """
    device = parallel.device
    if in_step:
        peak = own_step_peak(config, parallel)
        need = f"the run does not fit. {_need(peak)}. {size(peak.certain_bytes)} of it are certain"
        _check(config, peak.certain_bytes, device, parallel, need)
        return
    if config.optimizer.optimizer_cpu_offload:
        on_host = own_states(config, parallel).on_host
        need = (
            f"--optimizer-cpu-offload puts {size(on_host)} of main weights and optimizer "
            "states of one rank into host memory"
        )
        fix = (
            "give a smaller --optimizer-offload-fraction "
            f"(got {config.optimizer.optimizer_offload_fraction}), or more hosts"
        )
        _check(config, on_host, torch.device("cpu"), parallel, need, fix)
    held = least_bytes(config, parallel)
    need = (
        "the model does not fit: weights, gradients and optimizer state of one rank take "
        f"{size(held)}"
    )
    fix = (
        "give more ranks (--tensor-model-parallel-size, --pipeline-model-parallel-size, "
        "--use-distributed-optimizer, --use-torch-fsdp2), or smaller sizes"
    )
    _check(config, held, device, parallel, need, fix)


def _check(
    config: RunConfig,
    own: int,
    device: torch.device,
    parallel: ParallelState,
    need: str,
    fix: str = "",
) -> None:
    """Raises InputError if a device has not the bytes that this rank needs. The ranks of a host
    share the memory of a CPU. Every rank must call this.

    need, fix: the parts of the message. Without a fix it names a policy that fits.
    """
    here, place = [own], str(device)
    if device.type == "cpu":
        place = socket.gethostname()
        here = [number for name, number in parallel.gathered((place, own)) if name == place]

    def check() -> None:
        there = memory_bytes(device)
        if there is not None and sum(here) > there:
            of_all = f" ({size(sum(here))} for the {len(here)} ranks there)" if here[1:] else ""
            end = fix or (
                f"{_cheapest(config, there // len(here), parallel)}. "
                "--allow-predicted-out-of-memory starts the run all the same"
            )
            raise InputError(f"{need}{of_all}, and {place} has {size(there)}: {end}")

    parallel.together("the memory of the machine", check)


def least_bytes(config: RunConfig, parallel: ParallelState) -> int:
    """Returns a lower bound of the bytes that one rank holds for its parameters all the time.

    With more than MANY_LAYERS layers it is one byte for each parameter, since `rank_states` visits
    every layer and --num-layers may be any number.
    """
    if config.model.num_layers > MANY_LAYERS:
        return rank_parameter_count(config, parallel.pp_rank) // parallel.shard_size
    states = own_states(config, parallel)
    return states.total + (states.on_host if parallel.device.type == "cpu" else 0)


def memory_bytes(device: torch.device) -> int | None:
    """Returns the bytes of all memory of a GPU, or of all memory and swap of this host.

    The limit of the control group counts if it is lower. Returns None if nothing is known.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = []
    with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
        limits.append(sum(_figures(MEMINFO, "MemTotal", "SwapTotal")))
    for path in CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            limits.append(int(path.read_text()))
    if not limits:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(limits, default=None)


def _figures(path: Path, *names: str) -> list[int]:
    """Returns the bytes of figures that a file of /proc has in KiB."""
    lines = dict(line.split(":", 1) for line in path.read_text().splitlines())
    return [int(lines[name].split()[0]) << 10 for name in names]


@contextlib.contextmanager
def memory_limited(config: RunConfig, device: torch.device) -> Iterator[None]:
    """Makes allocations beyond --memory-limit fail within the block.

    On a CPU the limit counts from what the process has at the start of the block. It holds for
    private memory that can be written to, so neither for files in memory nor for code. On CUDA
    torch's allocator keeps the limit.
    Raises InputError if this system cannot limit a process.
    """
    limit, total = config.training.memory_limit_bytes, memory_bytes(device)
    if limit is None:
        yield
        return
    if device.type == "cuda" and total is not None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
        yield
        return
    try:
        (now,) = _figures(STATUS, "VmData")  # the memory that RLIMIT_DATA limits
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


def peak_lines(config: RunConfig, parallel: ParallelState) -> list[str]:
    """Returns the log's lines about the predicted peak of a step, and whether it is above
    --memory-limit; none for compiled layers, whose kept bytes are not known."""
    if config.compiles_layers or parallel.rank:
        return []
    device, limit = parallel.device.type, config.training.memory_limit_bytes
    peak = fullest_step_peak(config, device=device, dp_size=parallel.dp_size)
    lines = [
        f"predicted peak of a step: {size(peak.num_bytes)} on pipeline rank {peak.rank} "
        f"({peak.moment})"
    ]
    if limit is not None and peak.num_bytes > limit:
        more = f"; on a CPU it leaves {size(LIBRARIES)} on top for libraries"
        lines.append(
            f"--memory-limit {config.training.memory_limit} is less than the predicted peak, so an "
            f"allocation may fail{more if device == 'cpu' else ''}"
        )
    return lines


@contextlib.contextmanager
def told_where_memory_runs_out(
    config: RunConfig, parallel: ParallelState, when: Callable[[], str]
) -> Iterator[None]:
    """Turns a failed allocation into an InputError that says what the run needs and what fits.

    when: returns the time, such as "in iteration 3".
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        peak, when_and_why = own_step_peak(config, parallel), f"{when()} ({first_line(error)})"
        raise InputError(advice(config, peak, parallel, when=when_and_why)) from error


def advice(config: RunConfig, peak: StepPeak, parallel: ParallelState, *, when: str) -> str:
    """Returns the message about memory that ran out.

    peak: the predicted peak of this rank. when: the time, such as "in iteration 3".
    """
    allowed, by_flag = config.training.memory_limit_bytes, ""
    if allowed is None:
        allowed = memory_bytes(parallel.device)
    else:
        by_flag = f" by --memory-limit {config.training.memory_limit}"
    may = "an unknown amount" if allowed is None else f"{size(allowed)}{by_flag}"
    if allowed is None:
        end = "docs/memory.md lists what needs less"
    elif peak.fits(allowed) and not peak.fits(round(allowed * (1.0 - NEAR))):
        end = (
            f"The prediction is within {NEAR:.0%} of that, and an allocator needs some room beside "
            f"it: {_cheapest(config, round(allowed * (1.0 - NEAR)), parallel)}"
        )
    elif peak.fits(allowed):
        end = (
            "The step should fit, so something else takes memory: other processes on the device, "
            "or fragmentation (docs/memory.md)"
        )
    else:
        end = _cheapest(config, allowed, parallel)
    return f"out of memory {when}. {_need(peak)}. It may allocate {may}. {end}"


def _need(peak: StepPeak) -> str:
    largest = sorted(peak.terms, key=lambda term: -term.num_bytes)[:LARGEST_TERMS]
    terms = ", ".join(f"{term.name} {size(term.num_bytes)}" for term in largest)
    return (
        f"A step of this rank needs {size(peak.num_bytes)} at its peak ({peak.moment}), of which "
        f"the most are: {terms}"
    )


def _cheapest(config: RunConfig, allowed: int, parallel: ParallelState) -> str:
    """Returns a sentence with the fastest recompute policy that fits, or that none does."""
    from megatron_lite.plan.auto_policy import choose_policy
    from megatron_lite.plan.hardware import machine_for_policy

    device = parallel.device
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    try:
        machine = machine_for_policy(config.logging.machine, device=device.type, gpu_name=gpu)
        policy = choose_policy(config, machine, allowed, parallel.world_size)
    except ValueError as error:
        return f"With this layout there is no way to fit: {error}; docs/memory.md lists others"
    return (
        f"The fastest setting that fits: --recompute-policy {shlex.quote(policy)} (docs/memory.md)"
    )
