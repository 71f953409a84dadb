"""docs/architecture.md names folders and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
TREE = PAGE.split("## The layout")[1].split("```text\n")[1].split("```")[0]


PACKAGE = ROOT / "megatron_lite"
FOLDERS = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}


def test_the_tree_names_every_folder_and_only_what_exists() -> None:
    folder, seen, found, missing = "", set(), 0, []
    for line in TREE.splitlines()[1:]:
        for word in re.sub(r"\(.*\)|\.\.\.|^ +\d", "", line).split():
            name = word.rstrip("/")
            if word.endswith("/") and name in FOLDERS:
                folder = name
                seen.add(name)
                continue
            found += 1
            if (
                not (PACKAGE / folder / f"{name}.py").is_file()
                and not (PACKAGE / folder / name).is_dir()
            ):
                missing.append(f"{folder}/{name}")
    assert missing == [] and seen == FOLDERS and found > 50


def test_every_file_of_a_step_exists() -> None:
    paths = re.findall(r"`((?:megatron_lite/|tests/)?[\w/]+\.py)`", PAGE)
    assert len(paths) > 15 and [path for path in paths if not (ROOT / path).is_file()] == []
