"""requirements.lock names the versions of constraints.txt, each with the hashes of its files, and
no place to get them from."""

import importlib.util
import re

from tests.support.commands import ROOT

_SPEC = importlib.util.spec_from_file_location(
    "lock_requirements", ROOT / ".ci" / "lock_requirements.py"
)
assert _SPEC is not None and _SPEC.loader is not None
lock_requirements = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(lock_requirements)
LOCK = (ROOT / "requirements.lock").read_text()
ENTRIES = [
    entry for entry in LOCK.replace("\\\n", " ").splitlines() if entry and not entry.startswith("#")
]


def test_every_version_has_a_hash_and_nothing_else():
    for entry in ENTRIES:
        hashes = re.findall(r" --hash=sha256:[0-9a-f]{64}(?= |$)", entry)
        assert hashes and len(set(hashes)) == len(hashes), entry
        assert len(entry.split("--hash")) == len(hashes) + 1, entry


def test_the_script_writes_what_is_there():
    """A line for each of the constraints, in their order. Without looking anything up: it reads the
    hashes of its own file."""
    assert lock_requirements.text(lock_requirements.locked()) == LOCK
