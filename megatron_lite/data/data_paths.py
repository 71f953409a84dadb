"""The prefixes and weights of a run's data, and the shares of its splits, as the flags give them.

`--data-path` has three forms:

    PREFIX
    WEIGHT PREFIX WEIGHT PREFIX ...
    PREFIX PREFIX ...                  the datasets' sizes decide the shares

The same words can come from a file, or for each split by itself from three flags or a JSON file.
"""

import itertools
import math
import os
import shlex
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_lite.config.checks import InputError, flag, input_faults, parse_json, quoted, shown
from megatron_lite.config.data_settings import PER_SPLIT_PATHS, DataConfig
from megatron_lite.config.input_file import read_input_text

LARGEST_FILE = 1 << 24  # bytes of a file with the words of --data-path
SPLITS = ("train", "valid", "test")
PREFIX = (
    "--data-path takes the prefix of a .bin and .idx pair, such as my-corpus_text_document for "
    "my-corpus_text_document.bin"
)
DOCUMENT = "_text_document"  # what preprocess_data appends to its prefix


class DataPath(NamedTuple):
    """The parsed `--data-path`. weights: one per prefix, with sum 1; None if none were given."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


def read_data_paths(data: DataConfig) -> list[DataPath | None]:
    """Returns the data of each split; None for a split without data.

    They are the same for all splits unless `data.is_per_split`. Raises InputError if the config
    names no data, or if a file that it names cannot be read.
    """
    if data.per_split_data_args_path is not None:
        return _read_splits(data.per_split_data_args_path)
    if data.train_data_path:
        words = (data.train_data_path, data.valid_data_path, data.test_data_path)
        return [
            parse_data_path(some, flag(name)) if some else None
            for name, some in zip(PER_SPLIT_PATHS, words, strict=True)
        ]
    if data.data_args_path is not None:
        source = f"--data-args-path {data.data_args_path}"
        found = _content(data.data_args_path, source).split()
        if not found:
            raise InputError(f"{source} is empty: write the words of --data-path into it")
        return [parse_data_path(found, f"{source}:")] * 3
    if data.data_path:
        return [parse_data_path(data.data_path)] * 3
    raise InputError("there is nothing to train on: give --data-path PREFIX or --mock-data")


def parse_data_path(words: Sequence[str], source: str = "--data-path") -> DataPath:
    """Parses the words of `--data-path`, or of another source of them.

    Raises InputError if only some prefixes have weights, or if a weight is not a positive number.
    """
    numbers = [_number(word) for word in words]
    if all(number is None for number in numbers):
        return DataPath(tuple(words), None)
    weights = [number for number in numbers[::2] if number is not None]
    shares = normalized(weights)
    if (
        len(weights) * 2 != len(words)
        or any(number is not None for number in numbers[1::2])
        or not all(0.0 < weight < math.inf for weight in weights)
        or not all(share > 0.0 for share in shares)
    ):
        raise InputError(
            f"{source} {shown(' '.join(words))}: give prefixes only, or a weight before every "
            "prefix, such as 0.3 first 0.7 second. Every weight must be above 0, also as a share "
            "of their sum"
        )
    return DataPath(tuple(words[1::2]), shares)


def parse_split(split: str) -> tuple[float, ...]:
    """Returns the three shares of `--split '969, 30, 1'`, which add up to 1.

    A share that is left out is 0. Raises InputError unless the text is 1 to 3 numbers >= 0, not all
    0, with a finite sum.
    """
    weights = [_number(word) for word in split.split(",")]
    found = [weight for weight in weights if weight is not None and weight >= 0.0]
    if not 1 <= len(found) == len(weights) <= 3 or not 0.0 < sum(found) < math.inf:
        raise InputError(
            f"--split {split!r} must be 1 to 3 numbers >= 0, not all 0, of a finite sum, with "
            "commas between them: train, validation, test, such as '969, 30, 1'"
        )
    return (*normalized(found), 0.0, 0.0)[:3]


def split_documents(split: str, num_documents: int) -> list[tuple[int, int]]:
    """Returns for each split the range of documents start <= n < stop, in the shares of `split`.

    Each boundary is rounded to the nearest document.
    """
    shares = itertools.accumulate((0.0, *parse_split(split)))
    return list(itertools.pairwise(round(share * num_documents) for share in shares))


def normalized(weights: Sequence[float]) -> tuple[float, ...]:
    """Returns the weights divided by their sum; all are 0 if the sum overflows.

    The sum is numpy's, because Python's own sum rounds differently from Python 3.12 on.
    """
    values = np.array(weights, dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        return tuple((values / values.sum()).tolist())


def prefix_advice(prefix: str) -> str:
    """Returns what to do about a prefix without its files, as the end of a message."""
    stem, ending = os.path.splitext(prefix)
    if ending in (".bin", ".idx"):
        return f"leave the ending out: --data-path {stem}"
    if os.path.isfile(f"{prefix}{DOCUMENT}.idx"):
        return f"did you mean --data-path {prefix}{DOCUMENT}?"
    if not os.path.isfile(prefix):
        return PREFIX
    return (
        f"{prefix} is text, and training reads token files: make them with python -m "
        f"megatron_lite.tools.preprocess_data --input {shlex.quote(prefix)} --output-prefix "
        f"{shlex.quote(stem)} --append-eod and the flags of a tokenizer, and give --data-path "
        f"{shlex.quote(stem + DOCUMENT)} (docs/data.md has every step)"
    )


def _read_splits(path: str) -> list[DataPath | None]:
    source = f"--per-split-data-args-path {path}"
    expected = (
        'expected {"train": [..], "valid": [..], "test": [..]} with the words of --data-path in '
        "each list"
    )
    text = _content(path, source)
    with input_faults(f"{source} is not JSON: ", f"; {expected}"):
        value = parse_json(text)
    if not isinstance(value, dict) or set(value) != set(SPLITS):
        raise InputError(f"{source}: found {quoted(value)}, {expected}")
    if not value["train"]:
        raise InputError(f"{source}: train names no data, {expected}")
    paths = []
    for name in SPLITS:
        # a list of texts and numbers, one text of them, or null
        words = value[name] or []
        words = words.split() if isinstance(words, str) else words
        if not isinstance(words, list) or any(type(one) not in (str, int, float) for one in words):
            raise InputError(f"{source}: {name} is no list of texts and numbers; {expected}")
        where = f"{source}, {name}:"
        paths.append(parse_data_path([str(word) for word in words], where) if words else None)
    return paths


def _content(path: str, source: str) -> str:
    try:
        return read_input_text(path, LARGEST_FILE)
    except (InputError, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error).removeprefix(f"{path}: ")
        raise InputError(f"{source}: {reason}") from error


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
