"""Writes a pair of files of an indexed dataset, whole or not at all.

indexed.py describes the two files and reads them.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
from array import array
from collections.abc import Iterator, Sequence
from types import TracebackType

import numpy as np

from megatron_lite.config.checks import InputError
from megatron_lite.data.durable_files import sync
from megatron_lite.data.indexed import HEADER, MAGIC, TOKEN_DTYPES, VERSION


class IndexedDatasetWriter:
    """Context manager that writes a pair of files, with each document as one sequence.

    If the block ends without an exception, both files appear under their names, complete and on the
    disk. Otherwise nothing remains of them. An older pair of that name stays whole until that time.
    The next writer of the same prefix removes the partial files of a process that was killed. A
    document without tokens counts as a document without a sequence, as in Megatron's tool. Raises
    InputError, with the file's name, if the disk is full or cannot be written.
    """

    def __init__(self, prefix: str, dtype: np.dtype) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype)
        self._code = next(code for code, known in TOKEN_DTYPES.items() if known == self.dtype)
        self._lengths, self._document_indices = array("i"), array("q", [0])
        os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
        _remove_remains(prefix)
        self._bin_tmp, self._idx_tmp = (
            f"{prefix}.{kind}.tmp-{os.getpid()}" for kind in ("bin", "idx")
        )
        self._file = open(self._bin_tmp, "wb")  # noqa: SIM115 closed in __exit__
        # The lock shows other writers that this file is in use. A file system may have no locks.
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    @property
    def num_tokens(self) -> int:
        return sum(self._lengths)

    def add_document(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Appends one document. Raises InputError if an id does not fit the type of the file."""
        ids = np.asarray(tokens)
        if ids.size:
            limits = np.iinfo(self.dtype)
            low, high = ids.min(), ids.max()
            if low < max(0, limits.min) or high > limits.max:
                raise InputError(
                    f"{self.prefix}.bin: token id {low if low < 0 else high} of document "
                    f"{len(self._document_indices) - 1} does not fit {self.dtype.name} (0 to "
                    f"{limits.max}): is --vocab-size the size of the tokenizer's vocabulary?"
                )
            with _naming(self.prefix + ".bin"):
                self._file.write(ids.astype(self.dtype).tobytes())
            self._lengths.append(ids.size)
        self._document_indices.append(len(self._lengths))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            # Closing the file writes its buffer, for which a full disk has no room.
            with contextlib.suppress(OSError):
                self._file.close()
            for path in (self._bin_tmp, self._idx_tmp):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)

    def _publish(self) -> None:
        lengths = np.array(self._lengths, "<i4")
        offsets = (np.cumsum(lengths, dtype=np.int64) - lengths) * self.dtype.itemsize
        with _naming(self.prefix + ".idx"), open(self._idx_tmp, "wb") as file:
            file.write(
                HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(self._document_indices))
            )
            for array in (lengths, offsets.astype("<i8"), np.array(self._document_indices, "<i8")):
                file.write(array.tobytes())
        with _naming(self.prefix + ".bin"):
            self._file.close()
            sync(self._idx_tmp)
            sync(self._bin_tmp)
            # The old index is removed first, and its removal reaches the disk first. So an old .idx
            # never lies beside the new .bin, whose size it may fit by chance, even if the process
            # or the machine dies in between. IndexedDataset relies on this order.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.prefix + ".idx")
            sync(os.path.dirname(self.prefix) or ".")
            os.replace(self._bin_tmp, self.prefix + ".bin")
            os.replace(self._idx_tmp, self.prefix + ".idx")
            sync(os.path.dirname(self.prefix) or ".")


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Turns an OSError into an InputError that names the file.

    The OSErrors of write and fsync contain no name.
    """
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error


def _remove_remains(prefix: str) -> None:
    """Removes partial files of this pair whose writer was killed.

    The lock on such a file is free. A file whose lock is held is in use and stays.
    """
    for path in glob.glob(glob.escape(prefix) + ".bin.tmp-*"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
            os.unlink(f"{prefix}.idx.tmp-{path.rpartition('-')[2]}")
