"""Samples for a GPT from one indexed dataset.

Item i is seq_length + 1 token ids, packed across documents.

sample_index.py decides the order of the samples. This module checks that the data suffices, keeps
the index on disk, and reads the tokens.
"""

from __future__ import annotations

import numpy as np

from megatron_lite.config.checks import InputError
from megatron_lite.data.index_cache import Allocate, Arrays, kept_arrays
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.sample_index import SampleIndex, build_sample_index, sample_index_fault


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

        def build(allocate: Allocate) -> Arrays:
            return build_sample_index(
                lengths,
                first_document=start,
                num_samples=num_samples,
                seq_length=seq_length,
                seed=seed,
                allocate=allocate,
            )._asdict()

        def fault(arrays: Arrays) -> str | None:
            return sample_index_fault(arrays, lengths, first_document=start)

        key = {
            "kind": "GPT sample index 1",
            "data": indexed.fingerprint,
            "documents": [start, stop],
            "num_samples": num_samples,
            "seq_length": seq_length,
            "seed": seed,
        }
        self.index = SampleIndex(**kept_arrays(cache_path, indexed.prefix, key, build, fault=fault))

    def __len__(self) -> int:
        return len(self.index.sample_order)

    def __getitem__(self, index: int) -> np.ndarray:
        """Returns the token ids of a sample, [seq_length + 1] int64."""
        sample = int(self.index.sample_order[index])
        # A sample ends with the first token of the next sample, which is its last label.
        (first, offset), (last, end) = self.index.sample_starts[sample : sample + 2].tolist()
        sequences = self.index.document_order[first : last + 1].tolist()
        parts = []
        for place, sequence in enumerate(sequences, first):
            begin = offset if place == first else 0
            parts.append(
                self.indexed.get(sequence, begin, end + 1 - begin if place == last else None)
            )
        sample_ids = np.concatenate(parts, dtype=np.int64)
        if sample_ids.max() >= self.vocab_size or sample_ids.min() < 0:
            self._refuse(sequences, parts)
        return sample_ids

    def documents(self, index: int) -> dict[str, list[int]]:
        """Returns the numbers of a sample's documents, by .bin file (blend.Dataset).

        The list also holds documents without tokens that lie between others.
        """
        sample = int(self.index.sample_order[index])
        first, last = self.index.sample_starts[sample : sample + 2, 0].tolist()
        sequences = self.index.document_order[first : last + 1].tolist()
        return {
            self.indexed.bin_path: list(dict.fromkeys(map(self.indexed.document_of, sequences)))
        }

    def _refuse(self, sequences: list[int], parts: list[np.ndarray]) -> None:
        for sequence, ids in zip(sequences, parts, strict=True):
            outside = ids[(ids.astype(np.int64) >= self.vocab_size) | (ids < 0)]
            if outside.size:
                raise InputError(
                    f"{self.indexed.bin_path}: document {self.indexed.document_of(sequence)} holds "
                    f"token id {outside[0]}, but the vocabulary has {self.vocab_size} ids: use the "
                    "tokenizer that wrote the data, or the --vocab-size it had"
                )
