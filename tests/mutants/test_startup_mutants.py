"""Mistakes in the data tools, the index cache and the start, each put back: a named test must
fail."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite.config import plain
from megatron_lite.data import index_cache, indexed_writer
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.indexed_writer import IndexedDatasetWriter
from megatron_lite.supervision.exits import Exits
from megatron_lite.tools import preprocess_data
from megatron_lite.training import out_of_memory
from tests.config import test_json
from tests.data import test_index_cache
from tests.faults import test_data_tools, test_signals
from tests.support.mutants import Mutant, assert_seen, replaces
from tests.training import test_capacity

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


@replaces("lines_of", preprocess_data)
def lines_have_no_limit(lines, path, limit):
    return lines(path, 1 << 30)


@replaces("finish", Exits)
def a_finished_run_hears_signals(_, self):
    pass


@replaces("parse_whole_number", plain)
def numbers_have_no_limit(_, text):
    return int(text)


@replaces("without_repetition", plain)
def a_later_name_wins(_, pairs):
    return dict(pairs)


@replaces("gather_texts", out_of_memory)
def each_rank_counts_for_itself(_, text, parallel):
    return [text]


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
    Mutant(
        lines_have_no_limit,
        test_data_tools.test_a_line_beyond_the_limit_is_named_and_one_at_the_limit_is_read,
        dict(workers="1"),
    ),
    Mutant(
        a_finished_run_hears_signals,
        test_signals.test_further_signals_at_the_end_of_a_saved_run_do_not_change_its_status,
        dict(rank_0_owns_store=False),
    ),
    Mutant(
        numbers_have_no_limit,
        test_json.test_text_that_is_no_run_is_one_short_error,
        dict(text='{"model": {"num_layers": 9223372036854775808}}', message="is beyond 64 bits"),
    ),
    Mutant(
        a_later_name_wins,
        test_json.test_text_that_is_no_run_is_one_short_error,
        dict(text='{"model": {}, "model": {}}', message="'model' is given twice"),
    ),
    Mutant(
        each_rank_counts_for_itself,
        test_capacity.test_a_model_beyond_the_hosts_memory_is_refused_on_every_rank_with_numbers,
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_is_seen(
    mutant: Mutant, monkeypatch: Patch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixtures: dict[str, object] = dict(tmp_path=tmp_path, capsys=capsys)
    if mutant.test is FLIPPED:
        fixtures["cache"] = test_index_cache.Cache(tmp_path / "cache")
    assert_seen(mutant, monkeypatch, **fixtures)
