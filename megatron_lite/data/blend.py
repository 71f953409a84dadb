"""Blends several datasets into one, by Megatron's rule, number for number.

Sample n comes from the dataset that lags furthest behind its share. Thus each prefix of the blend
is as close to the weights as it can be. `--data-path` has three forms:

    PREFIX
    WEIGHT PREFIX WEIGHT PREFIX ...
    PREFIX PREFIX ...                  the datasets' sizes decide the shares
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from megatron_lite.config.checks import InputError
from megatron_lite.data.splits import normalized

SURPLUS = 0.005


class Dataset(Protocol):
    """A map from a sample's number to its token ids [seq_length + 1], int64."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> np.ndarray: ...

    def documents(self, index: int, /) -> dict[str, list[int]]:
        """Returns the numbers of a sample's documents, by .bin file; {} if no file exists."""


class DataPath(NamedTuple):
    """The parsed `--data-path`. weights: one per prefix, with sum 1; None if none were given."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


def parse_data_path(words: Sequence[str]) -> DataPath:
    """Parses `--data-path`.

    Raises InputError if only some prefixes have weights, or if a weight is not a positive number.
    """
    numbers = [_number(word) for word in words]
    if all(number is None for number in numbers):
        return DataPath(tuple(words), None)
    shown = " ".join(words)
    if len(words) % 2 or any(
        (number is None) == (place % 2 == 0) for place, number in enumerate(numbers)
    ):
        raise InputError(
            f"--data-path {shown}: give prefixes only, or a weight before every prefix, such as "
            "0.3 first 0.7 second"
        )
    weights = [number for number in numbers[::2] if number is not None]
    if not all(0.0 < weight < math.inf for weight in weights):
        raise InputError(
            f"--data-path {shown}: every weight must be above 0 (leave the prefix out instead)"
        )
    shares = normalized(weights)
    if not all(share > 0.0 for share in shares):
        raise InputError(
            f"--data-path {shown}: the weights are too large or too far apart, a share comes out "
            "as 0: give such as 0.3 first 0.7 second"
        )
    return DataPath(tuple(words[1::2]), shares)


def samples_to_request(num_samples: int, weight: float) -> int:
    """Returns how many samples a dataset of this weight must hold for a blend of `num_samples`.

    The result is its share of the samples and 0.5 % more.
    """
    return math.ceil(math.ceil(num_samples * weight) * (1 + SURPLUS))


class BlendIndex(NamedTuple):
    """The source of each sample of a blend.

    dataset: [n] int16, the number of the dataset.
    sample: [n] int64, the number of the sample within that dataset.
    """

    dataset: np.ndarray
    sample: np.ndarray


def build_blend_index(weights: Sequence[float], size: int) -> BlendIndex:
    """Returns the sources of `size` samples.

    Sample n comes from the dataset with the largest weight * max(n, 1) - count, and from the first
    of several equal ones. count: how many samples that dataset has provided so far.
    """
    counts = [0] * len(weights)
    chosen, samples = array("h"), array("q")
    for n in range(size):
        scale = float(n or 1)
        # strict=True makes this a quarter slower.
        errors = [weight * scale - count for weight, count in zip(weights, counts)]  # noqa: B905
        dataset = errors.index(max(errors))
        chosen.append(dataset)
        samples.append(counts[dataset])
        counts[dataset] += 1
    return BlendIndex(np.array(chosen, np.int16), np.array(samples, np.int64))


class BlendedDataset:
    """`size` samples of several datasets in the shares `weights`, whose sum may be any number."""

    def __init__(self, datasets: Sequence[Dataset], weights: Sequence[float], size: int) -> None:
        self.datasets = tuple(datasets)
        # Weights from --data-path are divided by their sum a second time here, as in Megatron. This
        # can change their last bit, and so decide which of two nearly equal errors is larger.
        self.index = build_blend_index(normalized(weights), size)

    def __len__(self) -> int:
        return len(self.index.dataset)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.datasets[self.index.dataset[index]][int(self.index.sample[index])]

    def documents(self, index: int) -> dict[str, list[int]]:
        """Returns the numbers of a sample's documents, by .bin file (see Dataset)."""
        return self.datasets[self.index.dataset[index]].documents(int(self.index.sample[index]))


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
