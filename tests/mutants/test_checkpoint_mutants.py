"""Mistakes in how files reach the disk, in who may change a directory, in what is read
and in the start, each put back: a named test must fail."""

import os
from types import SimpleNamespace

from megatron_lite.checkpointing import directory, metadata
from megatron_lite.checkpointing.directory import SaveDirectory
from megatron_lite.data import durable_files as data_files
from megatron_lite.data.indexed import IndexedDataset
from tests.checkpointing import test_durable_order as order
from tests.checkpointing import test_stale_start
from tests.checkpointing.conftest import saved  # noqa: F401
from tests.checkpointing.test_durable_order import root, three_steps  # noqa: F401
from tests.checkpointing.test_stale_start import beginning  # noqa: F401
from tests.faults import test_crafted_checkpoint as crafted
from tests.faults import test_data_tools
from tests.faults.test_crafted_checkpoint import good, known, load  # noqa: F401
from tests.support.mutants import Mutant, each_is_seen, replaces


@replaces("os", data_files)
def nothing_is_synced(real):
    return SimpleNamespace(**{**vars(real), "fsync": lambda descriptor: None})


@replaces("_rename", SaveDirectory)
def the_pointer_comes_first(rename, self, source, target):
    if ".tmp" in source.name and target.name.startswith("iter_"):
        (self.root / "early").write_text(str(int(target.name[5:])))
        os.rename(self.root / "early", self.root / directory.LATEST)
    rename(self, source, target)


@replaces("_rename", SaveDirectory)
def the_lock_is_not_looked_at_before_a_name_changes(_, self, source, target):
    os.replace(source, target)


def links_and_pipes_are_read(patch):
    @replaces("input_size", metadata)
    def size(_, path):
        return path.stat().st_size

    @replaces("open_input", data_files)
    def opened(_, path):
        return path.open("rb", buffering=0)

    for part in (size, opened):
        part(patch)


HELD = (
    test_stale_start.test_held_before_any_call_a_stale_start_changes_nothing,
    dict(calls=test_stale_start.OF_NAMES, later=[3, 6]),
)
SYNCED = order.test_every_file_and_then_the_folder_is_synced_before_the_step_gets_its_name

MUTANTS = [
    Mutant(the_lock_is_not_looked_at_before_a_name_changes, *HELD),
    Mutant(nothing_is_synced, SYNCED),
    Mutant(the_pointer_comes_first, order.test_the_name_is_on_the_disk_before_the_pointer_names_it),
    Mutant(
        links_and_pipes_are_read,
        crafted.test_what_is_no_regular_file_is_not_read,
        dict(file=crafted.RNG, how=crafted.to_a_file_elsewhere),
    ),
]


@replaces("unlink", os)
def the_old_index_stays_until_the_new_one_is_there(unlink, path, *rest):
    return None if str(path).endswith(".idx") else unlink(path, *rest)


@replaces("_is_still", IndexedDataset)
def a_reader_trusts_the_names(_, self, index_file):
    return True


PAIR = test_data_tools.test_a_writer_killed_at_any_point_never_leaves_a_new_bin_beside_an_old_idx
MUTANTS += [
    Mutant(the_old_index_stays_until_the_new_one_is_there, PAIR),
    Mutant(
        a_reader_trusts_the_names,
        test_data_tools.test_a_reader_that_a_writer_overtakes_does_not_mix_the_pairs,
    ),
]


test_is_seen = each_is_seen(MUTANTS)
