"""The last part of docs/coming-from.md: every name on our side exists, and the names that users of
other systems search for are there."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import NamedTuple

from arguments import build_parser, supported_flags

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "coming-from.md").read_text().partition("## Names of functions")[2]


class Row(NamedTuple):
    """theirs: the names in the first column. ours: dotted names, with their module.

    flags: those of the launcher in the second column.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    flags: tuple[str, ...]


def rows() -> Iterator[Row]:
    for line in PAGE.splitlines():
        if line.startswith("| ") and not line.startswith("| theirs"):
            theirs, ours = (cell.strip() for cell in line.strip("|").split("|"))
            places = re.findall(r"((?:`[\w.]+` and )?`[\w.]+`) in `([\w/]+)\.py`", ours)
            # Every file on our side belongs to a name, and every row has a name or "none".
            assert len(places) == len(re.findall(r"\.py`", ours)), line
            assert places or ours.split(":")[0] == "none", line
            yield Row(
                tuple(re.findall(r"`([^`]+)`", theirs)),
                tuple(
                    f"{module_of(file)}.{name}"
                    for names, file in places
                    for name in re.findall(r"`([^`]+)`", names)
                ),
                tuple(re.findall(r"`(--[^`]+)`", ours)),
            )


def module_of(file: str) -> str:
    """The module of a file without its suffix, in megatron_lite/ or beside it."""
    inside = (ROOT / "megatron_lite" / file).with_suffix(".py").exists()
    return (f"megatron_lite/{file}" if inside else file).replace("/", ".")


ROWS = list(rows())


def test_every_name_of_ours_exists() -> None:
    """The longest part that is a module, then its attributes."""
    missing = []
    for name in sorted({name for row in ROWS for name in row.ours}):
        parts = name.split(".")
        try:
            counts = range(len(parts) - 1, 0, -1)
            modules = [n for n in counts if ROOT.joinpath(*parts[:n]).with_suffix(".py").exists()]
            module = importlib.import_module(".".join(parts[: modules[0]]))
            reduce(getattr, parts[modules[0] :], module)
        except (IndexError, AttributeError):
            missing.append(name)
    assert missing == []


def test_every_flag_on_the_page_is_one_of_the_launcher() -> None:
    assert {flag for row in ROWS for flag in row.flags} <= set(supported_flags(build_parser()))
