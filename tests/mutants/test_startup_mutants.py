"""Mistakes in the data tools, the index cache and the start, each put back: a named test must
fail."""

import os

import pytest

from megatron_lite.data import indexed
from megatron_lite.data.indexed import IndexedDataset, IndexedDatasetWriter
from tests.faults import test_data_tools
from tests.support.mutants import Mutant, each_is_seen, replaces


@replaces("unlink", os)
def the_old_index_stays_until_the_new_one_is_there(unlink, path, *rest):
    return None if str(path).endswith(".idx") else unlink(path, *rest)


@replaces("_publish", IndexedDatasetWriter)
def names_are_not_synced(publish, self):
    with pytest.MonkeyPatch.context() as inner:
        replaces("sync", indexed)(lambda *_: None)(inner)
        publish(self)


@replaces("_is_still", IndexedDataset)
def a_reader_trusts_the_names(_, self, index_file):
    return True


PAIR = test_data_tools.test_a_writer_killed_at_any_point_never_leaves_a_new_bin_beside_an_old_idx
ORDER = test_data_tools.test_the_pair_is_replaced_in_the_order_that_readers_and_a_power_cut_need
MUTANTS = [
    Mutant(the_old_index_stays_until_the_new_one_is_there, PAIR),
    Mutant(names_are_not_synced, ORDER),
    Mutant(
        a_reader_trusts_the_names,
        test_data_tools.test_a_reader_that_a_writer_overtakes_does_not_mix_the_pairs,
    ),
]


test_is_seen = each_is_seen(MUTANTS)
