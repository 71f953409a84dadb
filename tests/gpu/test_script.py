"""benchmarks/gpu.sh, rehearsed on the CPU as it runs on a machine without any peer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT, environment
from tests.support.limits import HANG_S

OPTIONAL = ("tokenizers", "transformers")


def run_script(output: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "benchmarks/gpu.sh"), str(output)],
        capture_output=True,
        text=True,
        timeout=3 * HANG_S,
        env=environment(PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="", **variables),
        check=False,
    )


@pytest.mark.weekly
def test_a_machine_without_peers_gets_a_report(tmp_path: Path) -> None:
    """Packages are hidden by modules that cannot be imported. What needs one is skipped and says
    so; the rest passes."""
    for package in OPTIONAL:
        (tmp_path / f"{package}.py").write_text(f"raise ImportError('no {package} here')\n")
    done = run_script(tmp_path / "new" / "gpu.json", DEVICE="cpu", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "new" / "gpu.json").read_text())
    assert report["torch"] and report["date"] and "git_commit" in report
    parts = report["parts"]
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(parts, 0)
    tests = parts["tests"]["result"]
    assert {"passed"} <= {test["outcome"] for test in tests.values()} <= {"passed", "skipped"}
    for name in ("stack-8b", "llama-16x1024", "gpt2"):
        result = parts[name]["result"]
        assert {"ours, none", "ours, full"} <= {row["name"] for row in result["rows"]}
        assert "transformers" in result["skipped"]
    page = (tmp_path / "new" / "gpu.md").read_text()
    assert page.count("| ours, none ") == 3 and "\n## tests\n" in page


@pytest.mark.weekly
def test_without_a_gpu_it_says_what_is_missing(tmp_path: Path) -> None:
    done = run_script(tmp_path / "gpu.json")
    assert done.returncode == 2 and "torch sees no CUDA device" in done.stderr
    assert not (tmp_path / "gpu.json").exists()
