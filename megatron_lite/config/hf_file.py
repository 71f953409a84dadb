"""Reads a config.json of Hugging Face from the disk. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_lite.config.checks import InputError, flag
from megatron_lite.config.hf_config import HfModel, from_hf
from megatron_lite.config.input_file import read_input_text
from megatron_lite.config.json_text import LARGEST_TEXT, parse_json

CONFIG = "config.json"


def read_hf_file(path: Path) -> HfModel:
    """Returns the model that a config.json, or the one in a folder, describes.

    Raises InputError, which names the file, if it cannot be read or does not map.
    """
    file = path / CONFIG if path.is_dir() else path
    try:
        return from_hf(parse_json(read_input_text(file, LARGEST_TEXT)))
    except InputError as error:
        advice = "" if path.exists() else _download_advice(path)
        raise InputError(f"{error}{advice}") from error
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise InputError(f"{file}: {error}") from error


def _download_advice(path: Path) -> str:
    """Returns what to do about a path that does not exist and may name a model of the Hub."""
    advice = (
        ". Give a config.json on this machine, or the folder that has it; nothing is downloaded"
    )
    if path.is_absolute() or len(path.parts) != 2:
        return advice
    return f"{advice}. From the Hub it comes with: hf download {path} {CONFIG} --local-dir {path}"


def exact_fields(mapped: HfModel, path: Path) -> dict[str, Any]:
    """Returns the fields of a mapped model. Raises InputError if it does not map exactly."""
    if mapped.inexact:
        raise InputError(f"{path} does not map exactly: {'; '.join(mapped.inexact)}")
    return dict(mapped.fields)


def tokenizer_fields(vocab_size: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the field `vocab_size` that gives the model its V.

    The model keeps all rows of its embedding, of which a tokenizer may use fewer. NullTokenizer, of
    a command line without a tokenizer, adds one id to its size.
    """
    names = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
    kind = given.get("tokenizer_type", "NullTokenizer")
    is_null = kind == "NullTokenizer" and not any(name in given for name in names[1:])
    return {"vocab_size": vocab_size - 1 if is_null else vocab_size}


def override_notices(stored: Mapping[str, Any], given: Mapping[str, Any], source: str) -> list[str]:
    """Returns a line for each given flag that differs from `source`, a flag and its value."""
    return [
        f"{flag(name)} {given[name]} replaces {value} of {source}"
        for name, value in stored.items()
        if name in given and given[name] != value
    ]
