"""Builds the three datasets of a run from a DataConfig.

Every rank builds them by itself. No rank waits for files of another rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lite.config.checks import InputError
from megatron_lite.config.data_settings import DataConfig
from megatron_lite.data.blend import (
    BlendedDataset,
    DataPath,
    Dataset,
    parse_data_path,
    samples_to_request,
)
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
    if not data.data_path:
        raise InputError("there is nothing to train on: give --data-path PREFIX or --mock-data")
    path = parse_data_path(data.data_path)
    parts = [_OpenedPrefix(prefix, data, vocab_size, seed) for prefix in path.prefixes]
    train, valid, test = (
        _build_split(parts, path, place, count) for place, count in enumerate(num_samples)
    )
    if train is None:
        raise InputError(
            f"--split {data.split!r} leaves no documents for training in {' '.join(path.prefixes)}"
        )
    return Datasets(
        train, valid, test, identity_of_files(data, path, [part.indexed for part in parts])
    )


class _OpenedPrefix:
    """One prefix of `--data-path`, opened and split."""

    def __init__(self, prefix: str, data: DataConfig, vocab_size: int, seed: int) -> None:
        self.prefix, self._data, self._vocab_size, self._seed = prefix, data, vocab_size, seed
        self.indexed = IndexedDataset(prefix)
        self.splits = split_documents(data.split, len(self.indexed))

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


def _build_split(
    parts: Sequence[_OpenedPrefix], path: DataPath, split: int, num_samples: int
) -> Dataset | None:
    """Returns the dataset of split 0, 1 or 2.

    Returns None if no part has documents for it. For splits 1 and 2 it also returns None if no
    samples are requested.

    Without weights each part is read once, in proportion to its size. A run that needs more samples
    reads them again, in the same shares.
    """
    if all(part.is_empty(split) for part in parts) or (num_samples == 0 and split > 0):
        return None
    if len(parts) == 1 and path.weights is None:
        return parts[0].dataset(split, num_samples)
    for part in parts:
        if part.is_empty(split):
            raise InputError(
                f"{part.prefix} has no documents for the {Splits._fields[split]} split, but other "
                "parts of --data-path do: set that share of --split to 0, or enlarge it"
            )
    weights = path.weights
    if weights is None:
        # The shares follow the sizes, which are known only after one epoch of each part is built.
        datasets = [part.dataset(split, None) for part in parts]
        sizes = [len(dataset) for dataset in datasets]
        if num_samples <= sum(sizes):
            return BlendedDataset(datasets, sizes, num_samples)
        weights = normalized(sizes)
    datasets = [
        part.dataset(split, samples_to_request(num_samples, weight))
        for part, weight in zip(parts, weights, strict=True)
    ]
    return BlendedDataset(datasets, weights, num_samples)
