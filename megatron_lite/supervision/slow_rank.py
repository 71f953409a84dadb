"""Compares ranks: their times, and the tensors of which several hold copies.

`--log-straggler` names ranks that hold the others up, at each log interval.

The log gives a rank's time as a multiple of the median. A step takes equally long on all ranks,
because they wait for each other. Therefore the time that a rank itself needs is measured:

- On a CPU it is the wall time of a step without the time in which the main thread waits in a
  collective. The figure is the median over the steps of the interval, so that one slow step names
  no rank. Reading data and all other work on the processor count.
- On a GPU it is the time of a fixed matmul, timed by events after the interval's last step. It
  finds a GPU that is throttled or shared.

A rank is compared only with the ranks of its pipeline stage, because stages differ in their work. A
stage of one rank is not judged. Rank 0's logging is not timed. parallel/collectives.py times the
waits at the end of the project's collectives; without the flag it reads no clock. A torch without
custom collectives for FSDP2 (parallel/fsdp.py) waits elsewhere. With such a torch the waiting of
FSDP2 counts as work, and a slow rank may remain unnamed.

`--check-weight-hash-across-dp-replicas-interval N` compares tensors:

    tensors                         compared over
    weights                         the data-parallel ranks, under FSDP2 those that hold the same
                                    share; those that are not split also over the TP ranks; a tied
                                    embedding also over the first and last pipeline rank
    master weights and moments      the same ranks, if every data-parallel rank holds them all;
                                    else the ranks that hold the same share of them

Without this check a fault of the memory or of a kernel on one rank would never be noticed: training
sums gradients over ranks, but never compares weights.
"""

import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_lite.config.logging_settings import LoggingConfig
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.collectives import WAITING, odd_ones_out, timed_waiting
from megatron_lite.parallel.messages import by_rank
from megatron_lite.parallel.parameter_spec import spec_of
from megatron_lite.parallel.state import ParallelState
from megatron_lite.parallel.tensor_hash import quick_hash

PROBE_SIZE, PROBE_MATMULS = 4096, 8


class RankTime(NamedTuple):
    """The time in ms that one rank needed for its part of a step. stage: its pipeline rank."""

    rank: int
    stage: int
    host: str
    ms: float


def slow_ranks(times: Sequence[RankTime], *, ratio: float, at_most: int) -> list[str]:
    """Returns a line for each of the slowest ranks, at most `at_most` of them.

    A rank is slow if it took more than `ratio` times the median of its stage. For an even number of
    ranks the median is the lower of the two middle times: of two ranks, the faster one's.
    """
    found = []
    for rank, stage, host, ms in times:
        others = [other.ms for other in times if other.stage == stage]
        median = statistics.median_low(others)
        if len(others) > 1 and median > 0.0 and ms > ratio * median:
            part = "" if len(others) == len(times) else f" of pipeline rank {stage}"
            line = (
                f"slow rank: {rank} ({host}) {ms / median:.1f}x the median of {len(others)} ranks"
                f"{part} ({ms:.1f} ms against {median:.1f} ms)"
            )
            found.append((-ms / median, line))
    return [line for _, line in sorted(found)[:at_most]]


class SlowRanks:
    """The timing of this rank's steps.

    Use `step` around each step, and `lines` at each log interval.
    """

    def __init__(self, config: LoggingConfig, parallel: ParallelState) -> None:
        self._config, self._parallel = config, parallel
        self._ms: list[float] = []
        self._probe = _Probe(parallel.device) if parallel.device.type == "cuda" else None

    @contextmanager
    def step(self, *, logged: bool) -> Iterator[None]:
        """Times the block on a CPU; on a GPU, starts the probe after a step that will be logged."""
        if self._probe is not None:
            yield
            if logged:
                self._probe.start()
            return
        # WAITING is local to a thread, so the waits of a save in another thread do not count.
        start, waited = time.perf_counter(), WAITING.seconds
        with timed_waiting():
            yield
        self._ms.append(1000.0 * (time.perf_counter() - start - (WAITING.seconds - waited)))

    def lines(self) -> list[str]:
        """Returns a line for each rank that was slow since the last call.

        Every rank must call this. It gathers a few bytes of each rank, on the CPU.
        """
        own = statistics.median(self._ms) if self._probe is None else self._probe.ms()
        self._ms.clear()
        rows = self._parallel.gathered((self._parallel.pp_rank, socket.gethostname(), own))
        times = [RankTime(rank, *row) for rank, row in enumerate(rows)]
        return slow_ranks(
            times, ratio=self._config.straggler_ratio, at_most=self._config.straggler_minmax_count
        )


class _Probe:
    """A few bfloat16 matmuls, timed on the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._operand: Tensor = (
            torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=torch.bfloat16, device=device) / PROBE_SIZE
        )
        self._result = torch.empty_like(self._operand)
        self._start, self._stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.start()  # cuBLAS chooses its kernel at the first call

    def start(self) -> None:
        self._start.record()
        for _ in range(PROBE_MATMULS):
            torch.matmul(self._operand, self._operand, out=self._result)
        self._stop.record()

    def ms(self) -> float:
        self._stop.synchronize()
        return self._start.elapsed_time(self._stop)


def replica_fault(model: nn.Module, optimizer: Optimizer, parallel: ParallelState) -> str:
    """Returns which ranks hold a tensor that differs from its copies; "" if all are equal.

    Every rank must call this, and gets the same text. The text names a rank unless more than half
    of the copies are equal to its own. If no value has such a majority, the text names all ranks.
    Issues one all-gather of 8 bytes a tensor for each group, and gathers a text of every rank.
    Waits for the device.
    """
    optimizer.finish()
    layout = optimizer.layout
    # Each tensor of this rank with its name, its parameter's spec, and whether it is one share of
    # several.
    if not layout.replicates_weights:
        held = [(piece.name, piece.master, piece.spec, True) for piece in layout.pieces]
    else:
        held = [(name, one.detach(), spec_of(one), False) for name, one in model.named_parameters()]
        are_shares = layout.shard_group is not None
        if not are_shares or parallel.replica_group is not None:
            held += [
                (f"{piece.name}/{key}", value, piece.spec, are_shares)
                for piece in layout.pieces
                for key, value in piece.states.items()
            ]
    # All ranks compare in the order of the keys, whatever tensors they hold.
    compared: dict[tuple[int, ...], tuple[ProcessGroup, list[str], list[Tensor]]] = {}
    for name, tensor, spec, is_share in held:
        # Data-parallel ranks hold equal copies of all tensors, tensor-parallel ranks of those that
        # are not split, and the first and the last stage of a tied weight.
        of_data = parallel.holding(spec)
        is_whole = spec.tp_dim is None and not spec.of_experts
        groups = {
            (0, is_share, of_data is not parallel): (
                of_data.replica_group if is_share else of_data.dp_cp_group
            ),
            (1,): parallel.tp_group if is_whole else None,
            (2,): parallel.embedding_group if spec.tied else None,
        }
        own_hash = quick_hash(tensor).to(parallel.device)
        for key, group in groups.items():
            if group is not None:
                _, names, hashes = compared.setdefault(key, (group, [], []))
                names.append(name)
                hashes.append(own_hash)
    odd = {
        names[place]: None
        for _, (group, names, hashes) in sorted(compared.items())
        for place in odd_ones_out(torch.stack(hashes), group)
    }
    text = "".join([*odd][:1])
    if len(odd) > 1:
        text += f" and {len(odd) - 1} more tensors"
    return by_rank(parallel.gathered(text))
