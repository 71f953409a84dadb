"""The process keeps the memory that it frees, unless the user has set the heap."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from megatron_lite.config.command_line import flags_of
from megatron_lite.parallel import heap
from megatron_lite.parallel.heap import keep_freed_memory
from tests.support.programs import program
from tests.support.ranks import run_ranks
from tests.support.runs import tiny_run

BLOCKS, BYTES = 8, 16 * 2**20


def _resident_after_free() -> int:
    """Allocates blocks and frees them. Returns the resident bytes that this adds to the process."""
    before = _resident()
    blocks = [torch.ones(BYTES // 4) for _ in range(BLOCKS)]
    del blocks
    return _resident() - before


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _before_and_after(_: int, __: int) -> tuple[int, bool, int]:
    return _resident_after_free(), keep_freed_memory({}), _resident_after_free()


def test_memory_that_was_freed_stays_with_the_process() -> None:
    ((before, kept, after),) = run_ranks(_before_and_after, 1)
    if not kept:
        pytest.skip("the C library is not glibc")
    half = BLOCKS * BYTES // 2  # the rest may lie in memory that was free before
    assert before < half < after


@pytest.mark.parametrize(
    ("environment", "kept"),
    [
        ({}, True),
        ({"MALLOC_ARENA_MAX": "1", "GLIBC_TUNABLES": "glibc.rtld.nns=2"}, True),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, False),
    ],
)
def test_what_the_user_has_set_stays(environment: Mapping[str, str], kept: bool) -> None:
    said: list[tuple[int, int]] = []

    def mallopt(parameter: int, value: int) -> int:
        said.append((parameter, value))
        return 1

    assert keep_freed_memory(environment, mallopt) is kept
    assert {parameter for parameter, _ in said} == ({-1, -3} if kept else set())
    assert not keep_freed_memory({}, lambda parameter, value: 0)


@pytest.mark.parametrize(("limit", "calls"), [([], 1), (["--memory-limit", "2GiB"], 0)])
def test_a_run_on_a_cpu_keeps_its_memory_unless_that_is_limited(
    tmp_path: Path, limit: list[str], calls: int
) -> None:
    def prepare(rank: int) -> None:
        heap.keep_freed_memory = lambda: (tmp_path / "called").touch()  # type: ignore[assignment]

    flags = flags_of(tiny_run(training=dict(train_iters=1, eval_iters=0)))
    with program([*flags, *limit], ranks=1, prepare=prepare) as run:
        assert run.wait() == [0]
    assert len(list(tmp_path.iterdir())) == calls
