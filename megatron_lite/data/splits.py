"""The flag `--split '969, 30, 1'`: which documents train, which validate and which test."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_lite.config.checks import InputError


class Splits(NamedTuple):
    """Ranges of documents, start <= n < stop. The range is empty if a split has no documents."""

    train: tuple[int, int]
    valid: tuple[int, int]
    test: tuple[int, int]


def parse_split(split: str) -> tuple[float, float, float]:
    """Returns the three shares, which add up to 1.

    A share that is left out is 0. Raises InputError unless the text is 1 to 3 numbers >= 0, not all
    0, with a finite sum.
    """
    try:
        weights = [float(word) for word in split.split(",")]
    except ValueError:
        weights = []
    if (
        not 1 <= len(weights) <= 3
        or not all(weight >= 0.0 for weight in weights)
        or not 0.0 < sum(weights) < math.inf
    ):
        raise InputError(
            f"--split {split!r} must be 1 to 3 numbers >= 0, not all 0, of a finite sum, with "
            "commas between them: train, validation, test, such as '969, 30, 1'"
        )
    train, valid, test = (*normalized(weights), 0.0, 0.0)[:3]
    return train, valid, test


def normalized(weights: Sequence[float]) -> tuple[float, ...]:
    """Returns the weights divided by their sum; all are 0 if the sum overflows.

    The sum is numpy's, because Python's own sum rounds differently from Python 3.12 on.
    """
    values = np.array(weights, dtype=np.float64)
    with np.errstate(over="ignore"):
        return tuple((values / values.sum()).tolist())


def split_documents(split: str, num_documents: int) -> Splits:
    """Returns consecutive ranges of `num_documents` documents in the shares of `split`.

    Each boundary is rounded to the nearest document.
    """
    bounds = [
        round(share * num_documents) for share in itertools.accumulate((0.0, *parse_split(split)))
    ]
    return Splits(*itertools.pairwise(bounds))
