"""Samples for a GPT from one indexed dataset: item i is seq_length + 1 token ids, packed across documents.

The order is that of sample_index.py; this file checks that there is enough data, keeps the index on disk, and reads tokens.
"""

from __future__ import annotations

import numpy as np

from megatron_lite.config.checks import InputError
from megatron_lite.data.index_cache import Arrays, cached_arrays
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.sample_index import SampleIndex, build_sample_index


class GPTDataset:
    """At least `num_samples` samples (None: one epoch) from the sequences start <= n < stop of `indexed`.

    cache_path: folder for the sample index, by default PREFIX_cache beside the data; there it is done without if the folder
    cannot be written. InputError: no tokens at all, or an epoch too short for one sample where one epoch is asked for;
    `cache_path` cannot be written; later, from an item that holds an id outside the vocabulary.
    """

    def __init__(self, indexed: IndexedDataset, *, documents: tuple[int, int], num_samples: int | None, seq_length: int,
                 seed: int, vocab_size: int, cache_path: str | None = None) -> None:
        self.indexed, self.seq_length, self.vocab_size = indexed, seq_length, vocab_size
        start, stop = documents
        lengths = indexed.sequence_lengths[start:stop]
        tokens = int(lengths.sum(dtype=np.int64))
        # For a wanted number of samples even a short text is enough: it is read again, as often as it takes (Megatron's rule).
        if tokens < (seq_length + 1 if num_samples is None else 1):
            raise InputError(f"{indexed.bin_path}: documents {start} to {stop - 1} hold {tokens} tokens, but one sample takes "
                             f"--seq-length {seq_length} + 1: give more data, another --split, or a shorter --seq-length")

        def build() -> Arrays:
            return build_sample_index(lengths, first_document=start, num_samples=num_samples, seq_length=seq_length,
                                      seed=seed)._asdict()

        key = {"kind": "GPT sample index 1", "data": indexed.fingerprint, "documents": [start, stop],
               "num_samples": num_samples, "seq_length": seq_length, "seed": seed}
        try:
            arrays = cached_arrays(cache_path or indexed.prefix + "_cache", key, build)
        except OSError as error:
            if cache_path is not None:
                raise InputError(f"--data-cache-path {cache_path} cannot be used: {error}") from error
            arrays = build()
        self.index = SampleIndex(**arrays)

    def __len__(self) -> int:
        return len(self.index.sample_order)

    def __getitem__(self, index: int) -> np.ndarray:
        """Token ids [seq_length + 1], int64."""
        sample = int(self.index.sample_order[index])
        (first, offset), (last, end) = self.index.sample_starts[sample:sample + 2].tolist()
        sequences = self.index.document_order[first:last + 1].tolist()
        parts = []
        for place, sequence in enumerate(sequences, first):
            begin = offset if place == first else 0
            parts.append(self.indexed.get(sequence, begin, end + 1 - begin if place == last else None))
        sample_ids = np.concatenate(parts, dtype=np.int64)
        if sample_ids.max() >= self.vocab_size or sample_ids.min() < 0:
            self._refuse(sequences, parts)
        return sample_ids

    def documents(self, index: int) -> dict[str, list[int]]:
        """See blend.Dataset. Documents without tokens that lie between others count too."""
        sample = int(self.index.sample_order[index])
        first, last = self.index.sample_starts[sample:sample + 2, 0].tolist()
        sequences = self.index.document_order[first:last + 1].tolist()
        return {self.indexed.bin_path: list(dict.fromkeys(map(self.indexed.document_of, sequences)))}

    def _refuse(self, sequences: list[int], parts: list[np.ndarray]) -> None:
        for sequence, ids in zip(sequences, parts, strict=True):
            outside = ids[(ids.astype(np.int64) >= self.vocab_size) | (ids < 0)]
            if outside.size:
                raise InputError(f"{self.indexed.bin_path}: document {self.indexed.document_of(sequence)} holds token id "
                                 f"{outside[0]}, but the vocabulary has {self.vocab_size} ids: use the tokenizer that wrote "
                                 "the data, or the --vocab-size it had")
