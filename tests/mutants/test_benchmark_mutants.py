"""Mistakes in the comparison with peers, each put back: a named test must fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import side_by_side, side_by_side_targets
from benchmarks.side_by_side_task import Notes, Task
from tests.benchmarks import test_side_by_side_page as page
from tests.benchmarks import test_side_by_side_runs as runs
from tests.support.mutants import Mutant, assert_seen, replaces


@replaces("failed", Notes)
def the_rank_that_fails_last_is_told(_, self, error):
    found = json.dumps([self._running, f"{type(error).__name__}: {error}"])
    (self._folder / "failed").write_text(found)


@replaces("wants", Task)
def what_failed_is_tried_again_without_end(_, self, name):
    return self.names is None or name in self.names or name not in self.block.libraries


@replaces("joined", side_by_side, runs)
def a_later_run_replaces_the_rows(_, old, new):
    return new


@replaces("_is_peer", side_by_side_targets)
def ours_counts_as_a_peer(_, name):
    return True


@replaces("_is_compiled", side_by_side_targets)
def a_compiled_peer_counts_as_eager(_, name):
    return False


@replaces("_blocks", side_by_side_targets)
def other_work_counts(blocks, report, **setting):
    rows = [
        {**one, "rows": [{**row, "same_work": True} for row in one["rows"]]}
        for one in report["blocks"]
    ]
    return blocks({**report, "blocks": rows}, **setting)


FASTEST = page.test_the_fastest_eager_peer_and_the_fastest_compiled_one_are_told_apart
MUTANTS = [
    Mutant(
        the_rank_that_fails_last_is_told,
        runs.test_the_rank_that_fails_first_is_the_one_that_is_told,
    ),
    Mutant(
        what_failed_is_tried_again_without_end,
        runs.test_a_library_that_cannot_be_built_is_left_out_of_the_next_start,
    ),
    Mutant(
        a_later_run_replaces_the_rows,
        runs.test_a_run_that_goes_on_keeps_its_rows_and_forgets_what_is_mended,
    ),
    *(
        Mutant(fault, FASTEST)
        for fault in (ours_counts_as_a_peer, a_compiled_peer_counts_as_eager, other_work_counts)
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_named_test_fails(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert_seen(mutant, monkeypatch, tmp_path=tmp_path)
