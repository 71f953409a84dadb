"""requirements.lock names the versions of constraints.txt, each with the hashes of its files, and
no place to get them from."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_SPEC = importlib.util.spec_from_file_location(
    "lock_requirements", ROOT / ".ci" / "lock_requirements.py"
)
assert _SPEC is not None and _SPEC.loader is not None
lock_requirements = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(lock_requirements)
CONSTRAINTS = [
    line
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
LOCK = (ROOT / "requirements.lock").read_text()
ENTRIES = [
    entry for entry in LOCK.replace("\\\n", " ").splitlines() if entry and not entry.startswith("#")
]


def test_the_versions_and_markers_are_those_of_the_constraints_in_their_order() -> None:
    assert [
        entry.partition(" --hash")[0].strip().replace(" ;", ";") for entry in ENTRIES
    ] == CONSTRAINTS


def test_every_version_has_a_hash_and_nothing_else() -> None:
    for entry in ENTRIES:
        hashes = re.findall(r" --hash=sha256:[0-9a-f]{64}(?= |$)", entry)
        assert hashes and len(set(hashes)) == len(hashes), entry
        assert len(entry.split("--hash")) == len(hashes) + 1, entry


def test_no_index_and_no_path_is_named() -> None:
    assert not re.search(r"://|index-url|find-links|trusted-host|^\s*[./~]|@ ", LOCK, re.MULTILINE)


def test_torch_has_the_files_of_every_python_and_a_cpu_build() -> None:
    (entry,) = [entry for entry in ENTRIES if entry.startswith("torch==")]
    assert entry.count("--hash") >= 5 + 1


def test_the_script_writes_what_is_there() -> None:
    """Without looking anything up: it reads the hashes of its own file."""
    assert lock_requirements.text(lock_requirements.locked()) == LOCK


@pytest.mark.parametrize(
    ("line", "python", "expected"),
    [
        ("a==1", "3.10", True),
        ('a==1; python_version >= "3.11"', "3.10", False),
        ('a==1; python_version >= "3.11"', "3.11", True),
        ('a==1; python_version < "3.11"', "3.10", True),
        ('a==1; python_version < "3.11"', "3.9", True),
        ('a==1; python_version < "3.11"', "3.14", False),
    ],
)
def test_a_marker_is_that_of_the_python_asked_for_and_not_of_the_one_that_runs(
    line: str, python: str, expected: bool
) -> None:
    pin = lock_requirements.PIN.fullmatch(line)
    assert pin is not None and lock_requirements.applies(pin, python) is expected


def test_a_constraint_that_is_no_exact_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "constraints.txt").write_text("numpy>=2\n")
    monkeypatch.setattr(lock_requirements, "CONSTRAINTS", tmp_path / "constraints.txt")
    with pytest.raises(ValueError, match="'numpy>=2' is no exact version"):
        lock_requirements.pins()
