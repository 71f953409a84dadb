"""Documents rearranged for filling in the middle (2207.14255), as by Megatron-LM's --fim-data.

The text of a document is cut at two characters, and its parts stand in one of two orders, with a
token before each:

    PSM    <prefix> prefix <suffix> suffix <middle> middle
    SPM    <prefix> <suffix> suffix <middle> prefix middle

A sample keeps its length: what is too long is cut, and what is too short is filled up.

The random numbers are drawn in Megatron's order. Megatron draws for one sample after another, in
the order in which a process reads them. Here each sample has a generator of its own, with the seed
(--seed, split, number of the sample). Therefore a sample is the same on every rank and in a resumed
run.

As in Megatron, an empty document or part is left out with the token behind it, unless it is the
last one of the sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy import ndarray

from megatron_lite.config.checks import InputError
from megatron_lite.config.data_settings import DataConfig
from megatron_lite.data.blend import Dataset


class FimDataset:
    """The samples of a dataset with rearranged documents.

    backend: the tokenizer of the library `tokenizers`.
    seed: the first numbers of the seed of each sample.
    Raises InputError if a token is not in the vocabulary.
    """

    def __init__(self, dataset: Dataset, data: DataConfig, backend: Any, *seed: int) -> None:
        self.dataset, self.data, self.backend, self.seed = dataset, data, backend, seed
        self.documents = dataset.documents
        self.untouched = () if data.fim_no_prefix is None else (data.fim_no_prefix,)
        tokens = {
            "--fim-prefix-token": data.fim_prefix_token,
            "--fim-middle-token": data.fim_middle_token,
            "--fim-suffix-token": data.fim_suffix_token,
            "--fim-pad-token": data.fim_pad_token,
            "--fim-eod-token": data.fim_eod_token,
            "--fim-split-sample": data.fim_split_sample,
        }
        ids: list[Any] = []
        for flag, name in tokens.items():
            ids.append(None if name is None else backend.token_to_id(name))
            if name is not None and ids[-1] is None:
                raise InputError(f"{flag} {name} is no token of the tokenizer: name one")
        self.prefix, self.middle, self.suffix, self.pad, self.eod, self.split = ids

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> ndarray:
        """Returns the token ids of a sample, [seq_length + 1] int64."""
        sample = self.dataset[index]
        random = np.random.RandomState([*self.seed, index])
        found = [*_joined(sample, self.eod, self._document, random), *[self.pad] * len(sample)]
        return np.array(found[: len(sample)])

    def _document(self, ids: ndarray, random: Any) -> ndarray:
        data = self.data
        if self.split not in ids:
            return self._rearranged(ids, random, data.fim_rate)
        if not random.binomial(1, data.fim_rate):
            return ids
        return _joined(ids, self.split, self._rearranged, random, data.fim_fragment_rate)

    def _rearranged(self, ids: ndarray, random: Any, rate: float) -> ndarray:
        if not random.binomial(1, rate):
            return ids
        text = self.backend.decode(ids)  # without special tokens
        if text.startswith(self.untouched):
            return ids
        start, stop = sorted(random.randint(0, len(text) + 1, size=2))
        prefix, middle, suffix = (
            self.backend.encode(part, add_special_tokens=False).ids
            for part in (text[:start], text[start:stop], text[stop:])
        )
        if random.binomial(1, self.data.fim_spm_rate):
            before = [self.prefix, self.suffix, *suffix, self.middle, *prefix]
        else:
            before = [self.prefix, *prefix, self.suffix, *suffix, self.middle]
        return np.array([*before, *middle])


def _joined(ids: ndarray, token: int, rearrange: Callable[..., ndarray], *others: Any) -> ndarray:
    """Returns the parts between the tokens, each of them rearranged, and the tokens."""
    *parts, last = np.split(ids, np.flatnonzero(ids == token) + 1)
    found = [np.append(rearrange(part[:-1], *others), token) for part in parts if len(part) > 1]
    return np.concatenate([*found, rearrange(last, *others)])
