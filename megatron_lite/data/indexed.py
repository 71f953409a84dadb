"""Megatron's indexed dataset, which holds the token ids of many documents.

    PREFIX.bin   raw token ids, one after the other, no header
    PREFIX.idx   all little-endian:
                 "MMIDIDX\\0\\0" | u64 version 1 | u8 dtype code | u64 sequences | u64 documents + 1
                 (34 bytes) | i32[sequences] lengths in tokens | i64[sequences] byte offsets |
                 i64[documents + 1] first sequence of each document |
                 optionally i8[sequences] modes, which text does not use

Both files are read by memory map, so that a dataset larger than memory costs nothing to open. The
constructor checks the whole index and the size of the .bin. A truncated copy is therefore an error
at that point, rather than garbage tokens later. gpt_dataset.py builds samples from it. The writer
writes such a pair whole or not at all.
"""

import bisect
import fcntl
import functools
import glob
import hashlib
import itertools
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import BinaryIO

import numpy as np
from numpy import ndarray

from megatron_lite.config.checks import InputError
from megatron_lite.config.input_file import open_input, regular_path

from .data_paths import prefix_advice
from .durable_files import naming, sync

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
TOKEN_DTYPES: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
FIX = "copy the pair again, or write it again with python -m megatron_lite.tools.preprocess_data"

CHUNK = 1 << 20  # sequences that are checked at once, in a few arrays of 8 bytes each


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the type in which Megatron stores ids of this vocabulary.

    It is u16 for vocabularies below 65500 ids, and i32 for larger ones.
    """
    return TOKEN_DTYPES[8] if vocab_size < 65500 else TOKEN_DTYPES[4]


class IndexedDataset:
    """The sequences of token ids of one pair of files, read only.

    `get` returns views of the file and copies nothing. The constructor raises InputError for every
    fault of the two files that it can find. It takes a few dozen MiB besides the map, however many
    sequences there are.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix, self.idx_path, self.bin_path = prefix, f"{prefix}.idx", f"{prefix}.bin"
        for path in (self.idx_path, self.bin_path):
            if not os.path.exists(path):
                raise InputError(f"{path}: no such file. {prefix_advice(prefix)}")
            regular_path(path, any_link=True)
        with open_input(self.idx_path, any_link=True) as file:
            index_file = os.fstat(file.fileno())
            self.dtype, sequences, documents = self._header_of(file.read(HEADER.size))
            # The arrays follow each other without gaps, so their sizes give their places.
            sizes = (HEADER.size, 4 * sequences, 8 * sequences, 8 * documents)
            lengths, offsets, ids, end = itertools.accumulate(sizes)
            if index_file.st_size not in (end, end + sequences):
                raise self._fault(
                    self.idx_path,
                    f"{index_file.st_size} bytes",
                    f"{end} bytes for {sequences} sequences and {documents - 1} documents",
                )
            self._index = np.memmap(file, mode="r").view(ndarray)
        self.sequence_lengths = self._index[lengths:offsets].view("<i4")
        self._offsets = self._index[offsets:ids].view("<i8")
        self.document_indices = self._index[ids:end].view("<i8")
        expected = self._check_index()
        size = os.path.getsize(self.bin_path)
        if size != expected:
            raise self._fault(
                self.bin_path, f"{size} bytes", f"{expected} bytes, as {self.idx_path} lists them"
            )
        self.tokens = np.empty(0, self.dtype)
        if size:  # mmap refuses empty files
            with open_input(self.bin_path, any_link=True) as file:
                self.tokens = np.memmap(file, self.dtype, mode="r").view(ndarray)
        if not self._is_still(index_file):
            raise InputError(
                f"{self.idx_path} was replaced while it was being read: start again when the "
                "pair is written"
            )

    def __len__(self) -> int:
        """The number of sequences. Text has one sequence for each document that is not empty."""
        return len(self.sequence_lengths)

    def _is_still(self, index_file: os.stat_result) -> bool:
        """Returns whether the opened .idx still has its name.

        A writer removes the .idx before it replaces the .bin. If the .idx is still the same, the
        two files belong together.
        """
        try:
            return os.path.samestat(os.stat(self.idx_path), index_file)
        except OSError:
            return False

    def get(self, sequence: int, start: int = 0, stop: int | None = None) -> ndarray:
        """Returns the ids start <= n < stop of a sequence; by default, all to its end.

        Raises IndexError if they go past the end of the sequence.
        """
        held = int(self.sequence_lengths[sequence])
        stop = held if stop is None else stop
        if not 0 <= start <= stop <= held:
            raise IndexError(
                f"{self.bin_path}: tokens {start}..{stop} of sequence {sequence}, which holds "
                f"{held}"
            )
        first = int(self._offsets[sequence]) // self.dtype.itemsize
        return self.tokens[first + start : first + stop]

    def check_ids(self, ids: ndarray, vocab_size: int, where: str = "it") -> None:
        """Raises InputError if an id is outside the vocabulary."""
        # As numbers without a sign, negative ids are above all others.
        outside = ids[ids.astype(np.int64).view(np.uint64) >= vocab_size]
        if outside.size:
            raise InputError(
                f"{self.bin_path}: {where} holds token id {outside[0]}, but the vocabulary has "
                f"{vocab_size} ids: use the tokenizer that wrote the data, or the --vocab-size it "
                "had"
            )

    def document_of(self, sequence: int) -> int:
        """Returns the number of the document to which a sequence belongs, counted from 0."""
        # np.searchsorted would copy the array, which is not aligned.
        return bisect.bisect_right(self.document_indices, sequence) - 1

    @functools.cached_property
    def fingerprint(self) -> str:
        """A key from the size of the .bin and every byte of the .idx.

        A sample index depends on nothing else of the dataset.
        """
        return f"{self.tokens.nbytes}-{hashlib.sha256(self._index.data).hexdigest()}"

    def _header_of(self, header: bytes) -> tuple[np.dtype, int, int]:
        """Returns the type of the tokens, and the lengths of the arrays."""
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            found = f"{len(header)} bytes" if header.startswith(MAGIC) else repr(header[:9])
            raise self._fault(self.idx_path, f"first bytes {found}", f"a header after {MAGIC!r}")
        _, version, code, sequences, documents = HEADER.unpack(header)
        if version != VERSION or code not in TOKEN_DTYPES or documents < 1:
            known = ", ".join(f"{key} {value.name}" for key, value in TOKEN_DTYPES.items())
            raise self._fault(
                self.idx_path,
                f"version {version}, dtype code {code}, {documents} document indices",
                f"version {VERSION}, a code of {known}, one more index than there are documents",
            )
        return TOKEN_DTYPES[code], sequences, documents

    def _check_index(self) -> int:
        """Compares all arrays of the .idx with each other, in parts. Returns the .bin's size."""
        position, count, documents = 0, len(self), self.document_indices
        for first in range(0, count, CHUNK):
            sizes = self.sequence_lengths[first : first + CHUNK] * np.int64(self.dtype.itemsize)
            # Sequences follow one another without a gap, so the lengths give every offset.
            starts = position + np.cumsum(sizes) - sizes
            offsets = self._offsets[first : first + CHUNK]
            wrong = np.flatnonzero((sizes < 0) | (offsets != starts))
            if wrong.size:
                place = int(wrong[0])
                raise self._fault(
                    self.idx_path,
                    f"length {self.sequence_lengths[first + place]} and offset {offsets[place]} "
                    f"of sequence {first + place}",
                    f"a length >= 0 and offset {starts[place]}, where the one before it ends",
                )
            position = int(starts[-1] + sizes[-1])
        unordered = any(
            (np.diff(documents[first : first + CHUNK + 1]) < 0).any()
            for first in range(0, len(documents), CHUNK)
        )
        if documents[0] != 0 or documents[-1] != count or unordered:
            raise self._fault(
                self.idx_path,
                f"document indices from {documents[0]} to {documents[-1]}"
                f"{', not in order' if unordered else ''}",
                f"indices in ascending order from 0 to {count}, the number of sequences",
            )
        return position

    def _fault(self, path: str, found: str, expected: str) -> InputError:
        return InputError(f"{path}: found {found}, expected {expected}: {FIX}")


class IndexedDatasetWriter:
    """The documents of a pair of files that `indexed_writer` writes, each as one sequence.

    A document without tokens counts as a document without a sequence, as in Megatron's tool.
    file: the .bin.
    """

    def __init__(self, prefix: str, dtype: np.dtype, file: BinaryIO) -> None:
        self.prefix, self.dtype, self._file = prefix, dtype, file
        self.lengths, self.document_indices = array("i"), array("q", [0])

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def add_document(self, tokens: Sequence[int] | ndarray) -> None:
        """Appends one document. Raises InputError if an id does not fit the type of the file."""
        ids = np.asarray(tokens)
        if ids.size:
            limits = np.iinfo(self.dtype)
            low, high = ids.min(), ids.max()
            if low < max(0, limits.min) or high > limits.max:
                raise InputError(
                    f"{self.prefix}.bin: token id {low if low < 0 else high} of document "
                    f"{len(self.document_indices) - 1} does not fit {self.dtype.name} (0 to "
                    f"{limits.max}): is --vocab-size the size of the tokenizer's vocabulary?"
                )
            with naming(self.prefix + ".bin"):
                self._file.write(ids.astype(self.dtype).tobytes())
            self.lengths.append(ids.size)
        self.document_indices.append(len(self.lengths))


@contextmanager
def indexed_writer(prefix: str, dtype: np.dtype) -> Iterator[IndexedDatasetWriter]:
    """Yields what writes a pair of files.

    If the block ends without an exception, both files appear under their names, complete and on the
    disk. Otherwise nothing remains of them. An older pair of that name stays whole until that time.
    The next writer of the same prefix removes the partial files of a process that was killed.
    Raises InputError, with the file's name, if the disk is full or cannot be written.
    """
    folder = os.path.dirname(prefix) or "."
    os.makedirs(folder, exist_ok=True)
    # A writer that was killed has left partial files with a free lock. A file whose lock is held is
    # in use and stays.
    for path in glob.glob(glob.escape(prefix) + ".bin.tmp-*"):
        with suppress(OSError), open(path, "rb") as left:
            fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
            os.unlink(f"{prefix}.idx.tmp-{path.rpartition('-')[2]}")
    idx_path, bin_path = f"{prefix}.idx", f"{prefix}.bin"
    temporary = idx_tmp, bin_tmp = [f"{path}.tmp-{os.getpid()}" for path in (idx_path, bin_path)]
    file = open(bin_tmp, "wb")  # noqa: SIM115 closed below
    try:
        # The lock shows other writers that this file is in use. A file system may have no locks.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        writer = IndexedDatasetWriter(prefix, dtype, file)
        yield writer
        lengths = np.array(writer.lengths, "<i4")
        documents = np.array(writer.document_indices, "<i8")
        offsets = (np.cumsum(lengths, dtype="<i8") - lengths) * dtype.itemsize
        code = next(code for code, known in TOKEN_DTYPES.items() if known == dtype)
        header = HEADER.pack(MAGIC, VERSION, code, len(lengths), len(documents))
        with naming(idx_path), open(idx_tmp, "wb") as index:
            index.writelines((header, lengths.data, offsets.data, documents.data))
        with naming(bin_path):
            file.close()
            for path in temporary:
                sync(path)
            # The old index is removed first, and its removal reaches the disk first. So an old .idx
            # never lies beside the new .bin, whose size it may fit by chance, even if the process
            # or the machine dies in between. IndexedDataset relies on this order.
            with suppress(FileNotFoundError):
                os.unlink(idx_path)
            sync(folder)
            os.replace(bin_tmp, bin_path)
            os.replace(idx_tmp, idx_path)
            sync(folder)
    finally:
        # Closing the file writes its buffer, for which a full disk has no room.
        with suppress(OSError):
            file.close()
        for path in temporary:
            with suppress(FileNotFoundError):
                os.unlink(path)
