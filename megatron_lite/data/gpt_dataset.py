"""Samples for a GPT from one indexed dataset, in Megatron's order, number for number.

Item i is seq_length + 1 token ids, packed across documents.

The documents of a split are read for as many epochs as the run needs. Their order is shuffled, and
they are laid end to end as one tape. With s = seq_length, sample k takes the tokens k*s .. k*s+s of
the tape. The last of these s+1 tokens is only a label; it is also the first token of the next
sample. After that the samples are shuffled. Both shuffles use one RandomState(seed), so every rank
builds the same index by itself.

If the run needs less than 80 % of the last epoch, that epoch is kept apart: all the other epochs
are read before it.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from megatron_lite.config.checks import InputError, Values

from .index_cache import Arrays, Expected, arrays_fault, kept_arrays
from .indexed import IndexedDataset

LAST_EPOCH_THRESHOLD = 0.80


class SampleIndex(NamedTuple):
    """The index from samples to tokens.

    document_order: the documents of the tape, in order.
    sample_places, sample_offsets: [samples + 1], for each sample its place in the tape, and the
    offset of its first token in the document of that place.
    sample_order: the shuffled numbers of the samples.
    """

    document_order: ndarray
    sample_places: ndarray
    sample_offsets: ndarray
    sample_order: ndarray


def build_sample_index(
    lengths: ndarray, *, first_document: int, num_samples: int | None, seq_length: int, seed: int
) -> SampleIndex:
    """Returns the index over documents of these lengths, numbered from `first_document`.

    num_samples: the index holds all samples of as many epochs as this number needs; None for one
    epoch.
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
    documents = np.arange(first_document, first_document + len(lengths), dtype=np.int32)
    document_order = np.tile(documents, epochs)
    _shuffle(random, document_order, last_is_apart * len(lengths) * (epochs - 1))
    # The first document that ends behind a sample's first token, which passes over empty documents.
    taken = lengths[document_order - first_document]
    ends = np.cumsum(taken, dtype=np.int64)
    firsts = np.arange(samples + 1, dtype=np.int64) * seq_length
    places = np.searchsorted(ends, firsts, side="right")
    offsets = firsts - ends[places] + taken[places]
    # As in Megatron, sample 0 starts at place 0 even if the tape begins with empty documents.
    places[0] = offsets[0] = 0
    largest = max(len(document_order), int(lengths.max()))
    dtype = np.int32 if largest < 2**31 else np.int64
    # Megatron's type: the shuffle of 32-bit and of 64-bit items draws the same numbers.
    order_type = np.uint32 if samples < np.iinfo(np.uint32).max - 1 else np.int64
    sample_order = np.arange(samples, dtype=order_type)
    _shuffle(random, sample_order, last_is_apart * before_last)
    return SampleIndex(document_order, places.astype(dtype), offsets.astype(dtype), sample_order)


def sample_index_fault(arrays: Arrays, lengths: ndarray, *, first_document: int) -> str | None:
    """Returns what is wrong with an index that was read from a file; None if nothing is.

    lengths: the lengths of the documents of the split.
    It checks types, shapes, and that every number lies within the array that it points into.
    Therefore no sample reads documents of another split.
    """
    places, samples = (
        arrays[name].size if name in arrays else 0 for name in ("document_order", "sample_order")
    )
    expected = {
        "document_order": Expected(places, first_document, first_document + len(lengths)),
        "sample_places": Expected(samples + 1, 0, places),
        "sample_offsets": Expected(samples + 1, 0, int(lengths.max()) + 1),
        "sample_order": Expected(samples, 0, samples),
    }
    return arrays_fault(arrays, expected)


class GPTDataset:
    """At least `num_samples` samples from the sequences start <= n < stop of `indexed`.

    documents: start and stop.
    num_samples: the least number of samples; None for one epoch.
    cache_path: the folder for the sample index. By default it is PREFIX_cache beside the data; if
    that folder cannot be written, no index is kept.
    Raises InputError if the range has no tokens, if one epoch is requested and is too short for one
    sample, or if `cache_path` cannot be written. Reading an item raises InputError if it holds an
    id outside the vocabulary.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        *,
        documents: tuple[int, int],
        num_samples: int | None,
        seq_length: int,
        seed: int,
        vocab_size: int,
        cache_path: str | None = None,
    ) -> None:
        self.indexed, self.seq_length, self.vocab_size = indexed, seq_length, vocab_size
        start, stop = documents
        lengths = indexed.sequence_lengths[start:stop]
        tokens = int(lengths.sum(dtype=np.int64))
        # With a requested number of samples even a short text is enough, because it is read for as
        # many epochs as needed (Megatron's rule).
        if tokens < (seq_length + 1 if num_samples is None else 1):
            raise InputError(
                f"{indexed.bin_path}: documents {start} to {stop - 1} hold {tokens} tokens, but "
                f"one sample takes --seq-length {seq_length} + 1: give more data, another --split, "
                "or a shorter --seq-length"
            )

        settings: Values = {"num_samples": num_samples, "seq_length": seq_length, "seed": seed}
        key = {
            "kind": "GPT sample index 2",
            "data": indexed.fingerprint,
            "documents": [start, stop],
            **settings,
        }

        def build() -> Arrays:
            return build_sample_index(lengths, first_document=start, **settings)._asdict()

        fault = partial(sample_index_fault, lengths=lengths, first_document=start)
        self.index = SampleIndex(**kept_arrays(cache_path, indexed.prefix, key, build, fault=fault))

    def __len__(self) -> int:
        return len(self.index.sample_order)

    def __getitem__(self, index: int) -> ndarray:
        """Returns the token ids of a sample, [seq_length + 1] int64."""
        pieces = self._pieces(index)
        parts = [self.indexed.get(*piece) for piece in pieces]
        sample_ids = np.concatenate(parts, dtype=np.int64)
        if sample_ids.view(np.uint64).max(initial=0) >= self.vocab_size:
            for (sequence, *_), part in zip(pieces, parts, strict=True):
                where = f"document {self.indexed.document_of(sequence)}"
                self.indexed.check_ids(part, self.vocab_size, where)
        return sample_ids

    def documents(self, index: int) -> dict[str, list[int]]:
        """Returns the numbers of a sample's documents, by .bin file (datasets.Dataset).

        The list also holds documents without tokens that lie between others.
        """
        found = [self.indexed.document_of(sequence) for sequence, *_ in self._pieces(index)]
        return {self.indexed.bin_path: list(dict.fromkeys(found))}

    def _pieces(self, index: int) -> list[list[Any]]:
        """Returns the arguments of `indexed.get` for each piece of a sample."""
        sample, found = int(self.index.sample_order[index]), self.index
        # A sample ends with the first token of the next sample, which is its last label.
        first, last = found.sample_places[sample : sample + 2].tolist()
        begin, end = found.sample_offsets[sample : sample + 2].tolist()
        sequences = found.document_order[first : last + 1].tolist()
        pieces = [[sequence, 0, None] for sequence in sequences]
        pieces[0][1] = begin
        pieces[-1][2] = end + 1
        return pieces


def _shuffle(random: np.random.RandomState, items: ndarray, boundary: int) -> None:
    """Brings the items before a boundary, and those after it, into random order, in place."""
    random.shuffle(items[:boundary])
    random.shuffle(items[boundary:])
