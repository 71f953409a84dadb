"""Builds the three datasets of a run from a DataConfig.

Every rank builds them by itself. No rank waits for files of another rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_lite.config.checks import InputError
from megatron_lite.config.data_settings import DataConfig
from megatron_lite.data.blend import BlendedDataset, DataPath, Dataset, samples_to_request
from megatron_lite.data.blend_index import kept_blend_index
from megatron_lite.data.data_paths import read_data_paths
from megatron_lite.data.gpt_dataset import GPTDataset
from megatron_lite.data.identity import DataIdentity, identity_of_files, identity_of_mock
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.mock import MockDataset
from megatron_lite.data.splits import Splits, normalized, split_documents


@dataclass(frozen=True)
class Datasets:
    """The datasets of a run, and their identity.

    valid and test are None if the split holds no documents, or if no samples were requested.
    """

    train: Dataset
    valid: Dataset | None
    test: Dataset | None
    identity: DataIdentity


def build_datasets(
    data: DataConfig, *, vocab_size: int, seed: int, num_samples: tuple[int, int, int]
) -> Datasets:
    """Returns datasets of at least `num_samples` samples each, for train, valid and test.

    Raises InputError if the config names no data, or if its files are faulty.
    """
    if data.mock_data:
        # numpy's seeds have 32 bits
        seeds = [(seed + place) % 2**32 for place in range(len(num_samples))]
        mocks = [
            MockDataset(count, data.seq_length, vocab_size, own)
            for own, count in zip(seeds, num_samples, strict=True)
        ]
        return Datasets(
            mocks[0],
            mocks[1] if num_samples[1] else None,
            mocks[2] if num_samples[2] else None,
            identity_of_mock(data),
        )
    paths = read_data_paths(data)
    # Each prefix is opened once, also if several splits name it.
    opened = functools.cache(lambda prefix: _OpenedPrefix(prefix, data, vocab_size, seed))
    per_split = (paths,) * 3 if isinstance(paths, DataPath) else paths
    sources = [
        None if path is None else _Source(path, list(map(opened, path.prefixes)))
        for path in per_split
    ]
    train, valid, test = (
        None if source is None else _build_split(source, data, place, count)
        for place, (source, count) in enumerate(zip(sources, num_samples, strict=True))
    )
    if train is None:
        raise InputError(
            f"--split {data.split!r} leaves no documents for training in "
            f"{' '.join(per_split[0].prefixes)}"
            if per_split[0] is not None and not data.is_per_split
            else "the data of the training split holds no documents: give another prefix"
        )
    parts = [
        None if source is None else [part.indexed for part in source.parts] for source in sources
    ]
    return Datasets(train, valid, test, identity_of_files(data, paths, parts))


class _OpenedPrefix:
    """One prefix, opened and split. Without a split, every split is the whole of it."""

    def __init__(self, prefix: str, data: DataConfig, vocab_size: int, seed: int) -> None:
        self.prefix, self._data, self._vocab_size, self._seed = prefix, data, vocab_size, seed
        self.indexed = IndexedDataset(prefix)
        whole = (0, len(self.indexed))
        self.splits = (
            Splits(whole, whole, whole)
            if data.is_per_split
            else split_documents(data.split, len(self.indexed))
        )

    def is_empty(self, split: int) -> bool:
        start, stop = self.splits[split]
        return start >= stop

    def dataset(self, split: int, num_samples: int | None) -> GPTDataset:
        return GPTDataset(
            self.indexed,
            documents=self.splits[split],
            num_samples=num_samples,
            seed=self._seed,
            seq_length=self._data.seq_length,
            vocab_size=self._vocab_size,
            cache_path=self._data.data_cache_path,
        )


class _Source(NamedTuple):
    """The data of a split: its path, and the opened prefixes of the path."""

    path: DataPath
    parts: Sequence[_OpenedPrefix]


def _build_split(source: _Source, data: DataConfig, split: int, num_samples: int) -> Dataset | None:
    """Returns the dataset of split 0, 1 or 2.

    Returns None if no part has documents for it. For splits 1 and 2 it also returns None if no
    samples are requested.

    Without weights each part is read once, in proportion to its size. A run that needs more samples
    reads them again, in the same shares.
    """
    path, parts = source
    if all(part.is_empty(split) for part in parts) or (num_samples == 0 and split > 0):
        return None
    # As in Megatron, the weight of a split's only prefix is ignored if the splits are given one by
    # one; otherwise it is a blend of one.
    if len(parts) == 1 and (path.weights is None or data.is_per_split):
        return parts[0].dataset(split, num_samples)
    for part in parts:
        if part.is_empty(split):
            raise InputError(
                f"{part.prefix} has no documents for the {Splits._fields[split]} split, but other "
                + (
                    "prefixes of that split do: leave it out"
                    if data.is_per_split
                    else "parts of --data-path do: set that share of --split to 0, or enlarge it"
                )
            )
    weights, size = path.weights, num_samples
    index_of = functools.partial(
        kept_blend_index, data_cache_path=data.data_cache_path, prefix=parts[0].prefix
    )
    if weights is None:
        # The shares follow the sizes, which are known only after one epoch of each part is built.
        datasets = [part.dataset(split, None) for part in parts]
        sizes = [len(dataset) for dataset in datasets]
        if num_samples <= sum(sizes):
            return BlendedDataset(datasets, sizes, num_samples, index_of=index_of)
        weights = normalized(sizes)
    elif data.dataloader_type == "cyclic":
        # Megatron's blend is a few samples longer than requested. A shuffle of all samples shows
        # it; a run that reads them in order never reaches the end.
        size = sum(math.ceil(num_samples * weight) for weight in weights)
    datasets = [
        part.dataset(split, samples_to_request(num_samples, weight))
        for part, weight in zip(parts, weights, strict=True)
    ]
    blend = BlendedDataset(datasets, weights, size, index_of=index_of)
    if size > num_samples:
        blend.check_sizes()
    return blend
