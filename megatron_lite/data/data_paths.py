"""The prefixes and weights of a run's data: from flags, or from the files that two flags name."""

from __future__ import annotations

from typing import NamedTuple

from megatron_lite.config.checks import InputError, flag
from megatron_lite.config.data_settings import PER_SPLIT_PATHS, DataConfig
from megatron_lite.config.input_file import read_input_text
from megatron_lite.config.plain import parse_json
from megatron_lite.data.blend import DataPath, parse_data_path
from megatron_lite.data.splits import Splits

LARGEST_FILE = 1 << 24  # bytes of a file with the words of --data-path


class SplitPaths(NamedTuple):
    """The data of each split, if the splits are given one by one. None: no data."""

    train: DataPath
    valid: DataPath | None
    test: DataPath | None


def read_data_paths(data: DataConfig) -> DataPath | SplitPaths:
    """Returns the data of all splits together, or of each split by itself.

    Raises InputError if the config names no data, or if a file that it names cannot be read.
    """
    if data.per_split_data_args_path is not None:
        return _read_splits(data.per_split_data_args_path)
    if data.train_data_path:
        words = (data.train_data_path, data.valid_data_path, data.test_data_path)
        train, valid, test = (
            parse_data_path(some, flag(name)) if some else None
            for name, some in zip(PER_SPLIT_PATHS, words, strict=True)
        )
        assert train is not None, "DataConfig has checked it"
        return SplitPaths(train, valid, test)
    if data.data_args_path is not None:
        source = f"--data-args-path {data.data_args_path}"
        found = _content(data.data_args_path, source).split()
        if not found:
            raise InputError(f"{source} is empty: write the words of --data-path into it")
        return parse_data_path(found, f"{source}:")
    if data.data_path:
        return parse_data_path(data.data_path)
    raise InputError("there is nothing to train on: give --data-path PREFIX or --mock-data")


def _read_splits(path: str) -> SplitPaths:
    source = f"--per-split-data-args-path {path}"
    expected = (
        'expected {"train": [..], "valid": [..], "test": [..]} with the words of --data-path in '
        "each list"
    )
    try:
        value = parse_json(_content(path, source))
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{source} is not JSON: {error}; {expected}") from error
    if not isinstance(value, dict) or set(value) != set(Splits._fields):
        found = f"the keys {', '.join(value)}" if isinstance(value, dict) else type(value).__name__
        raise InputError(f"{source}: found {found or 'no keys'}, {expected}")
    train, valid, test = (
        parse_data_path(words, f"{source}, {name}:") if words else None
        for name in Splits._fields
        for words in [_words(value[name], f"{source}, {name}", expected)]
    )
    if train is None:
        raise InputError(f"{source}: train names no data, {expected}")
    return SplitPaths(train, valid, test)


def _words(value: object, source: str, expected: str) -> list[str]:
    """Returns the words of a split: a list of texts and numbers, one text of them, or null."""
    if value is None:
        return []
    if isinstance(value, str):
        return value.split()
    if isinstance(value, list) and all(
        isinstance(word, str | int | float) and not isinstance(word, bool) for word in value
    ):
        return [str(word) for word in value]
    raise InputError(f"{source} is no list of texts and numbers; {expected}")


def _content(path: str, source: str) -> str:
    try:
        return read_input_text(path, LARGEST_FILE)
    except (InputError, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error).removeprefix(f"{path}: ")
        raise InputError(f"{source}: {reason}") from error
