"""The index cache returns what was built, whatever has happened to its files, and says so where it
had to build again."""

import os
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.data import index_cache
from megatron_lite.data.gpt_dataset import build_sample_index, sample_index_fault
from megatron_lite.data.index_cache import kept_arrays
from tests.support.checkpoints import flip_bit

LENGTHS = np.array([3, 11, 1, 6, 9, 2, 7], np.int32)
KEY = {"kind": "test", "seed": 5}


def build():
    return build_sample_index(
        LENGTHS, first_document=2, num_samples=30, seq_length=4, seed=5
    )._asdict()


def fault(arrays):
    return sample_index_fault(arrays, LENGTHS, first_document=2)


def arrays_equal(one, other):
    return set(one) == set(other) and all(
        one[name].dtype == other[name].dtype and np.array_equal(one[name], other[name])
        for name in one
    )


class Cache:
    """A cache that is filled."""

    def __init__(self, folder):
        self.folder = folder
        self.read()
        (self.path,) = (path for path in folder.iterdir() if path.is_dir())
        self.files = {path.name: path.read_bytes() for path in sorted(self.path.iterdir())}

    def read(self, build=build):
        return kept_arrays(str(self.folder), "", KEY, build, fault=fault)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(index_cache, "sync", lambda path: None)
    return Cache(tmp_path / "cache")


def test_any_flipped_bit_is_found(cache):
    """Of each file 150 bits, spread evenly over all places in a byte. The arrays of a damaged copy
    are built again."""
    for name, content in cache.files.items():
        for bit in range(0, 8 * len(content), 8 * len(content) // 150 | 1):
            flip_bit(cache.path / name, bit)
            with pytest.raises(pytest.fail.Exception):
                cache.read(pytest.fail)
            (cache.path / name).write_bytes(content)
    assert arrays_equal(cache.read(pytest.fail), build())


def _link(path):
    elsewhere = path.parents[2] / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def _pipe(path):
    path.unlink()
    os.mkfifo(path)


def _device(path):
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    "damage",
    [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-5]), _link, _pipe, _device],
)
def test_a_damaged_file_is_built_again_with_a_notice(cache, damage, capsys):
    damage(next(cache.path.glob("sample_places.*")))
    assert arrays_equal(cache.read(), build())
    (line,) = capsys.readouterr().err.splitlines()
    assert "is damaged" in line and str(cache.path) in line
    assert arrays_equal(cache.read(), build()) and not capsys.readouterr().err


@pytest.mark.parametrize(
    "name, change, reason",
    [
        ("document_order", lambda array: array + 1, "document_order holds 3 to 9, expected 2 to 8"),
        ("document_order", lambda array: array.astype(np.float32), "whole numbers expected"),
        ("sample_order", lambda array: array[:-1], "whole numbers expected"),
        ("sample_order", lambda array: array + np.uint32(1), "sample_order holds 1 to "),
        ("sample_places", lambda array: array + 1, "sample_places holds 1 to "),
        ("sample_offsets", lambda array: array - 1, "sample_offsets holds -1 to "),
    ],
)
def test_numbers_that_point_nowhere_are_not_used_despite_their_checksum(
    tmp_path, name, change, reason, capsys
):
    """As an earlier version with a mistake in it could have written them."""
    wrong = build()
    wrong[name] = change(wrong[name])
    kept_arrays(str(tmp_path), "", KEY, lambda: wrong, fault=lambda _: None)
    assert arrays_equal(kept_arrays(str(tmp_path), "", KEY, build, fault=fault), build())
    assert reason in capsys.readouterr().err


def test_an_undamaged_copy_in_a_folder_that_cannot_be_written_is_read(cache, monkeypatch):
    monkeypatch.setattr(os, "makedirs", pytest.fail)
    assert arrays_equal(cache.read(), build())
