"""The tokens of each sample: Megatron's order of documents and samples, number for number.

It needs numpy alone.

The documents of a split are read for as many epochs as the run needs. Their order is shuffled, and
they are laid end to end as one tape. With s = seq_length, sample k takes the tokens k*s .. k*s+s of
the tape. The last of these s+1 tokens is only a label; it is also the first token of the next
sample. After that the samples are shuffled. Both shuffles use one RandomState(seed), so every rank
builds the same index by itself.

If the run needs less than 80 % of the last epoch, that epoch is kept apart: all the other epochs
are read before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from megatron_lite.data.index_cache import Allocate, in_memory

LAST_EPOCH_THRESHOLD = 0.80
# Documents, or samples, of which temporary arrays are made at once. Those arrays take 40 MiB.
CHUNK = 1 << 20


class SampleIndex(NamedTuple):
    """The index from samples to tokens.

    document_order: the documents of the tape, in order.
    sample_starts: [samples + 1, 2], for each sample its place in the tape and the token offset in
    the document of that place.
    sample_order: the shuffled numbers of the samples.
    """

    document_order: np.ndarray
    sample_starts: np.ndarray
    sample_order: np.ndarray


def build_sample_index(
    lengths: np.ndarray,
    *,
    first_document: int,
    num_samples: int | None,
    seq_length: int,
    seed: int,
    allocate: Allocate = in_memory,
) -> SampleIndex:
    """Returns the index over documents of these lengths, numbered from `first_document`.

    num_samples: the index holds all samples of as many epochs as this number needs; None for one
    epoch.
    allocate: makes the three arrays of the result. Besides them the work takes 40 MiB, however many
    documents there are.
    """
    # N samples need N * seq_length + 1 tokens, because neighbours share a token.
    tokens = int(lengths.sum(dtype=np.int64))
    # The + 1 is the label of the last token.
    epochs = 1 if num_samples is None else max(1, -(-(num_samples * seq_length + 1) // tokens))
    samples = (epochs * tokens - 1) // seq_length  # of all epochs; below, of all but the last
    before_last = ((epochs - 1) * tokens - 1) // seq_length
    last_is_apart = (
        num_samples is not None
        and epochs > 1
        and num_samples - before_last < int(LAST_EPOCH_THRESHOLD * ((tokens - 1) // seq_length))
    )
    # The order of the two shuffles is Megatron's: the second continues the numbers of the first.
    random = np.random.RandomState(seed)
    document_order = allocate("document_order", (epochs * len(lengths),), np.int32)
    for epoch in np.split(document_order, epochs):
        _count_up(epoch, first_document)
    _shuffle(random, document_order, len(lengths) * (epochs - 1) if last_is_apart else None)
    largest = max(len(document_order), int(lengths.max()))
    sample_starts = allocate(
        "sample_starts",
        (samples + 1, 2),
        np.int32 if largest <= np.iinfo(np.int32).max else np.int64,
    )
    _fill_starts(sample_starts, lengths, document_order, first_document, seq_length)
    # Megatron's type: the shuffle of 32-bit and of 64-bit items draws the same numbers.
    order_type = np.uint32 if samples < np.iinfo(np.uint32).max - 1 else np.int64
    sample_order = allocate("sample_order", (samples,), order_type)
    _count_up(sample_order, 0)
    _shuffle(random, sample_order, before_last if last_is_apart else None)
    return SampleIndex(document_order, sample_starts, sample_order)


def sample_index_fault(
    arrays: Mapping[str, np.ndarray], lengths: np.ndarray, *, first_document: int
) -> str | None:
    """Returns what is wrong with an index that was read from a file; None if nothing is.

    lengths: the lengths of the documents of the split.
    It checks types, shapes, and that every number lies within the array that it points into.
    Therefore no sample reads documents of another split.
    """
    if set(arrays) != set(SampleIndex._fields):
        return f"found arrays {sorted(arrays)}, expected {sorted(SampleIndex._fields)}"
    index = SampleIndex(**arrays)
    samples = len(index.sample_order) if index.sample_order.ndim else 0
    if any(array.dtype.kind not in "iu" for array in index):
        return "an array does not hold whole numbers"
    if (
        index.document_order.ndim != 1
        or index.sample_order.ndim != 1
        or index.sample_starts.shape != (samples + 1, 2)
    ):
        return (
            f"found shapes {[array.shape for array in index]}, expected [tape], [samples + "
            "1, 2] and [samples]"
        )
    places, offsets = index.sample_starts[:, 0], index.sample_starts[:, 1]
    bounds = (
        ("document_order", index.document_order, first_document, first_document + len(lengths)),
        ("sample_order", index.sample_order, 0, samples),
        ("sample_starts", places, 0, len(index.document_order)),
        ("sample_starts", offsets, 0, int(lengths.max()) + 1),
    )
    for name, values, low, stop in bounds:
        if values.size and not (low <= values.min() and values.max() < stop):
            return f"{name} holds {values.min()} to {values.max()}, expected {low} to {stop - 1}"
    for start in range(0, samples, CHUNK):
        part = places[start : start + CHUNK + 1]
        if not (part[:-1] <= part[1:]).all():
            return "sample_starts is not in order"
    return None


def _count_up(items: np.ndarray, first: int) -> None:
    """Sets the items to first, first + 1, .."""
    for start in range(0, len(items), CHUNK):
        part = items[start : start + CHUNK]
        part[:] = np.arange(first + start, first + start + len(part))


def _shuffle(random: np.random.RandomState, items: np.ndarray, boundary: int | None) -> None:
    """Brings the items into random order, in place.

    boundary: shuffles the items before it and after it separately.
    """
    for part in (items,) if boundary is None else (items[:boundary], items[boundary:]):
        random.shuffle(part)


def _fill_starts(
    sample_starts: np.ndarray,
    lengths: np.ndarray,
    document_order: np.ndarray,
    first_document: int,
    seq_length: int,
) -> None:
    """Sets the place and the offset of the first token of every sample, and of the one behind it.

    The tape is walked in parts, of CHUNK documents and of CHUNK samples.
    """
    sample, token = 0, 0
    for place in range(0, len(document_order), CHUNK):
        part = lengths[document_order[place : place + CHUNK] - first_document]
        ends = token + np.cumsum(part, dtype=np.int64)
        token = int(ends[-1])
        stop = min(-(-token // seq_length), len(sample_starts))
        for first in range(sample, stop, CHUNK):
            tokens = np.arange(first, min(first + CHUNK, stop), dtype=np.int64) * seq_length
            # The first document that ends behind the token, which passes over empty documents.
            places = np.searchsorted(ends, tokens, side="right")
            rows = sample_starts[first : first + len(tokens)]
            rows[:, 0] = place + places
            rows[:, 1] = tokens - ends[places] + part[places]
        sample = max(sample, stop)
    # As in Megatron, sample 0 starts at place 0 even if the tape begins with empty documents.
    sample_starts[0] = 0
