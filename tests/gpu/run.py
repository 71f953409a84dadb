"""Runs the tests of this folder that take a device, with pytest or, where it is missing, without:
`run.py --json FILE`.

Without pytest a test is called with the arguments that it names: `device` or `cuda`, and
`tmp_path`. `--device cpu` rehearses the whole on a machine without a GPU, where tests that need one
are skipped.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]

# by test: outcome "passed", "failed" or "skipped", seconds, and the reason
Results = dict[str, dict[str, Any]]


def with_pytest(pytest: Any, device: str) -> Results:
    """The tests marked `gpu`, or on the CPU those that are not."""
    results: Results = {}

    class Recorder:
        def pytest_runtest_logreport(self, report: Any) -> None:
            # a fixture that fails, or a skip before the call
            if report.when == "call" or report.outcome != "passed":
                reason = (
                    report.longrepr[2]
                    if isinstance(report.longrepr, tuple)
                    else report.longreprtext
                )
                results[report.nodeid.split("::", 1)[1]] = result(
                    report.outcome, report.duration, reason
                )

    marked = "gpu" if device == "cuda" else "not gpu"
    status = pytest.main(
        ["-m", marked, "--rootdir", str(ROOT), *map(str, gpu_test_files())], plugins=[Recorder()]
    )
    if status not in (0, 1):  # 1: tests failed, and are in the results
        results["pytest"] = result("failed", 0.0, f"pytest ended with status {status}")
    return results


def without_pytest(device: torch.device) -> Results:
    """Every function test_* of the test files."""
    results: Results = {}
    for file in gpu_test_files():
        module = importlib.import_module(f"tests.gpu.{file.stem}")
        for name, test in inspect.getmembers(module, inspect.isfunction):
            if name.startswith("test_"):
                results[name] = call(test, device)
                print(
                    (
                        f"{results[name]['outcome']:8} {name} "
                        f"{results[name]['reason'].strip().rpartition(chr(10))[2]}"
                    ),
                    flush=True,
                )
    return results


def call(test: Callable[..., None], device: torch.device) -> dict[str, Any]:
    """One test's result."""
    start = time.perf_counter()
    outcome, reason = "passed", ""
    with tempfile.TemporaryDirectory() as folder:
        arguments: dict[str, Any] = {"device": device, "cuda": device, "tmp_path": Path(folder)}
        names = inspect.signature(test).parameters
        try:
            if "cuda" in names and device.type != "cuda":
                raise unittest.SkipTest("needs a CUDA device")
            test(**{name: arguments[name] for name in names})
        except unittest.SkipTest as skip:
            outcome, reason = "skipped", str(skip)
        except Exception:  # whatever it is, the other tests run
            outcome, reason = "failed", traceback.format_exc()
    return result(outcome, time.perf_counter() - start, reason)


def result(outcome: str, seconds: float, reason: str) -> dict[str, Any]:
    return {"outcome": outcome, "seconds": round(seconds, 3), "reason": reason}


def gpu_test_files() -> list[Path]:
    return sorted(FOLDER.glob("test_gpu*.py"))


def main() -> int:
    """0 where no test failed and at least one passed, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", metavar="FILE", required=True)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    try:
        import pytest
    except ImportError:
        print("pytest is not installed: running the tests without it", flush=True)
        results = without_pytest(
            torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
        )
    else:
        results = with_pytest(pytest, args.device)
    Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    outcomes = [test["outcome"] for test in results.values()]
    return 0 if "passed" in outcomes and "failed" not in outcomes else 1


if __name__ == "__main__":
    sys.exit(main())
