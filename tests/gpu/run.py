"""Runs the tests of this folder that take a device: `run.py --json FILE`.

`--device cpu` rehearses the whole on a machine without a GPU, where tests that need one are left
out. With pytest-xdist as many tests run at a time as two processor cores each allow, at most 8.
"""

import argparse
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]


class Recorder:
    """Collects by test: outcome "passed", "failed" or "skipped", seconds, and the reason."""

    def __init__(self, file):
        self.file, self.results = file, {}

    def pytest_runtest_logreport(self, report):
        # a fixture that fails, or a skip before the call
        if report.when == "call" or report.outcome != "passed":
            skipped = isinstance(report.longrepr, tuple)
            self.results[report.nodeid.split("::", 1)[1]] = {
                "outcome": report.outcome,
                "seconds": round(report.duration, 3),
                "reason": report.longrepr[2] if skipped else report.longreprtext,
            }
            # after each test: the time may run out
            self.file.write_text(json.dumps(self.results, indent=1) + "\n")


def main():
    """0 where no test failed and at least one passed, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", metavar="FILE", required=True)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    import pytest

    recorder = Recorder(Path(args.json))
    words = ["-m", "gpu" if args.device == "cuda" else "not gpu", "--rootdir", str(ROOT)]
    at_a_time = max(1, min(8, (os.cpu_count() or 2) // 2))
    words += ["-n", str(at_a_time)] * (find_spec("xdist") is not None)
    words += map(str, sorted(FOLDER.glob("test_gpu*.py")))
    status = pytest.main(words, plugins=[recorder])
    outcomes = [test["outcome"] for test in recorder.results.values()]
    return int(status != 0 or "passed" not in outcomes)


if __name__ == "__main__":
    sys.exit(main())
