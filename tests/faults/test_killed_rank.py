"""A rank that is killed ends the run on all ranks, soon, with its name; resumed, the run ends with
the same bytes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import MOCK, SMALL_RUN
from tests.support.happenings import happens
from tests.support.programs import program
from tests.support.runs import rows, step_bytes

RUN = [
    *SMALL_RUN,
    *MOCK,
    "--micro-batch-size",
    "1",
    "--train-iters",
    "8",
    "--eval-interval",
    "4",
    "--tensor-model-parallel-size",
    "2",
    "--recompute-granularity",
    "full",
    "--recompute-method",
    "uniform",
]


def _dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _killed(rank: int, place: str, iteration: int) -> Callable[[int], None]:
    return lambda own: happens(place, _dies, iteration=iteration) if own == rank else None


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happens to: its checkpoints and its rows."""
    folder = tmp_path_factory.mktemp("whole")
    arguments = [
        *RUN,
        "--save-interval",
        "3",
        "--save",
        str(folder / "save"),
        "--metrics-jsonl",
        str(folder / "rows"),
    ]
    with program(arguments, ranks=2) as run:
        assert run.wait() == [0, 0], run.everything()
    return folder


@pytest.mark.parametrize(
    ("place", "iteration", "durable"),
    [
        ("replay", 6, 3),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (("forward", 5, 3), ("backward", 5, 3), ("evaluation", 4, 3))
        ),
    ],
)
def test_the_others_name_it_and_the_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, whole: Path, place: str, iteration: int, durable: int
) -> None:
    arguments = [
        *RUN,
        "--save-interval",
        "3",
        "--save",
        str(tmp_path / "save"),
        "--metrics-jsonl",
        str(tmp_path / "rows"),
    ]
    with program(arguments, ranks=2, prepare=_killed(1, place, iteration)) as run:
        assert run.wait(1) == [-signal.SIGKILL]
        assert run.wait(0) == [1], run.everything()
        where = f"iteration {iteration}" + (" (validation loss)" if place == "evaluation" else "")
        assert run.messages() == [f"pretrain_gpt.py: [rank 0] stops at {where}: rank 1 is gone"]
        assert "terminate called" not in run.everything() and "Traceback" not in run.everything()
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text().strip() == str(
        durable
    )
    with program([*arguments, "--load", str(tmp_path / "save")], ranks=2) as run:
        assert run.wait() == [0, 0], run.everything()
    assert step_bytes(tmp_path / "save", 8) == step_bytes(whole / "save", 8) != {}
    assert rows(tmp_path / "rows") == rows(whole / "rows")


def test_without_a_launcher_all_end_where_rank_0_held_the_store() -> None:
    with program(RUN, ranks=2, prepare=_killed(0, "forward", 3), rank_0_owns_store=True) as run:
        assert run.wait() == [-signal.SIGKILL, 1], run.everything()
        assert run.messages() == ["pretrain_gpt.py: [rank 1] stops at iteration 3: rank 0 is gone"]


@pytest.mark.parametrize(
    ("dead", "owns"), [pytest.param(3, False, marks=pytest.mark.long), (1, True)]
)
def test_of_four_ranks_one_speaks(dead: int, owns: bool) -> None:
    """Data-parallel peers wait for the ranks that wait for the dead one: they must not take those
    for it."""
    with program(RUN, ranks=4, prepare=_killed(dead, "backward", 2), rank_0_owns_store=owns) as run:
        assert run.wait() == [-signal.SIGKILL if rank == dead else 1 for rank in range(4)], (
            run.everything()
        )
        (message,) = run.messages()
        assert message.endswith(f"stops at iteration 2: rank {dead} is gone")


def test_a_rank_with_a_fault_of_its_own_says_it_alone() -> None:
    def prepare(rank: int) -> None:
        def fails() -> None:
            raise ArithmeticError("a fault of rank 1")

        if rank == 1:
            happens("backward", fails, iteration=2)

    with program(RUN, ranks=2, prepare=prepare) as run:
        assert run.wait() == [1, 1], run.everything()
        assert "ArithmeticError: a fault of rank 1" in run.errors(
            1
        ) and "stops at iteration 2" in run.errors(1)
        assert "Traceback" not in run.errors(0) and len(run.messages()) <= 2
