"""Blends several datasets into one, by Megatron's rule, number for number.

Sample n comes from the dataset that lags furthest behind its share. Thus each prefix of the blend
is as close to the weights as it can be. `--data-path` has three forms:

    PREFIX
    WEIGHT PREFIX WEIGHT PREFIX ...
    PREFIX PREFIX ...                  the datasets' sizes decide the shares
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from megatron_lite.config.checks import InputError
from megatron_lite.config.plain import shown
from megatron_lite.data.blend_index import BlendIndex, build_blend_index
from megatron_lite.data.splits import normalized

SURPLUS = 0.005
CHUNK = 1 << 20  # samples of which temporary arrays are made at once


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


def parse_data_path(words: Sequence[str], source: str = "--data-path") -> DataPath:
    """Parses the words of `--data-path`, or of another source of them.

    Raises InputError if only some prefixes have weights, or if a weight is not a positive number.
    """
    numbers = [_number(word) for word in words]
    if all(number is None for number in numbers):
        return DataPath(tuple(words), None)
    given = f"{source} {shown(' '.join(words))}"
    if len(words) % 2 or any(
        (number is None) == (place % 2 == 0) for place, number in enumerate(numbers)
    ):
        raise InputError(
            f"{given}: give prefixes only, or a weight before every prefix, such as "
            "0.3 first 0.7 second"
        )
    weights = [number for number in numbers[::2] if number is not None]
    if not all(0.0 < weight < math.inf for weight in weights):
        raise InputError(f"{given}: every weight must be above 0 (leave the prefix out instead)")
    shares = normalized(weights)
    if not all(share > 0.0 for share in shares):
        raise InputError(
            f"{given}: the weights are too large or too far apart, a share comes out "
            "as 0: give such as 0.3 first 0.7 second"
        )
    return DataPath(tuple(words[1::2]), shares)


def samples_to_request(num_samples: int, weight: float) -> int:
    """Returns how many samples a dataset of this weight must hold for a blend of `num_samples`.

    The result is its share of the samples and 0.5 % more.
    """
    return math.ceil(math.ceil(num_samples * weight) * (1 + SURPLUS))


class BlendedDataset:
    """`size` samples of several datasets in the shares `weights`, whose sum may be any number.

    index_of: returns the index of the normalized weights and the size (see kept_blend_index).
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        weights: Sequence[float],
        size: int,
        *,
        index_of: Callable[[Sequence[float], int], BlendIndex] = build_blend_index,
    ) -> None:
        self.datasets = tuple(datasets)
        # Weights from --data-path are divided by their sum a second time here, as in Megatron. This
        # can change their last bit, and so decide which of two nearly equal errors is larger.
        self.index = index_of(normalized(weights), size)

    def __len__(self) -> int:
        return len(self.index.dataset)

    def check_sizes(self) -> None:
        """Raises InputError if the index asks a dataset for more samples than it has."""
        asked = [0] * len(self.datasets)
        for start in range(0, len(self), CHUNK):
            found = np.bincount(
                self.index.dataset[start : start + CHUNK], minlength=len(self.datasets)
            )
            asked = [before + more for before, more in zip(asked, found.tolist(), strict=True)]
        for number, (dataset, most) in enumerate(zip(self.datasets, asked, strict=True)):
            if most > len(dataset):
                raise InputError(
                    f"the blend of {len(self)} samples asks its part {number} for {most}, which "
                    f"has {len(dataset)}: ask for more samples, or use --dataloader-type single"
                )

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
