"""Mistakes in the data tools, the index cache and the start, each put back: a named test must
fail."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from megatron_lite.data import index_cache, indexed_writer
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.indexed_writer import IndexedDatasetWriter
from tests.data import test_index_cache
from tests.data.test_index_cache import cache  # noqa: F401
from tests.faults import test_data_tools
from tests.support.mutants import Mutant, each_is_seen, replaces

Patch = pytest.MonkeyPatch


@replaces("unlink", os)
def the_old_index_stays_until_the_new_one_is_there(unlink, path, *rest):
    return None if str(path).endswith(".idx") else unlink(path, *rest)


@replaces("_publish", IndexedDatasetWriter)
def names_are_not_synced(publish: Any, self: IndexedDatasetWriter) -> None:
    with pytest.MonkeyPatch.context() as inner:
        replaces("sync", indexed_writer)(lambda *_: None)(inner)
        publish(self)


@replaces("_is_still", IndexedDataset)
def a_reader_trusts_the_names(_, self, index_file):
    return True


@replaces("_array", index_cache)
def nobody_compares_checksums(array: Any, folder: str, name: str, entry: Any) -> np.ndarray:
    found = index_cache.checksum_of(f"{folder}/{name}.npy")[1]
    return array(folder, name, {**entry, "sha256": found})


@replaces("sample_index_fault", test_index_cache)
def numbers_may_point_anywhere(_, *args, **options):
    return None


PAIR = test_data_tools.test_a_writer_killed_at_any_point_never_leaves_a_new_bin_beside_an_old_idx
ORDER = test_data_tools.test_the_pair_is_replaced_in_the_order_that_readers_and_a_power_cut_need
FLIPPED = test_index_cache.test_any_flipped_bit_is_found
MUTANTS = [
    Mutant(the_old_index_stays_until_the_new_one_is_there, PAIR),
    Mutant(names_are_not_synced, ORDER),
    Mutant(
        a_reader_trusts_the_names,
        test_data_tools.test_a_reader_that_a_writer_overtakes_does_not_mix_the_pairs,
    ),
    Mutant(nobody_compares_checksums, FLIPPED),
    Mutant(
        numbers_may_point_anywhere,
        test_index_cache.test_numbers_that_point_nowhere_are_not_used_despite_their_checksum,
        dict(
            name="document_order",
            change=lambda array: array + 1,
            reason="document_order holds 3 to 9, expected 2 to 8",
        ),
    ),
]


test_is_seen = each_is_seen(MUTANTS)
