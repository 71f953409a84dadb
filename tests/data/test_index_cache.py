"""The index cache returns what was built, whatever has happened to its files, and says so where it
had to build again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.data import index_cache
from megatron_lite.data.index_cache import Allocate, cached_arrays, in_memory
from megatron_lite.data.sample_index import build_sample_index, sample_index_fault
from tests.support.checkpoints import flip_bit

LENGTHS = np.array([3, 11, 1, 6, 9, 2, 7], np.int32)
KEY = {"kind": "test", "seed": 5}


def build(allocate: Allocate = in_memory) -> dict[str, np.ndarray]:
    return build_sample_index(
        LENGTHS, first_document=2, num_samples=30, seq_length=4, seed=5, allocate=allocate
    )._asdict()


def fault(arrays: dict[str, np.ndarray]) -> str | None:
    return sample_index_fault(arrays, LENGTHS, first_document=2)


def arrays_equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return list(one) == list(other) and all(
        one[name].dtype == other[name].dtype and np.array_equal(one[name], other[name])
        for name in one
    )


class Cache:
    """A cache that is filled. `read` returns its arrays, and what was said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.read()
        (self.path,) = (path for path in folder.iterdir() if path.is_dir())
        self.files = {path.name: path.read_bytes() for path in sorted(self.path.iterdir())}

    def read(self) -> tuple[dict[str, np.ndarray], list[str]]:
        said: list[str] = []
        return cached_arrays(str(self.folder), KEY, build, fault=fault, say=said.append), said

    def bits(self) -> Iterator[tuple[str, int]]:
        for name, content in self.files.items():
            yield from ((name, bit) for bit in range(8 * len(content)))

    def flip(self, name: str, bit: int) -> None:
        content = bytearray(self.files[name])
        content[bit // 8] ^= 1 << bit % 8
        (self.path / name).write_bytes(content)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setattr(index_cache, "sync_file", lambda file: file.flush())
    monkeypatch.setattr(index_cache, "sync_folder", lambda path: None)
    return Cache(tmp_path / "cache")


def test_any_flipped_bit_is_found(cache: Cache) -> None:
    """Of each file 150 bits, spread evenly over all places in a byte. The arrays of a damaged copy
    are built again."""

    class IsBuiltAgain(Exception):
        pass

    def build_again(allocate: Allocate) -> dict[str, np.ndarray]:
        raise IsBuiltAgain

    def read() -> dict[str, np.ndarray]:
        return cached_arrays(
            str(cache.folder), KEY, build_again, fault=fault, say=lambda line: None
        )

    for name, bit in cache.bits():
        if bit % (8 * len(cache.files[name]) // 150 | 1):
            continue
        cache.flip(name, bit)
        with pytest.raises(IsBuiltAgain):
            read()
        (cache.path / name).write_bytes(cache.files[name])
    assert arrays_equal(read(), build())


def _flipped(path: Path) -> None:
    flip_bit(path, 301)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def _link(path: Path) -> None:
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("name", ["arrays.json", "key.json", "sample_starts.npy"])
@pytest.mark.parametrize("damage", [_flipped, Path.unlink, _cut, _link, _pipe, _device])
def test_a_damaged_file_is_built_again_with_a_notice(
    cache: Cache, name: str, damage: Callable[[Path], None]
) -> None:
    damage(cache.path / name)
    arrays, said = cache.read()
    (line,) = said
    assert arrays_equal(arrays, build()) and "is damaged" in line and str(cache.path) in line
    assert cache.read()[1] == []


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("document_order", lambda array: array + 1, "document_order holds 3 to 9, expected 2 to 8"),
        ("document_order", lambda array: array.astype(np.float32), "does not hold whole numbers"),
        ("sample_order", lambda array: array[:-1], "found shapes"),
        ("sample_order", lambda array: array + np.uint32(1), "sample_order holds 1 to "),
        ("sample_starts", lambda array: array[::-1].copy(), "sample_starts is not in order"),
        ("sample_starts", lambda array: array - 1, "sample_starts holds -1 to "),
    ],
)
def test_numbers_that_point_nowhere_are_not_used_despite_their_checksum(
    tmp_path: Path, name: str, change: Callable[[np.ndarray], np.ndarray], reason: str
) -> None:
    """As an earlier version with a mistake in it could have written them."""
    folder, said = str(tmp_path), list[str]()
    wrong = build()
    wrong[name] = change(wrong[name])
    cached_arrays(folder, KEY, lambda allocate: wrong)
    assert arrays_equal(cached_arrays(folder, KEY, build, fault=fault, say=said.append), build())
    assert len(said) == 1 and reason in said[0]


def test_what_does_not_come_back_from_the_disk_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checksums = iter("123456789")
    monkeypatch.setattr(index_cache, "_checksum", lambda file: next(checksums) * 64)
    with pytest.raises(OSError, match="does not come back from the disk"):
        cached_arrays(str(tmp_path), KEY, build, fault=fault)


def test_an_undamaged_copy_in_a_folder_that_cannot_be_written_is_read(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*args: object, **options: object) -> None:
        raise OSError("read-only file system")

    monkeypatch.setattr(os, "makedirs", read_only)
    monkeypatch.setattr(index_cache, "_locked", read_only)
    assert arrays_equal(cache.read()[0], build())
