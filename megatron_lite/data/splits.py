"""`--split '969, 30, 1'`: which documents train, which validate, which test."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_lite.config.checks import InputError


class Splits(NamedTuple):
    """Ranges of documents, start <= n < stop; an empty range where the split has no documents."""

    train: tuple[int, int]
    valid: tuple[int, int]
    test: tuple[int, int]


def parse_split(split: str) -> tuple[float, float, float]:
    """The three shares, which add up to 1. Shares left out are 0. InputError for anything but 1 to 3 numbers >= 0."""
    try:
        weights = [float(word) for word in split.split(",")]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or not all(weight >= 0.0 for weight in weights) or not 0.0 < sum(weights) < math.inf:
        raise InputError(f"--split {split!r} must be 1 to 3 numbers >= 0, not all 0, of a finite sum, with commas between them: "
                         "train, validation, test, such as '969, 30, 1'")
    train, valid, test = (*normalized(weights), 0.0, 0.0)[:3]
    return train, valid, test


def normalized(weights: Sequence[float]) -> tuple[float, ...]:
    """The weights divided by their sum (in numpy: Python's own sum rounds otherwise from 3.12 on). All 0 if that overflows."""
    values = np.array(weights, dtype=np.float64)
    with np.errstate(over="ignore"):
        return tuple((values / values.sum()).tolist())


def split_documents(split: str, num_documents: int) -> Splits:
    """Consecutive ranges of `num_documents` in the shares of `split`, each boundary rounded to the nearest document."""
    bounds = [round(share * num_documents) for share in itertools.accumulate((0.0, *parse_split(split)))]
    return Splits(*itertools.pairwise(bounds))
