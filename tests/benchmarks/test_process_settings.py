"""process_settings.py and planning_seconds.py: small runs, and their tables on the page."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import planning_seconds, process_settings
from benchmarks.planning_seconds import Command, measure, timed
from benchmarks.process_settings import SETTINGS, ProcessSetting, Worker, main, parse

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results" / "cpu"


@pytest.mark.parametrize("module", [process_settings, planning_seconds])
def test_the_page_has_the_table_of_the_results(module: Any) -> None:
    part = PAGE.read_text(encoding="utf-8").split(module.BEGIN)[1].split(module.END)[0]
    path = RESULTS / f"{module.__name__.rpartition('.')[2]}.json"
    if path.is_file():
        assert part == module.table(json.loads(path.read_text(encoding="utf-8")))
    else:
        assert part == "Not measured.\n"


@pytest.mark.long
def test_a_small_run_measures_every_setting(tmp_path: Path) -> None:
    settings = (SETTINGS[0], SETTINGS[2], SETTINGS[-1])
    page, output = tmp_path / "page.md", tmp_path / "out.json"
    page.write_text(f"before\n{process_settings.BEGIN}{process_settings.END}\nafter\n")
    options = ["--preset", "tiny", "--rounds", "1", "--steps", "1", "--ranks", "2"]
    assert main([*options, "--json", str(output), "--output", str(page)], settings) == 0
    report = json.loads(output.read_text())
    enough = len(os.sched_getaffinity(0)) >= 2
    names = [one.name for one in settings if enough or not one.pinned]
    assert [row["name"] for row in report["rows"]] == names
    assert report["rows"][0]["wall_ratio"] == [1.0, 1.0, 1.0]
    assert all(row["resident_mib"] > 10 for row in report["rows"])
    assert process_settings.table(report) in page.read_text()


@pytest.mark.slow
def test_a_worker_has_the_variables_and_ends_with_its_block() -> None:
    args = parse(["--preset", "no such preset"])
    setting = ProcessSetting("broken", {"MALLOC_ARENA_MAX": "1"})
    with Worker(setting, 1, args) as worker, pytest.raises(RuntimeError, match="broken ended"):
        worker.ask("step")


def test_only_known_variables_are_set_and_the_default_sets_none() -> None:
    assert SETTINGS[0] == ProcessSetting(process_settings.DEFAULT, {})
    assert SETTINGS[1] == ProcessSetting(SETTINGS[1].name, {}, keeps=True)
    assert len({one.name for one in SETTINGS}) == len(SETTINGS)
    assert {name.removesuffix("_") for name in process_settings.OURS} == {
        "GLIBC_TUNABLES",
        "MALLOC_MMAP_MAX",
        "MALLOC_TRIM_THRESHOLD",
        "THP_MEM_ALLOC_ENABLE",
    }


def test_commands_take_turns_and_the_first_round_does_not_count() -> None:
    ran: list[str] = []

    def took(command: Command) -> dict[str, float]:
        ran.append(command.name)
        return {"wall": float(len(ran)), "cpu": 2.0}

    rows = measure([Command("a", ""), Command("b", "")], 2, took)
    assert ran == ["b", "a", "a", "b", "b", "a"]
    assert [row["wall_samples_s"] for row in rows] == [[3.0, 6.0], [4.0, 5.0]]
    report = {"device": "a CPU", "processors": 2, "torch": "2", "python": "3", "rounds": 2}
    table = planning_seconds.table({**report, "rows": rows})
    assert "| a | 4.50 | 3.00 to 6.00 | 2.00 |" in table


def test_the_time_of_a_command_ends_with_its_line() -> None:
    program = "print('first',flush=True);import\ttime;time.sleep(0.2);print('last')"
    to_line, to_end = (timed(Command("a", f"-c {program}", until)) for until in ("first", ""))
    assert to_line["wall"] > 0 and to_end["wall"] > 0.2
    with pytest.raises(SystemExit, match="ended with status 3"):
        timed(Command("a", "-c raise\tSystemExit(3)"))
