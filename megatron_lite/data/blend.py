"""Blends several datasets into one, by Megatron's rule, number for number.

Sample n comes from the dataset with the largest error, weight * max(n, 1) - count, and from the
first of several equal ones. count: how many samples that dataset has provided so far. Thus each
prefix of the blend is as close to the weights as it can be.

Each sample depends on the counts before it, so that the rule looks sequential. A Python loop over
it takes 1 to 10 microseconds a sample. Here the samples are cut into rows of equal length, and
NumPy takes the same step of every row at once. A row needs the counts at its start. They are
guessed first: the shares, rounded, a few thousand samples before the row. From there the rule
itself runs up to the row. Two sequences of counts that take different datasets at the same n come
closer together by it, and once they are equal they stay equal.

The result does not depend on the guess. A row whose counts at the start differ from those at the
end of the row before it is computed again from these, by the loop. Row 0 starts from no counts, so
by induction every row has the values that the loop computes, in the same float64 operations: one
product, one difference, the first maximum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from megatron_lite.config.checks import InputError

from .datasets import Dataset
from .index_cache import Expected, arrays_fault, kept_arrays

WARM_UP = 1 << 11  # samples before a row, from the guess to its start
SHORTEST_ROW = 4 * WARM_UP
FEWEST_ROWS = 7  # fewer rows are computed faster one by one, in Python
VALUES = 1 << 15  # rows times datasets: the arrays of a step fit the cache of a core
KEPT_FROM = 1 << 18  # blends of fewer samples are built faster than they are kept


class BlendIndex(NamedTuple):
    """The source of each sample of a blend.

    dataset: [n] int16, the number of the dataset.
    sample: [n] int64, the number of the sample within that dataset.
    """

    dataset: ndarray
    sample: ndarray


def build_blend_index(weights: Sequence[float], size: int) -> BlendIndex:
    """Returns the sources of `size` samples."""
    shares, dataset = np.array(weights, np.float64), np.empty(size, np.int16)
    counts = np.zeros(len(shares))  # those before the row that is next
    rows = min(max(64, VALUES // len(shares)), size // SHORTEST_ROW)
    length = size // rows if rows >= FEWEST_ROWS else 0
    if length:
        table = dataset[: rows * length].reshape(rows, length)
        starts = length * np.arange(rows, dtype=np.float64)
        # `used` has the counts from which each row is filled, and `ends` those behind it.
        used = np.zeros((rows, len(shares)))
        used[1:] = _guessed(shares, starts[1:] - WARM_UP)
        for step in range(-WARM_UP, 0):
            _pick(shares, starts[1:] + step, used[1:])
        ends = used.copy()
        for step in range(length):
            table[:, step] = _pick(shares, np.maximum(starts + step, 1.0), ends)
        for row in range(rows):
            if (used[row] == counts).all():
                counts = ends[row]
            else:
                _loop(shares, row * length, counts, table[row])
    _loop(shares, rows * length, counts, dataset[rows * length :])
    sample = np.empty(size, np.int64)
    for number in range(len(shares)):
        places = np.flatnonzero(dataset == number)
        sample[places] = np.arange(len(places))
    return BlendIndex(dataset, sample)


def kept_blend_index(
    weights: Sequence[float], size: int, *, data_cache_path: str | None, prefix: str
) -> BlendIndex:
    """Returns `build_blend_index(weights, size)`. One process of a node builds and keeps it.

    It is kept where the sample index of `prefix` is (index_cache.kept_arrays). It depends on
    nothing but its two arguments.
    """
    if size < KEPT_FROM:
        return build_blend_index(weights, size)

    expected = {"dataset": Expected(size, 0, len(weights)), "sample": Expected(size, 0, size)}
    key = {"kind": "blend index 1", "weights": [float(one).hex() for one in weights], "size": size}
    return BlendIndex(
        **kept_arrays(
            data_cache_path,
            prefix,
            key,
            lambda: build_blend_index(weights, size)._asdict(),
            fault=partial(arrays_fault, expected=expected),
        )
    )


@dataclass(frozen=True)
class BlendedDataset:
    """The samples of several datasets that an index names."""

    datasets: Sequence[Dataset]
    index: BlendIndex

    def __len__(self) -> int:
        return len(self.index.dataset)

    def check_sizes(self) -> None:
        """Raises InputError if the index asks a dataset for more samples than it has."""
        asked = np.bincount(self.index.dataset, minlength=len(self.datasets)).tolist()
        for number, (dataset, most) in enumerate(zip(self.datasets, asked, strict=True)):
            if most > len(dataset):
                raise InputError(
                    f"the blend of {len(self)} samples asks its part {number} for {most}, which "
                    f"has {len(dataset)}: ask for more samples, or use --dataloader-type single"
                )

    def __getitem__(self, index: int) -> ndarray:
        return self.datasets[self.index.dataset[index]][int(self.index.sample[index])]

    def documents(self, index: int) -> dict[str, list[int]]:
        """Returns the numbers of a sample's documents, by .bin file (see Dataset)."""
        return self.datasets[self.index.dataset[index]].documents(int(self.index.sample[index]))


def _guessed(shares: ndarray, starts: ndarray) -> ndarray:
    """Returns counts near those of the rule at each of `starts`, whose sum is the start.

    The shares are rounded down, and those with the largest remainders up.
    """
    exact = starts[:, None] * shares
    counts = np.floor(exact)
    missing = starts - counts.sum(axis=1)
    ranks = np.argsort(np.argsort(counts - exact, axis=1, kind="stable"), axis=1)
    counts += ranks < missing[:, None]
    # The shares' sum is 1 but for rounding, so that a few may be left over or missing.
    counts[:, int(np.argmax(shares))] += starts - counts.sum(axis=1)
    return counts


def _pick(shares: ndarray, numbers: ndarray, counts: ndarray) -> ndarray:
    """Returns the dataset of one sample of each row, and advances the counts.

    numbers: [rows], n of the rule. counts: [rows, datasets].
    """
    chosen = (shares * numbers[:, None] - counts).argmax(axis=1)
    counts[np.arange(len(numbers)), chosen] += 1.0
    return chosen


def _loop(shares: ndarray, start: int, counts: ndarray, dataset: ndarray) -> None:
    """Fills an array with the datasets of the samples from `start` on, by the rule as written.

    counts: [datasets], the counts before sample `start`; they are advanced.
    """
    weights, so_far, found = shares.tolist(), counts.tolist(), []
    for n in range(start, start + len(dataset)):
        scale = float(n or 1)
        # strict=True makes this a quarter slower.
        errors = [weight * scale - count for weight, count in zip(weights, so_far)]  # noqa: B905
        found.append(errors.index(max(errors)))
        so_far[found[-1]] += 1
    dataset[:], counts[:] = found, so_far
