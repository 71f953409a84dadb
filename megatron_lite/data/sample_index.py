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

LAST_EPOCH_THRESHOLD = 0.80


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
    lengths: np.ndarray, *, first_document: int, num_samples: int | None, seq_length: int, seed: int
) -> SampleIndex:
    """Returns the index over documents of these lengths, numbered from `first_document`.

    num_samples: the index holds all samples of as many epochs as this number needs; None for one
    epoch.
    """
    # N samples need N * seq_length + 1 tokens, because neighbours share a token.
    tokens = int(lengths.sum(dtype=np.int64))
    epochs = 1 if num_samples is None else max(1, -(-(num_samples * seq_length + 1) // tokens))
    samples = (epochs * tokens - 1) // seq_length
    before_last = ((epochs - 1) * tokens - 1) // seq_length
    last_is_apart = (
        num_samples is not None
        and epochs > 1
        and num_samples - before_last < int(LAST_EPOCH_THRESHOLD * ((tokens - 1) // seq_length))
    )
    # The order of the two shuffles is Megatron's: the second continues the numbers of the first.
    random = np.random.RandomState(seed)
    documents = np.arange(first_document, first_document + len(lengths), dtype=np.int32)
    document_order = _shuffled(
        random, np.tile(documents, epochs), len(documents) * (epochs - 1) if last_is_apart else None
    )
    sample_starts = _sample_starts(lengths[document_order - first_document], samples, seq_length)
    order_type = np.uint32 if samples < np.iinfo(np.uint32).max - 1 else np.int64
    sample_order = _shuffled(
        random, np.arange(samples, dtype=order_type), before_last if last_is_apart else None
    )
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
    return None if (places[:-1] <= places[1:]).all() else "sample_starts is not in order"


def _shuffled(random: np.random.RandomState, items: np.ndarray, boundary: int | None) -> np.ndarray:
    """Returns the items in random order, shuffled in place.

    boundary: shuffles the items before it and after it separately.
    """
    for part in (items,) if boundary is None else (items[:boundary], items[boundary:]):
        random.shuffle(part)
    return items


def _sample_starts(tape_lengths: np.ndarray, samples: int, seq_length: int) -> np.ndarray:
    ends = np.cumsum(tape_lengths, dtype=np.int64)
    first_tokens = np.arange(samples + 1, dtype=np.int64) * seq_length
    places = np.searchsorted(ends, first_tokens, side="right")
    # As in Megatron, sample 0 starts at place 0 even if the tape begins with empty documents.
    places[0] = 0
    offsets = first_tokens - ends[places] + tape_lengths[places]
    offsets[0] = 0
    largest = max(len(tape_lengths), int(tape_lengths.max()))
    return np.stack([places, offsets], axis=1).astype(
        np.int32 if largest <= np.iinfo(np.int32).max else np.int64
    )
