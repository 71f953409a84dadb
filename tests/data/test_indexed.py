import os
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.config.checks import InputError
from megatron_lite.data import indexed as indexed_module
from megatron_lite.data.indexed import IndexedDataset, indexed_writer, token_dtype
from tests.support.corpora import written

DOCUMENTS = [[5, 1, 4], [2], [9, 8, 7, 6, 3]]


def idx_bytes(
    *,
    magic=b"MMIDIDX\0\0",
    version=1,
    code=8,
    lengths=(3, 1, 5),
    offsets=(0, 6, 8),
    documents=(0, 1, 2, 3),
    sequences=None,
):
    """An .idx by hand, with struct alone; by default the one of DOCUMENTS in u16."""
    return b"".join(
        [
            magic,
            struct.pack("<QB", version, code),
            struct.pack("<Q", len(lengths) if sequences is None else sequences),
            struct.pack("<Q", len(documents)),
            struct.pack(f"<{len(lengths)}i", *lengths),
            struct.pack(f"<{len(offsets)}q", *offsets),
            struct.pack(f"<{len(documents)}q", *documents),
        ]
    )


IDS = (5, 1, 4, 2, 9, 8, 7, 6, 3)
BIN_BYTES = struct.pack("<9H", *IDS)


def write_bytes(prefix, idx, tokens=BIN_BYTES):
    Path(f"{prefix}.idx").write_bytes(idx)
    Path(f"{prefix}.bin").write_bytes(tokens)
    return str(prefix)


def test_writer_gives_the_bytes_of_the_format(tmp_path):
    written(tmp_path / "data", DOCUMENTS)
    assert (tmp_path / "data.idx").read_bytes() == idx_bytes()
    assert (tmp_path / "data.bin").read_bytes() == BIN_BYTES


def test_token_type_changes_at_65500_ids():
    assert (token_dtype(65499), token_dtype(65500)) == (np.dtype("u2"), np.dtype("i4"))


def test_a_part_of_a_sequence_and_not_past_its_end(tmp_path):
    indexed = IndexedDataset(written(tmp_path / "data", DOCUMENTS))
    assert indexed.get(2, 1, 4).tolist() == [8, 7, 6]
    assert indexed.get(0, 2).tolist() == [4]
    assert indexed.get(1, 1).tolist() == []
    for start, stop in ((0, 4), (2, 4), (-1, 1), (4, None)):
        with pytest.raises(IndexError, match="sequence 0, which holds 3"):
            indexed.get(0, start, stop)


def test_a_document_without_tokens_has_no_sequence(tmp_path):
    indexed = IndexedDataset(written(tmp_path / "data", [[1, 2], [], [3]]))
    assert len(indexed) == 2
    assert indexed.document_indices.tolist() == [0, 1, 1, 2]
    assert [indexed.document_of(sequence) for sequence in range(2)] == [0, 2]


@pytest.mark.parametrize(
    "code, packing", [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (8, "H")]
)
def test_every_integer_type_is_read(tmp_path, code, packing):
    size = struct.calcsize(packing)
    prefix = write_bytes(
        tmp_path / "data",
        # sequence modes at the end are accepted
        idx_bytes(code=code, offsets=(0, 3 * size, 4 * size)) + b"\0\0\0",
        struct.pack(f"<9{packing}", *IDS),
    )
    assert [IndexedDataset(prefix).get(number).tolist() for number in range(3)] == DOCUMENTS


# an .idx, what the message names, and a .bin that is not that of DOCUMENTS
CORRUPTIONS = {
    "wrong magic": (idx_bytes(magic=b"MMIDIDX\0\1"), "idx: found first bytes"),
    "idx cut in the header": (idx_bytes()[:20], "idx: found first bytes 20 bytes"),
    "unknown version": (idx_bytes(version=2), "idx: found version 2"),
    "unknown dtype": (idx_bytes(code=9), "idx: found .*, dtype code 9"),
    "idx cut": (idx_bytes()[:-1], "idx: found 101 bytes, expected 102"),
    "many sequences": (idx_bytes(sequences=2**64 - 1), "idx: found 102 bytes"),
    "no document index": (idx_bytes(documents=()), "found .*, 0 document indices"),
    "negative length": (idx_bytes(lengths=(3, -1, 7)), "length -1 and "),
    "length off": (idx_bytes(lengths=(3, 2, 4)), "offset 8 of .* offset 10"),
    "first offset": (idx_bytes(offsets=(2, 6, 8)), "offset 2 of sequence 0"),
    "offsets not in order": (idx_bytes(offsets=(0, 8, 6)), "offset 8 of sequence 1"),
    "documents end early": (idx_bytes(documents=(0, 1, 2, 2)), "from 0 to 2"),
    "documents not in order": (idx_bytes(documents=(0, 2, 1, 3)), "not in order"),
    "bin cut": (idx_bytes(), "bin: found 17 bytes, expected 18", BIN_BYTES[:-1]),
    "dtype of another size": (idx_bytes(code=4), "offset 6 of sequence 1"),
}


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_link_to_a_file_is_read_and_one_to_a_pipe_or_device_is_refused(tmp_path, ending):
    (tmp_path / "far").mkdir()
    prefix = written(tmp_path / "a", DOCUMENTS)
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


def test_fingerprint_follows_the_lengths_but_not_the_ids(tmp_path):
    texts = [DOCUMENTS, [[0] * 3, [0], [0] * 5], [[0], [0] * 3, [0] * 5]]
    prints = [IndexedDataset(written(tmp_path / "a", one)).fingerprint for one in texts]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("existing", [False, True])
def test_an_exception_leaves_what_was_there_before(tmp_path, existing):
    if existing:
        written(tmp_path / "data", DOCUMENTS)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with (
        pytest.raises(RuntimeError, match="stop"),
        indexed_writer(str(tmp_path / "data"), token_dtype(100)) as writer,
    ):
        writer.add_document([1, 2])
        raise RuntimeError("stop")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("token", [65536, -1])
@pytest.mark.parametrize("kind", [list, np.array])
def test_an_id_that_does_not_fit_is_refused_not_wrapped(tmp_path, token, kind):
    with (
        pytest.raises(
            InputError, match=f"data.bin: token id {token} of document 1 does not fit uint16"
        ),
        indexed_writer(str(tmp_path / "data"), token_dtype(100)) as writer,
    ):
        writer.add_document([1])
        writer.add_document(kind([3, token]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("chunk", [1, 2, 100])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corrupt_pair_is_refused_in_parts_of_every_size(tmp_path, name, chunk, monkeypatch):
    monkeypatch.setattr(indexed_module, "CHUNK", chunk)
    idx, message, *tokens = CORRUPTIONS[name]
    with pytest.raises(InputError, match=message):
        IndexedDataset(write_bytes(tmp_path / "data", idx, *tokens))
