"""Mistakes in how checkpoints reach the disk, in who may change a directory and in what is read,
each put back: a named test must fail."""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_lite.checkpointing import directory, manifest
from megatron_lite.checkpointing.directory import SaveDirectory
from megatron_lite.checkpointing.shards import SavedLayout, ShardReader
from megatron_lite.data import durable_files as data_files
from megatron_lite.training import log_files
from tests.checkpointing import test_durable_order as order
from tests.checkpointing import test_retention, test_stale_start
from tests.checkpointing.conftest import saved  # noqa: F401
from tests.checkpointing.test_durable_order import root, three_steps  # noqa: F401
from tests.checkpointing.test_stale_start import beginning  # noqa: F401
from tests.faults import test_crafted_checkpoint as crafted
from tests.faults.test_crafted_checkpoint import good, known, load  # noqa: F401
from tests.support.mutants import Mutant, each_is_seen, replaces
from tests.training import test_full_log
from tests.training.test_full_log import full  # noqa: F401

Patch = pytest.MonkeyPatch


@replaces("os", data_files)
def nothing_is_synced(real: ModuleType) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(real), "fsync": lambda descriptor: None})


@replaces("sync", directory)
def names_are_not_synced(_, path):
    pass


@replaces("_rename", SaveDirectory)
def the_pointer_comes_first(rename: Any, self: SaveDirectory, source: Path, target: Path) -> None:
    if ".tmp" in source.name and target.name.startswith("iter_"):
        (self.root / "early").write_text(str(int(target.name[5:])))
        os.rename(self.root / "early", self.root / directory.LATEST)
    rename(self, source, target)


@replaces("_rename", SaveDirectory)
def the_lock_is_not_looked_at_before_a_name_changes(_, self, source, target):
    os.replace(source, target)


@replaces("_take_away", SaveDirectory)
def a_step_that_was_taken_away_too_late_stays_away(_, self, step, target):
    self._rename(step, target)


class _Nothing:
    """A pattern that matches no name."""

    def fullmatch(self, name: str) -> None:
        return None


@replaces("UNFINISHED", directory)
def a_later_start_leaves_unfinished_names(_):
    return _Nothing()


def links_and_pipes_are_read(patch: Patch) -> None:
    @replaces("input_size", manifest)
    def size(_: Any, path: Path) -> int:
        return path.stat().st_size

    @replaces("open_input", data_files)
    def opened(_: Any, path: Path) -> FileIO:
        return path.open("rb", buffering=0)

    for part in (size, opened):
        part(patch)


@replaces("_check_split", SavedLayout)
def layouts_are_not_checked(_, self, tp_size):
    pass


@replaces("dtype_of", ShardReader)
def files_are_not_compared_with_their_layout(
    check: Any, self: ShardReader, key: str, layout: SavedLayout
) -> object:
    try:
        return check(self, key, layout)
    except ValueError:
        return self._file(self._path(layout, 0)).get_tensor(key).dtype


class _AtZero:
    """A pattern that takes every step that was set aside for one of iteration 0."""

    def fullmatch(self, name: str) -> tuple[str, str] | None:
        return (name, "0") if ".superseded" in name else None


@replaces("SUPERSEDED", directory)
def set_aside_steps_go_at_once(_):
    return _AtZero()


@replaces("ftruncate", log_files.os)
def a_row_that_did_not_fit_stays(_, descriptor, size):
    pass


@replaces("_replace", log_files)
def the_old_text_moves_away_before_the_new_one_is_there(_: Any, path: str, text: str) -> None:
    os.replace(path, path + ".previous")
    Path(path).write_text(text)


RENAMES = test_stale_start.test_held_before_any_change_of_a_name_a_stale_start_changes_nothing
SYNCED = order.test_every_file_and_then_the_folder_is_synced_before_the_step_gets_its_name

MUTANTS = [
    Mutant(the_lock_is_not_looked_at_before_a_name_changes, RENAMES),
    Mutant(a_step_that_was_taken_away_too_late_stays_away, RENAMES),
    Mutant(a_later_start_leaves_unfinished_names, RENAMES),
    Mutant(nothing_is_synced, SYNCED),
    Mutant(names_are_not_synced, order.test_the_name_is_on_the_disk_before_the_pointer_names_it),
    Mutant(the_pointer_comes_first, order.test_the_name_is_on_the_disk_before_the_pointer_names_it),
    Mutant(
        set_aside_steps_go_at_once,
        test_retention.test_steps_that_were_set_aside_go_once_the_run_has_come_as_far,
    ),
    Mutant(
        links_and_pipes_are_read,
        crafted.test_what_is_no_regular_file_is_not_read,
        dict(file=crafted.RNG, how=crafted.to_a_file_elsewhere),
    ),
    Mutant(
        layouts_are_not_checked,
        crafted.test_a_value_that_no_run_has_is_named_and_the_step_before_is_used,
        dict(name="padding"),
    ),
    Mutant(
        files_are_not_compared_with_their_layout,
        crafted.test_weights_of_another_kind_or_shape_are_refused,
        dict(change=lambda tensor: tensor.int(), message="I32"),
    ),
    Mutant(
        a_row_that_did_not_fit_stays,
        test_full_log.test_rows_that_fit_again_are_written_and_the_others_leave_nothing,
    ),
    Mutant(
        the_old_text_moves_away_before_the_new_one_is_there,
        test_full_log.test_the_new_text_is_on_the_disk_before_it_takes_the_files_name,
    ),
]


test_is_seen = each_is_seen(MUTANTS)
