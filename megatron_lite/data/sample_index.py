"""Which tokens make up sample i: Megatron's order of documents and samples, number for number, in numpy alone.

The documents of a split are read for as many epochs as the run needs. Their order is shuffled, they are laid end to end, and
sample k takes tokens k*s .. k*s+s of that tape (s+1 of them: the last one is a label only, and the next sample's first token).
Then the samples are shuffled. Both shuffles draw from one RandomState(seed), so every rank builds the same index by itself.

A last epoch of which less than 80 % is needed is kept apart: all of the other epochs are read before any of it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

LAST_EPOCH_THRESHOLD = 0.80


class SampleIndex(NamedTuple):
    """document_order: the tape. sample_starts [samples + 1, 2]: place in the tape, token offset. sample_order: the shuffle."""

    document_order: np.ndarray
    sample_starts: np.ndarray
    sample_order: np.ndarray


def build_sample_index(lengths: np.ndarray, *, first_document: int, num_samples: int | None, seq_length: int,
                       seed: int) -> SampleIndex:
    """The index over documents of these lengths, numbered from `first_document`.

    It holds at least `num_samples` samples: those of the epochs it takes to reach them; None: those of one epoch.
    """
    tokens = int(lengths.sum(dtype=np.int64))
    epochs = 1 if num_samples is None else max(1, -(-(num_samples * seq_length + 1) // tokens))
    samples = (epochs * tokens - 1) // seq_length
    before_last = ((epochs - 1) * tokens - 1) // seq_length
    last_is_apart = (num_samples is not None and epochs > 1
                     and num_samples - before_last < int(LAST_EPOCH_THRESHOLD * ((tokens - 1) // seq_length)))
    random = np.random.RandomState(seed)
    documents = np.arange(first_document, first_document + len(lengths), dtype=np.int32)
    document_order = _shuffled(random, np.tile(documents, epochs), len(documents) * (epochs - 1) if last_is_apart else None)
    sample_starts = _sample_starts(lengths[document_order - first_document], samples, seq_length)
    order_type = np.uint32 if samples < np.iinfo(np.uint32).max - 1 else np.int64
    sample_order = _shuffled(random, np.arange(samples, dtype=order_type), before_last if last_is_apart else None)
    return SampleIndex(document_order, sample_starts, sample_order)


def _shuffled(random: np.random.RandomState, items: np.ndarray, boundary: int | None) -> np.ndarray:
    """The items in random order, shuffled in place; with a boundary, those before it and those after it by themselves."""
    for part in (items,) if boundary is None else (items[:boundary], items[boundary:]):
        random.shuffle(part)
    return items


def _sample_starts(tape_lengths: np.ndarray, samples: int, seq_length: int) -> np.ndarray:
    ends = np.cumsum(tape_lengths, dtype=np.int64)
    first_tokens = np.arange(samples + 1, dtype=np.int64) * seq_length
    places = np.searchsorted(ends, first_tokens, side="right")
    places[0] = 0  # as Megatron: also where the tape begins with documents of no tokens
    offsets = first_tokens - ends[places] + tape_lengths[places]
    offsets[0] = 0
    largest = max(len(tape_lengths), int(tape_lengths.max()))
    return np.stack([places, offsets], axis=1).astype(np.int32 if largest <= np.iinfo(np.int32).max else np.int64)
