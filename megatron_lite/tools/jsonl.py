"""Reads documents for the data tools: one JSON object per line, {"text": "..."}."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from megatron_lite.config.checks import InputError
from megatron_lite.config.input_file import open_input
from megatron_lite.config.plain import parse_json
from megatron_lite.data.tokenizers import check_encodes

# A tokenizer takes about 170 bytes of memory for each byte of one text: 1.4 GiB for a line of this
# length. Measured with tokenizers 0.23: 1.0 GiB for 6 MiB. Two thirds of it are the positions of
# every byte before and after normalization.
MAX_LINE_BYTES = 8 << 20


class Line(NamedTuple):
    """One line of a file, counted from 1."""

    number: int
    content: bytes


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a file of JSON lines: --input, --json-keys and --max-line-bytes."""
    add = parser.add_argument
    add("--input", required=True, help="file with one JSON object per line")
    keys = "keys whose texts are read (default: text)"
    add("--json-keys", "--json-key", nargs="+", default=["text"], metavar="KEY", help=keys)
    add(
        "--max-line-bytes",
        type=int,
        default=MAX_LINE_BYTES,
        metavar="N",
        help="longest line that is read; a tokenizer takes about 170 bytes of memory for each "
        f"byte of a text (default: {MAX_LINE_BYTES})",
    )


def lines_of(path: str, max_line_bytes: int) -> Iterator[Line]:
    """Yields the lines of a file that are not blank. At most one line is in memory.

    Raises InputError if the file does not exist or cannot be read, and for a line longer than
    `max_line_bytes`. It reads no more of such a line than the limit and one byte.
    """
    if not os.path.exists(path):
        raise InputError(f"--input {path}: no such file (one JSON object per line)")
    try:
        with open_input(path) as file:
            for number in itertools.count(1):
                content = file.readline(max_line_bytes + 1)
                if not content:
                    return
                if len(content.rstrip(b"\r\n")) > max_line_bytes:
                    raise InputError(
                        f"{path}:{number}: the line is longer than --max-line-bytes "
                        f"{max_line_bytes}, and a tokenizer takes about 170 times its length in "
                        "memory: split the document into several lines, or give a higher limit"
                    )
                if content.strip():
                    yield Line(number, content)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def parse_line(line: bytes, keys: Iterable[str], where: str) -> list[str]:
    """Returns the texts under `keys` of one line.

    Raises InputError, which names `where` (file:line), if the line is not an object with a string
    under each key, or if a text cannot be encoded.
    """
    try:
        document: Any = parse_json(line, longest=None, strict=False)
    except ValueError as error:  # bad UTF-8 is a UnicodeDecodeError, which is a ValueError
        raise InputError(
            f"{where}: not a line of JSON ({error}): each line must be an object such as "
            '{"text": "..."}; docs/data.md has a command that makes such lines of a plain text'
        ) from None
    if not isinstance(document, dict):
        raise InputError(
            f'{where}: expected an object such as {{"text": "..."}}, found '
            f"{type(document).__name__}"
        )
    texts = []
    for key in keys:
        text = document.get(key)
        if not isinstance(text, str):
            found = type(text).__name__ if key in document else f"only {', '.join(document)}"
            raise InputError(
                f"{where}: expected a string under {key!r}, found {found} (--json-keys names the "
                "keys to read)"
            )
        try:
            check_encodes(text)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        texts.append(text)
    return texts
