from __future__ import annotations

import functools
import os
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.config.checks import InputError
from megatron_lite.data import indexed as indexed_module
from megatron_lite.data import kept_checksum
from megatron_lite.data.index_cache import kept_arrays
from megatron_lite.data.indexed import HEADER, MAGIC, IndexedDataset, token_dtype
from megatron_lite.data.indexed_writer import IndexedDatasetWriter
from megatron_lite.data.kept_checksum import Keep

DOCUMENTS = [[5, 1, 4], [2], [9, 8, 7, 6, 3]]


def write(prefix: Path | str, documents: list[list[int]], vocab_size: int = 100) -> str:
    with IndexedDatasetWriter(str(prefix), token_dtype(vocab_size)) as writer:
        for document in documents:
            writer.add_document(document)
    return str(prefix)


def idx_bytes(
    *,
    magic: bytes = b"MMIDIDX\0\0",
    version: int = 1,
    code: int = 8,
    lengths: tuple[int, ...] = (3, 1, 5),
    offsets: tuple[int, ...] = (0, 6, 8),
    documents: tuple[int, ...] = (0, 1, 2, 3),
    sequences: int | None = None,
    document_count: int | None = None,
) -> bytes:
    """An .idx by hand, with struct alone; by default the one of DOCUMENTS in u16."""
    return b"".join(
        [
            magic,
            struct.pack("<Q", version),
            struct.pack("<B", code),
            struct.pack("<Q", len(lengths) if sequences is None else sequences),
            struct.pack("<Q", len(documents) if document_count is None else document_count),
            struct.pack(f"<{len(lengths)}i", *lengths),
            struct.pack(f"<{len(offsets)}q", *offsets),
            struct.pack(f"<{len(documents)}q", *documents),
        ]
    )


BIN_BYTES = struct.pack("<9H", 5, 1, 4, 2, 9, 8, 7, 6, 3)


def write_bytes(prefix: Path, idx: bytes, tokens: bytes) -> str:
    Path(f"{prefix}.idx").write_bytes(idx)
    Path(f"{prefix}.bin").write_bytes(tokens)
    return str(prefix)


def test_writer_gives_the_bytes_of_the_format(tmp_path: Path) -> None:
    write(tmp_path / "data", DOCUMENTS)
    assert (tmp_path / "data.idx").read_bytes() == idx_bytes()
    assert (tmp_path / "data.bin").read_bytes() == BIN_BYTES


def test_writer_gives_i32_for_a_large_vocabulary(tmp_path: Path) -> None:
    write(tmp_path / "data", [[70000, 1], [2]], vocab_size=65500)
    assert (tmp_path / "data.bin").read_bytes() == struct.pack("<3i", 70000, 1, 2)
    assert (tmp_path / "data.idx").read_bytes() == idx_bytes(
        code=4, lengths=(2, 1), offsets=(0, 8), documents=(0, 1, 2)
    )


def test_token_type_changes_at_65500_ids() -> None:
    assert (token_dtype(65499), token_dtype(65500)) == (np.dtype("u2"), np.dtype("i4"))


@pytest.mark.parametrize("vocab_size", [100, 100_000])
def test_every_document_comes_back(tmp_path: Path, vocab_size: int) -> None:
    random = np.random.RandomState(0)
    documents = [
        random.randint(0, vocab_size, size=size).tolist() for size in random.randint(1, 40, size=57)
    ]
    indexed = IndexedDataset(write(tmp_path / "data", documents, vocab_size))
    assert len(indexed) == 57
    assert [indexed.get(number).tolist() for number in range(57)] == documents
    assert indexed.sequence_lengths.tolist() == [len(document) for document in documents]
    assert indexed.document_indices.tolist() == list(range(58))
    assert indexed.tokens.tolist() == [token for document in documents for token in document]


def test_a_part_of_a_sequence_and_not_past_its_end(tmp_path: Path) -> None:
    indexed = IndexedDataset(write(tmp_path / "data", DOCUMENTS))
    assert indexed.get(2, 1, 3).tolist() == [8, 7, 6]
    assert indexed.get(0, 2).tolist() == [4]
    assert indexed.get(1, 1).tolist() == []
    for offset, length in ((0, 4), (2, 2), (-1, 1), (4, None)):
        with pytest.raises(IndexError, match="sequence 0, which holds 3"):
            indexed.get(0, offset, length)


def test_a_document_without_tokens_has_no_sequence(tmp_path: Path) -> None:
    indexed = IndexedDataset(write(tmp_path / "data", [[1, 2], [], [3]]))
    assert len(indexed) == 2
    assert indexed.document_indices.tolist() == [0, 1, 1, 2]
    assert [indexed.document_of(sequence) for sequence in range(2)] == [0, 2]


def test_a_pair_without_documents_opens(tmp_path: Path) -> None:
    assert len(IndexedDataset(write(tmp_path / "data", []))) == 0


def test_sequence_modes_at_the_end_are_accepted(tmp_path: Path) -> None:
    prefix = write_bytes(tmp_path / "data", idx_bytes() + b"\0\0\0", BIN_BYTES)
    assert IndexedDataset(prefix).get(1).tolist() == [2]


@pytest.mark.parametrize(
    ("code", "packing"), [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (8, "H")]
)
def test_every_integer_type_is_read(tmp_path: Path, code: int, packing: str) -> None:
    size = struct.calcsize(packing)
    prefix = write_bytes(
        tmp_path / "data",
        idx_bytes(code=code, offsets=(0, 3 * size, 4 * size)),
        struct.pack(f"<9{packing}", 5, 1, 4, 2, 9, 8, 7, 6, 3),
    )
    assert [IndexedDataset(prefix).get(number).tolist() for number in range(3)] == DOCUMENTS


CORRUPTIONS = {
    "wrong magic": (idx_bytes(magic=b"MMIDIDX\0\1"), BIN_BYTES, r"data\.idx: found first bytes"),
    "empty idx": (b"", BIN_BYTES, r"data\.idx: found first bytes b''"),
    "idx cut in the header": (
        idx_bytes()[:20],
        BIN_BYTES,
        r"data\.idx: found 20 bytes, expected a header of 34",
    ),
    "unknown version": (
        idx_bytes(version=2),
        BIN_BYTES,
        r"data\.idx: found version 2, expected version 1",
    ),
    "unknown dtype": (
        idx_bytes(code=9),
        BIN_BYTES,
        r"data\.idx: found dtype code 9, expected one of 1 uint8",
    ),
    "float tokens": (
        idx_bytes(code=7),
        BIN_BYTES,
        r"data\.idx: found dtype code 7 float32, expected",
    ),
    "idx cut": (
        idx_bytes()[:-1],
        BIN_BYTES,
        r"data\.idx: found 101 bytes, expected 102 bytes for 3 sequences and 3 documents",
    ),
    "idx too long": (idx_bytes() + b"\0", BIN_BYTES, r"data\.idx: found 103 bytes, expected 102"),
    "sequence count": (
        idx_bytes(sequences=4),
        BIN_BYTES,
        r"data\.idx: found 102 bytes, expected 114",
    ),
    "absurd sequence count": (
        idx_bytes(sequences=2**64 - 1),
        BIN_BYTES,
        r"data\.idx: found 102 bytes, expected",
    ),
    "document count": (
        idx_bytes(document_count=3),
        BIN_BYTES,
        r"data\.idx: found 102 bytes, expected 94",
    ),
    "no document index": (
        idx_bytes(documents=()),
        BIN_BYTES,
        r"data\.idx: found 0 document indices",
    ),
    "negative length": (
        idx_bytes(lengths=(3, -1, 7)),
        BIN_BYTES,
        r"data\.idx: found length -1 of sequence 1",
    ),
    "length off": (
        idx_bytes(lengths=(3, 2, 4)),
        BIN_BYTES,
        r"data\.idx: found offset 8 of sequence 2, expected 10",
    ),
    "first offset": (
        idx_bytes(offsets=(2, 6, 8)),
        BIN_BYTES,
        r"data\.idx: found offset 2 of sequence 0, expected 0",
    ),
    "offsets not in order": (
        idx_bytes(offsets=(0, 8, 6)),
        BIN_BYTES,
        r"data\.idx: found offset 8 of sequence 1, expected 6",
    ),
    "documents from 1": (
        idx_bytes(documents=(1, 1, 2, 3)),
        BIN_BYTES,
        r"data\.idx: found document indices from 1 to 3",
    ),
    "documents end early": (
        idx_bytes(documents=(0, 1, 2, 2)),
        BIN_BYTES,
        r"found document indices from 0 to 2, expected .* 3",
    ),
    "documents not in order": (
        idx_bytes(documents=(0, 2, 1, 3)),
        BIN_BYTES,
        r"found document indices .*not in order",
    ),
    "bin cut": (
        idx_bytes(),
        BIN_BYTES[:-2],
        r"data\.bin: found 16 bytes, expected 18 bytes, as .*data\.idx lists",
    ),
    "bin cut in a token": (idx_bytes(), BIN_BYTES[:-1], r"data\.bin: found 17 bytes, expected 18"),
    "bin too long": (idx_bytes(), BIN_BYTES + b"\0\0", r"data\.bin: found 20 bytes, expected 18"),
    "bin empty": (idx_bytes(), b"", r"data\.bin: found 0 bytes, expected 18"),
    "dtype of another size": (
        idx_bytes(code=4),
        BIN_BYTES,
        r"data\.idx: found offset 6 of sequence 1, expected 12",
    ),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corrupt_pair_is_refused_at_open(tmp_path: Path, name: str) -> None:
    idx, tokens, message = CORRUPTIONS[name]
    prefix = write_bytes(tmp_path / "data", idx, tokens)
    with pytest.raises(InputError, match=message):
        IndexedDataset(prefix)


@pytest.mark.parametrize("missing", ["bin", "idx"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    prefix = write(tmp_path / "data", DOCUMENTS)
    os.unlink(f"{prefix}.{missing}")
    with pytest.raises(InputError, match=rf"data\.{missing}: no such file"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_link_to_a_file_is_read_and_one_to_a_pipe_or_device_is_refused(
    tmp_path: Path, ending: str
) -> None:
    (tmp_path / "far").mkdir()
    prefix = write(tmp_path / "a", DOCUMENTS)
    path, kept = Path(prefix + ending), tmp_path / "far" / "kept"
    path.rename(kept)
    os.mkfifo(tmp_path / "far" / "pipe")
    for target in ("far/pipe", "/dev/zero", "far"):
        path.symlink_to(target)
        with pytest.raises(InputError, match=f"a{ending}: is no regular file"):
            IndexedDataset(prefix)
        path.unlink()
    path.symlink_to(kept)
    assert IndexedDataset(prefix).get(0).tolist() == DOCUMENTS[0]


def test_fingerprint_follows_the_lengths_but_not_the_ids(tmp_path: Path) -> None:
    prints = [
        IndexedDataset(write(tmp_path / name, documents)).fingerprint
        for name, documents in (
            ("a", DOCUMENTS),
            ("b", [[0] * 3, [0], [0] * 5]),
            ("c", [[0], [0] * 3, [0] * 5]),
        )
    ]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("existing", [False, True])
def test_an_exception_leaves_what_was_there_before(tmp_path: Path, existing: bool) -> None:
    if existing:
        write(tmp_path / "data", DOCUMENTS)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with (
        pytest.raises(RuntimeError, match="stop"),
        IndexedDatasetWriter(str(tmp_path / "data"), token_dtype(100)) as writer,
    ):
        writer.add_document([1, 2])
        raise RuntimeError("stop")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_pair_is_replaced_whole(tmp_path: Path) -> None:
    write(tmp_path / "data", DOCUMENTS)
    indexed = IndexedDataset(write(tmp_path / "data", [[7]]))
    assert [document.tolist() for document in map(indexed.get, range(len(indexed)))] == [[7]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx"]


@pytest.mark.parametrize("token", [65536, -1])
@pytest.mark.parametrize("kind", [list, np.array])
def test_an_id_that_does_not_fit_is_refused_not_wrapped(
    tmp_path: Path, token: int, kind: type
) -> None:
    with (
        pytest.raises(
            InputError, match=f"data.bin: token id {token} of document 1 does not fit uint16"
        ),
        IndexedDatasetWriter(str(tmp_path / "data"), token_dtype(100)) as writer,
    ):
        writer.add_document([1])
        writer.add_document(kind([3, token]))
    assert list(tmp_path.iterdir()) == []


def _kept(folder: Path) -> Keep:
    return functools.partial(kept_arrays, str(folder), "no/prefix")


def _settled(monkeypatch: pytest.MonkeyPatch, seconds: float = -1e9) -> None:
    """Even a small index is kept, as soon as it has this age."""
    monkeypatch.setattr(indexed_module, "KEPT_FROM", 0)
    monkeypatch.setattr(kept_checksum, "SETTLED_S", seconds)


def test_a_large_index_is_checked_and_hashed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _settled(monkeypatch)
    prefix, keep = write(tmp_path / "data", DOCUMENTS), _kept(tmp_path / "kept")
    expected = IndexedDataset(prefix).fingerprint
    assert IndexedDataset(prefix, keep=keep).fingerprint == expected
    for name in ("_check_index", "_checksum"):
        monkeypatch.setattr(IndexedDataset, name, lambda self: pytest.fail("again"))
    again = IndexedDataset(prefix, keep=keep)
    assert again.fingerprint == expected
    assert [again.get(number).tolist() for number in range(3)] == DOCUMENTS


def test_an_index_that_changes_is_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its size, its inode and its time of modification stay the same."""
    _settled(monkeypatch)
    prefix, keep = write(tmp_path / "data", DOCUMENTS), _kept(tmp_path / "kept")
    IndexedDataset(prefix, keep=keep)
    before = os.stat(prefix + ".idx")
    time.sleep(0.05)  # a tick of the file system's clock
    with open(prefix + ".idx", "r+b") as file:
        file.seek(34)
        file.write(b"\x02")
    os.utime(prefix + ".idx", ns=(before.st_atime_ns, before.st_mtime_ns))
    after = os.stat(prefix + ".idx")
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (
        before.st_ino,
        before.st_size,
        before.st_mtime_ns,
    )
    with pytest.raises(InputError, match="offset .* of sequence 1, expected"):
        IndexedDataset(prefix, keep=keep)


def test_a_shorter_bin_is_found_although_the_index_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _settled(monkeypatch)
    prefix, keep = write(tmp_path / "data", DOCUMENTS), _kept(tmp_path / "kept")
    IndexedDataset(prefix, keep=keep)
    os.truncate(prefix + ".bin", 4)
    with pytest.raises(InputError, match=r"data\.bin: found 4 bytes"):
        IndexedDataset(prefix, keep=keep)


def test_the_checksum_of_a_young_index_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _settled(monkeypatch, seconds=1e9)
    IndexedDataset(write(tmp_path / "data", DOCUMENTS), keep=_kept(tmp_path / "kept"))
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corrupt_pair_is_refused_in_parts_of_every_size(
    tmp_path: Path, name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed_module, "CHUNK", chunk)
    idx, tokens, message = CORRUPTIONS[name]
    with pytest.raises(InputError, match=message):
        IndexedDataset(write_bytes(tmp_path / "data", idx, tokens))


def test_the_check_takes_the_memory_of_one_part(tmp_path: Path) -> None:
    """4 million sequences of no tokens in a file with holes: whole arrays would take 32 MB each."""
    count = 1 << 22
    with open(tmp_path / "data.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 4, count, 2))
        file.truncate(HEADER.size + 12 * count + 8)
        file.seek(0, os.SEEK_END)
        file.write(count.to_bytes(8, "little"))
    (tmp_path / "data.bin").write_bytes(b"")
    tracemalloc.start()
    try:
        assert len(IndexedDataset(str(tmp_path / "data"))) == count
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 6 * 8 * indexed_module.CHUNK, most
