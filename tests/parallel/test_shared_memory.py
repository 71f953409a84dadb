"""Collectives through shared memory: the bits of gloo, in-flight collectives, faults, and what a
group falls back to."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # a dispatch mode imports it: 3 s, here once for all forked ranks
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.config.parallel import SHARED_REGION_BYTES, ParallelConfig
from megatron_lite.memory.measure.live_storages import LiveStorages
from megatron_lite.parallel import shared_memory, shared_memory_setup
from megatron_lite.parallel.collectives import (
    KeepsResults,
    all_gather_first_dim,
    all_reduce,
    all_reduce_,
    broadcast_,
    reduce_scatter_first_dim,
    start_all_gather_first_dim,
    start_all_gather_parts_,
    start_all_reduce_,
    start_reduce_scatter_first_dim,
    start_reduce_scatter_own_part_,
)
from megatron_lite.parallel.gloo_order import chunk_elements
from megatron_lite.parallel.shared_memory import CHANNELS, channel_of
from megatron_lite.parallel.shared_memory_setup import shared_memory_of
from megatron_lite.parallel.timeouts import set_timeout
from megatron_lite.parallel.waiting import WAITING, timed_waiting
from tests.support.commands import MOCK, SMALL_RUN
from tests.support.limits import HANG_S
from tests.support.programs import run_program
from tests.support.ranks import RankFailure, run_ranks
from tests.support.runs import rows, step_bytes

DTYPES = tuple(shared_memory.DTYPES)
SUM, MAX, MIN = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN


def on_ranks(fn: Callable[[int, ProcessGroup], Any], size: int = 2, say: Any = None) -> list[Any]:
    """Calls `fn(rank, group)` on ranks that share memory.

    say: takes the lines of a rank that cannot share memory, instead of this assertion.
    """

    def work(rank: int, world_size: int) -> Any:
        group = dist.group.WORLD
        assert group is not None
        with shared_memory_of([group, None, group], timeout=HANG_S, say=say or print):
            assert say is not None or group in CHANNELS
            return fn(rank, group)

    # With DETAIL the ranks share no memory.
    return run_ranks(work, size, detail=False)


def slots_of(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """The ranks' slots hold so few bytes that most tensors need several chunks."""
    monkeypatch.setattr(shared_memory, "SLOT_BYTES", num_bytes)


def random(rows: int, dtype: torch.dtype) -> Tensor:
    """[rows, 3], not contiguous."""
    if dtype.is_floating_point:
        return (torch.randn(3, rows) * 100.0).to(dtype).t()
    return torch.randint(0, 100, (3, rows), dtype=dtype).t()


def results(rows: int, dtype: torch.dtype, group: ProcessGroup) -> list[Tensor]:
    """Returns the results of every collective, for tensors of [size * rows, 3] and smaller ones."""
    size, rank = group.size(), group.rank()
    torch.manual_seed(10 * rows + rank)
    whole, flat = random(size * rows, dtype), random(size * rows, dtype).flatten()
    in_place = [flat.clone() for _ in range(4)]
    found = [
        all_reduce(whole, group),
        all_reduce(whole[:1].sum(dtype=dtype), group),  # 0-d, or the sum of no values
        all_reduce(whole, group, MAX),
        all_reduce_(in_place[0], group, MIN),
        start_all_reduce_(in_place[1], group).wait(),
        all_gather_first_dim(whole, group),
        reduce_scatter_first_dim(whole, group),
        start_all_gather_parts_(in_place[2], group).wait(),
        broadcast_(flat.clone(), group, group_source=size - 1),
    ]
    if rows:
        found.append(start_reduce_scatter_own_part_(in_place[3], group).wait())
    return found


def compare_with_gloo(
    rank: int, group: ProcessGroup, lengths: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    channel = CHANNELS[group]
    for number, dtype in itertools.product(lengths, dtypes):
        through_memory = results(number, dtype, group)
        del CHANNELS[group]
        through_gloo = results(number, dtype, group)
        CHANNELS[group] = channel
        for place, (ours, theirs) in enumerate(zip(through_memory, through_gloo, strict=True)):
            assert ours.dtype == theirs.dtype and ours.stride() == theirs.stride()
            assert torch.equal(ours, theirs), (number, dtype, place)


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.long)])
def test_every_collective_has_the_bits_of_gloo(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With slots of 96 bytes, the larger tensors need many chunks, and more than there are slots.

    Rows that do not split equally into gloo's chunks change the order of sums within a part.
    """
    slots_of(monkeypatch, 96)
    on_ranks(
        lambda rank, group: compare_with_gloo(
            rank, group, (0, 1, 7, 61), (torch.float32, torch.bfloat16)
        ),
        size,
    )


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_dtype_and_large_tensors_have_the_bits_of_gloo(size: int) -> None:
    """262144 rows of 3 values are several of gloo's segments, and of our slots."""

    def work(rank: int, group: ProcessGroup) -> None:
        compare_with_gloo(rank, group, (1, 5, 100, 3333), DTYPES)
        compare_with_gloo(rank, group, (262144 // size + 1,), (torch.float32,))

    on_ranks(work, size)


def test_a_chunk_of_gloo_is_a_whole_number_of_segments() -> None:
    """Two segments a rank at least, each of at most 1 MiB and of whole elements."""
    assert chunk_elements(12, 4, 3) == 4
    assert chunk_elements(13, 4, 3) == 6  # 6 segments of 3 elements would be 18 > 13
    assert chunk_elements(3 * 2**20, 4, 3) == 2**20


def test_dtypes_that_gloo_alone_can_reduce_go_to_gloo() -> None:
    def work(rank: int, group: ProcessGroup) -> None:
        assert channel_of(group, torch.ones(2)) is CHANNELS[group]
        assert channel_of(group, torch.ones(2, dtype=torch.bool)) is None
        assert channel_of(group, torch.ones(2), "PRODUCT") is None
        assert channel_of(group, torch.ones(2, device="meta")) is None
        gathered = all_gather_first_dim(torch.tensor([rank == 1]), group)
        assert gathered.tolist() == [False, True]

    on_ranks(work)


def in_flight(rank: int, group: ProcessGroup, number: int = 20) -> None:
    """Starts more collectives than there are slots, and waits for the last one first."""
    size = group.size()
    started = [
        start(torch.full((2 * size, 2), float(index + rank)), group)
        for index in range(number)
        for start in (start_all_gather_first_dim, start_reduce_scatter_first_dim)
    ]
    dist.barrier()  # no rank reads before all have started all
    for index in reversed(range(number)):
        gathered, scattered = started[2 * index].wait(), started[2 * index + 1].wait()
        expected = torch.arange(float(index), index + size).repeat_interleave(2 * size)
        assert torch.equal(gathered[:, 0], expected), (index, gathered[:, 0])
        assert torch.equal(scattered, torch.full((2, 2), expected.sum().item() / (2 * size)))


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_collectives_in_flight_do_not_mix(size: int) -> None:
    on_ranks(in_flight, size)


@pytest.mark.long
def test_ranks_at_different_speeds_stay_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of 40 sums, each of several chunks, in which each rank once waits for another."""
    slots_of(monkeypatch, 64)

    def work(rank: int, group: ProcessGroup) -> list[float]:
        values = torch.arange(200.0) + rank
        for number in range(40):
            if number % 3 == rank:
                time.sleep(1e-3)
            values = all_reduce(values, group) / 3.0
        return values.tolist()

    for result in on_ranks(work, 3):
        assert result == pytest.approx([value + 1.0 for value in range(200)])


def test_an_operand_that_requires_a_gradient_is_left_alone() -> None:
    def work(rank: int, group: ProcessGroup) -> None:
        tensor = torch.ones(4, requires_grad=True)
        assert not all_reduce(tensor, group).requires_grad and tensor.tolist() == [1.0] * 4

    on_ranks(work)


def test_the_only_new_storages_are_results() -> None:
    """The prediction of a step counts the results of collectives and nothing else."""

    def work(rank: int, group: ProcessGroup) -> list[int]:
        tensor, peaks = torch.ones(6, 50), []
        for act in (
            lambda: all_reduce(tensor, group),
            lambda: all_gather_first_dim(tensor, group),
            lambda: reduce_scatter_first_dim(tensor, group),
            lambda: all_reduce_(tensor, group),
        ):
            with LiveStorages() as storages:
                act()
            peaks.append(storages.peak_bytes)
        return peaks

    assert on_ranks(work) == [[1200, 2400, 600, 0]] * 2


class _KeepsNothing(KeepsResults):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_under_a_selective_checkpoint_collectives_stay_functional_operators() -> None:
    def work(rank: int, group: ProcessGroup) -> tuple[list[float], bool]:
        with _KeepsNothing() as mode:
            total = all_reduce(torch.ones(2), group)
        return total.tolist(), any("_c10d_functional.all_reduce" in one for one in mode.seen)

    assert on_ranks(work) == [([2.0, 2.0], True)] * 2


def test_a_rank_tries_before_each_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after it has slept once."""
    tries = 0

    def one_more() -> None:
        nonlocal tries
        tries += 1

    monkeypatch.setattr(shared_memory.os, "sched_yield", one_more)

    def work(rank: int, group: ProcessGroup) -> list[int]:
        after = []
        for _ in range(3):
            time.sleep(0.05 if rank == 1 else 0.0)
            all_reduce(torch.ones(4), group)
            after.append(tries)
        return after

    first, second, third = on_ranks(work)[0]
    assert 0 < first < second < third


def test_a_wait_for_another_rank_is_timed() -> None:
    def work(rank: int, group: ProcessGroup) -> float:
        if rank:
            time.sleep(0.05)
        with timed_waiting():
            before = WAITING.seconds
            all_reduce_(torch.ones(2), group)
            return WAITING.seconds - before

    assert on_ranks(work)[0] > 0.0


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_rank_that_is_killed_ends_the_waits_of_the_others(size: int) -> None:
    def work(rank: int, group: ProcessGroup) -> None:
        all_reduce_(torch.ones(2), group)
        if rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError, match=f"closed by peer: rank {size - 1} of a group"):
            all_reduce_(torch.ones(2), group)
        raise RuntimeError("this rank goes on")

    with pytest.raises(RankFailure, match="this rank goes on|died with exit code -9"):
        on_ranks(work, size)


def test_a_rank_that_does_not_come_is_named_after_the_timeout() -> None:
    def work(rank: int, group: ProcessGroup) -> None:
        if rank == 0:
            set_timeout(0.05)
            with pytest.raises(RuntimeError, match=r"timed out after 0.05 s: rank 1 of a group"):
                all_gather_first_dim(torch.ones(2), group)
            set_timeout(HANG_S)
        dist.barrier()

    on_ranks(work)


def test_a_rank_in_another_collective_is_an_error() -> None:
    def work(rank: int, group: ProcessGroup) -> None:
        with pytest.raises(RuntimeError, match="must issue the same collectives in the same order"):
            all_reduce_(torch.ones(2 + rank), group)

    on_ranks(work)


def test_a_rank_may_end_before_the_others_have_read_its_last_chunk() -> None:
    """Rank 0 closes while messages that it never needed lie in its socket."""

    def work(rank: int, group: ProcessGroup) -> list[float]:
        if rank:
            dist.barrier()
        tensor = broadcast_(torch.full((2,), float(rank)), group)
        if rank == 0:
            CHANNELS[group].close()
            dist.barrier()
        return tensor.tolist()

    assert on_ranks(work) == [[0.0, 0.0]] * 2


def maps() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:megatron_lite")


def test_the_memory_has_no_name_and_is_freed_at_the_end() -> None:
    def work(rank: int, world_size: int) -> tuple[int, int, int]:
        group = dist.group.WORLD
        assert group is not None
        files = len(os.listdir("/proc/self/fd"))
        with shared_memory_of([group], timeout=HANG_S, say=print):
            all_reduce(torch.ones(3), group)
            inside = maps()
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == files
        return inside, maps(), len(CHANNELS)

    assert run_ranks(work, 2, detail=False) == [(2, 0, 0)] * 2


def test_ranks_that_cannot_have_the_memory_use_gloo_and_say_so() -> None:
    said: list[str] = []

    def no_memory(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def work(rank: int, world_size: int) -> tuple[bool, float, list[str]]:
        group = dist.group.WORLD
        assert group is not None
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(os, "posix_fallocate", no_memory)
            with shared_memory_of([group], timeout=HANG_S, say=said.append):
                return group in CHANNELS, all_reduce(torch.ones(1), group).item(), said

    line = (
        "2 ranks of this host cannot share memory and use gloo: OSError: [Errno 28] No space left "
        "on device (rank 1)"
    )
    assert run_ranks(work, 2, detail=False) == [(False, 2.0, [line]), (False, 2.0, [])]


def test_ranks_of_different_hosts_use_gloo(tmp_path: Path) -> None:
    def work(rank: int, world_size: int) -> bool:
        group = dist.group.WORLD
        assert group is not None
        boot_id = tmp_path / f"{rank}"
        boot_id.write_text(f"host {rank}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared_memory_setup, "BOOT_ID", boot_id)
            with shared_memory_of([group], timeout=HANG_S, say=pytest.fail):
                return group in CHANNELS

    assert run_ranks(work, 2, detail=False) == [False, False]


def test_the_shared_bytes_of_a_rank_are_a_region_for_each_group() -> None:
    config = ParallelConfig(tensor_model_parallel_size=2, context_parallel_size=2)
    assert config.shared_region_bytes(1) == 2 * SHARED_REGION_BYTES
    assert config.shared_region_bytes(2) == 4 * SHARED_REGION_BYTES
    assert ParallelConfig().shared_region_bytes(1) == 0


def test_a_run_has_the_same_metrics_and_checkpoints_as_through_gloo(tmp_path: Path) -> None:
    """With sequence parallelism, which all-gathers and reduce-scatters, and with 2 x 2 ranks."""
    found = []
    for way, flags in (("shared", []), ("gloo", ["--no-shared-memory-collectives"])):
        folder = tmp_path / way
        run_program(
            *SMALL_RUN,
            *MOCK,
            *("--train-iters", "3", "--save-interval", "3", "--tensor-model-parallel-size", "2"),
            *("--sequence-parallel", "--save", str(folder), "--metrics-jsonl", f"{folder}.rows"),
            *flags,
            ranks=4,
        )
        found.append((rows(Path(f"{folder}.rows")), step_bytes(folder, 3)))
    (shared_rows, shared_files), (gloo_rows, gloo_files) = found
    assert shared_rows == gloo_rows != []
    weights = {name for name in gloo_files if name.endswith(".safetensors")}
    assert weights and shared_files.keys() == gloo_files.keys()
    assert all(shared_files[name] == gloo_files[name] for name in weights)
