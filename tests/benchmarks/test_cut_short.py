"""benchmarks/gpu.sh: a part whose time runs out leaves what it has measured, as the page says."""

import json
import signal
import sys
import time

import pytest

from benchmarks.gpu_report import joined, page
from benchmarks.harness import OutOfTime, end_with_what_there_is, in_rounds
from tests.support.limits import HANG_S


def test_sigterm_ends_the_rounds_and_whole_rounds_count():
    calls = []

    def measured(name):
        calls.append(name)
        if len(calls) == 9:  # the last turn of the second round after the warm-up
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        return len(calls)

    before = signal.getsignal(signal.SIGTERM)
    try:
        end_with_what_there_is()
        found = in_rounds({name: lambda name=name: measured(name) for name in "abc"}, rounds=9)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert {name: len(samples) for name, samples in found.items()} == dict.fromkeys("abc", 1)
    assert len(calls) == 9


def test_a_sigterm_in_a_finalizer_is_not_lost():
    class Dies:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGALRM), sys.unraisablehook
    try:
        end_with_what_there_is()
        with pytest.raises(OutOfTime):
            Dies()
            time.sleep(HANG_S)
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGALRM, before[1])
        sys.unraisablehook = before[2]


def test_the_page_is_right_where_parts_are_missing(tmp_path):
    row = {"name": "ours, none", "ms": 2.0, "step_ms": None}
    results = {
        "whole": (0, {"rows": [row], "skipped": {}}),
        "cut": (124, {"rows": [row], "skipped": {"peer": "no time left"}}),
        "killed": (137, None),
        "tests": (1, {"a": {"outcome": "passed"}, "b": {"outcome": "failed"}}),
    }
    for name, (status, result) in results.items():
        (tmp_path / f"{name}.status").write_text(f"{status}\n")
        if result is not None:
            (tmp_path / f"{name}.json").write_text(json.dumps(result))
    text = "\n".join(page(joined(tmp_path)))
    parts = {part.split("\n")[0]: part for part in text.split("\n## ")[1:]}
    assert parts.keys() == results.keys()
    assert "| ours, none | 2.0 | -" in parts["whole"] and "status" not in parts["whole"]
    assert "status 124 (its time ran out)" in parts["cut"]
    assert "| ours, none" in parts["cut"] and "peer left out: no time left" in parts["cut"]
    assert "status 137 (its time ran out)" in parts["killed"] and "no rows" in parts["killed"]
    assert "1 passed, 1 failed" in parts["tests"]
