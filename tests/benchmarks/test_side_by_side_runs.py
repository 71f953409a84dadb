"""benchmarks/side_by_side.py goes on without a contestant that fails, and adds to its results."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import side_by_side, side_by_side_block
from benchmarks.contestant import Contestant
from benchmarks.side_by_side import is_meant, joined, main, parse, run_block
from benchmarks.side_by_side_engines import GLOO, OURS
from benchmarks.side_by_side_report import table
from benchmarks.side_by_side_task import Block, Notes, Task
from tests.benchmarks import test_side_by_side
from tests.support.forks import leave, status_of_fork

BLOCK = replace(test_side_by_side.BLOCK, rounds=2)
PLAIN, STOCK = "plain torch, none", "megatron-core stock, none"
NAMES = (OURS, "ours, full", PLAIN)


def raises() -> torch.Tensor:
    raise RuntimeError("the peer has no kernel\nand more")


def dies() -> torch.Tensor:
    leave(9)


def start_with(fault: Callable[[], torch.Tensor] | None) -> Callable[[Task], int]:
    """Returns what starts a task in a fork of this process, in which plain torch has the fault."""
    import torch._dynamo  # noqa: F401  counting FLOPs needs it: imported once, and not in each fork

    def build(*args: Any, **options: Any) -> tuple[list[Contestant], dict[str, str]]:
        found, skipped = side_by_side_block_build(*args, **options)
        return [
            replace(one, run=fault) if fault and one.name == PLAIN else one for one in found
        ], skipped

    def start(task: Task) -> int:
        def run() -> int:
            side_by_side_block.build_contestants = build
            return side_by_side_block.run_ranks(task)

        return status_of_fork(run)

    return start


side_by_side_block_build = side_by_side_block.build_contestants


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # a fork hangs if its parent has started threads


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (raises, "RuntimeError: the peer has no kernel"),
        pytest.param(dies, "the process ended with status 9", marks=pytest.mark.long),
    ],
)
def test_a_contestant_that_fails_has_a_row_and_the_others_are_measured(
    fault: Callable[[], torch.Tensor], reason: str
) -> None:
    result = run_block(BLOCK, NAMES, start=start_with(fault))
    assert [row["name"] for row in result["rows"]] == [OURS, "ours, full"]
    assert result["failed"] == {PLAIN: reason}
    lines = list(table(result))
    assert any(line.startswith(PLAIN) and reason in line for line in lines)


def test_a_block_without_ours_has_no_rows_and_ends() -> None:
    starts = []

    def start(task: Task) -> int:
        starts.append(task)
        Notes(task.folder, 0)(OURS)
        return -11

    result = run_block(BLOCK, NAMES, start=start)
    assert result["rows"] == [] and len(starts) == 1
    assert result["failed"] == {OURS: "the process ended with signal 11"}


def test_a_library_that_cannot_be_built_is_left_out_of_the_next_start() -> None:
    starts = []

    def start(task: Task) -> int:
        starts.append(task)
        if len(starts) == 1:
            notes = Notes(task.folder, 0)
            notes("megatron-core")
            notes.failed(ValueError("no such flag"))
            return 1
        assert not task.wants("megatron-core") and task.wants(PLAIN) and task.wants("plain")
        task.result.write_text(json.dumps({"rows": [], "skipped": {}}))
        return 0

    result = run_block(BLOCK, (OURS, PLAIN, STOCK), start=start)
    assert result["failed"] == {"megatron-core": "ValueError: no such flag"} and len(starts) == 2


def test_the_rank_that_fails_first_is_the_one_that_is_told(tmp_path: Path) -> None:
    for rank, text in ((1, "the cause"), (0, "connection closed by peer")):
        notes = Notes(str(tmp_path), rank)
        notes(PLAIN)
        notes.failed(RuntimeError(text))
    culprit = Notes.culprit(str(tmp_path), 1)
    assert culprit == (PLAIN, "RuntimeError: the cause")
    assert Notes.culprit(str(tmp_path / "nothing"), 1) is None


def test_a_short_time_limit_leaves_one_round() -> None:
    result = run_block(replace(BLOCK, rounds=50), NAMES[:2], 1e-9, start=start_with(None))
    assert [row["rounds"] for row in result["rows"]] == [1, 1]
    assert all(len(row["wall_samples_ms"]) == 1 for row in result["rows"])


@pytest.mark.long
def test_two_ranks_share_memory_and_stop_after_the_same_round() -> None:
    block = replace(BLOCK, tp_size=2, rounds=50)
    result = run_block(block, (OURS, GLOO), 1e-9)
    assert result["skipped"] == result["failed"] == {}
    assert {row["name"]: row["rounds"] for row in result["rows"]} == {OURS: 1, GLOO: 1}
    assert all(row["same_work"] for row in result["rows"])


def test_a_task_survives_its_way_to_another_process() -> None:
    for names in (None, NAMES):
        task = Task(block=BLOCK, folder="/f", names=names, without=(PLAIN,), minutes=2.5)
        assert Task.from_json(task.to_json()) == task


# Which contestants are measured


@pytest.mark.parametrize(
    ("text", "number"),
    [("ours", 6), ("megatron-core", 5), ("megatron-core sdpa none", 1), ("plain", 1), ("full", 4)],
)
def test_words_choose_contestants(text: str, number: int) -> None:
    assert sum(is_meant(name, [text]) for name in BLOCK.libraries) == number
    assert all(is_meant(name, None) for name in BLOCK.libraries)


def test_a_word_that_no_contestant_has_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--quick", "--contestants", "plain,deepspeed"])
    assert "'deepspeed'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse(["--minutes", "0"])


def measured(*names: str, **more: Any) -> dict[str, Any]:
    """Returns a result with rows of these names."""
    rows = [
        {
            "name": name,
            "same_work": True,
            "rounds": 3,
            "wall_ms": 100.0,
            "wall_ratio": [1.0, 0.9, 1.1],
            "cpu_ratio": [1.0, 0.9, 1.1],
            "peak_bytes": 2**20,
            "peak_ratio": 1.0,
            "gemm_fraction": 0.5,
        }
        for name in names
    ]
    block = {**BLOCK.__dict__}
    return {"block": block, "title": BLOCK.title, "rows": rows, "skipped": {}, "failed": {}, **more}


def test_a_run_that_goes_on_keeps_its_rows_and_forgets_what_is_mended() -> None:
    old = measured(OURS, STOCK, failed={PLAIN: "died"}, skipped={"transformers": "not installed"})
    old["rows"][0]["wall_ms"] = 7.0
    result = joined(old, measured(OURS, PLAIN))
    assert [row["name"] for row in result["rows"]] == [OURS, STOCK, PLAIN]
    assert result["rows"][0]["wall_ms"] == 7.0 and result["failed"] == {}
    assert result["skipped"] == {"transformers": "not installed"}
    again = joined(old, measured(OURS, failed={PLAIN: "died again"}))
    assert again["failed"] == {PLAIN: "died again"}


def test_continue_measures_only_what_the_file_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, list[str]]] = []

    def run(block: Block, names: list[str], minutes: float | None) -> dict[str, Any]:
        asked.append((block.title, names))
        result = measured(OURS, *names)
        return {**result, "block": {**block.__dict__}, "title": block.title}

    monkeypatch.setattr(side_by_side, "run_block", run)
    monkeypatch.setattr(side_by_side, "draw", lambda report, output: [])
    output = tmp_path / "some"
    common = ["--quick", "--models", "gpt", "--no-compile", "--output", str(output)]
    assert main([*common, "--tp", "1", "--contestants", "plain"]) == 0
    assert asked == [("gpt quick, float32, 1 thread(s), TP 1", [PLAIN])]
    assert main([*common, "--tp", "1", "2", "--continue"]) == 0
    assert [title.rpartition(", ")[2] for title, _ in asked[1:]] == ["TP 1", "TP 2", "TP 2 + SP"]
    assert PLAIN not in asked[1][1] and OURS not in asked[1][1] and STOCK in asked[1][1]
    report = json.loads((tmp_path / "some-quick.json").read_text())
    assert len(report["blocks"]) == 3
    first = replace(BLOCK, shape="quick")
    assert [row["name"] for row in report["blocks"][0]["rows"]] == list(first.libraries)
    assert main([*common, "--continue"]) == 0 and len(asked) == 4  # nothing was missing
    assert "has every row" in capsys.readouterr().out
    report["device"] = "another"
    (tmp_path / "some-quick.json").write_text(json.dumps(report))
    assert main([*common, "--continue"]) == 2
    assert "of this machine" in capsys.readouterr().err
