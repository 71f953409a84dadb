"""benchmarks/gpu.sh, rehearsed on the CPU as it runs on a machine that has nothing but torch and
numpy."""

from __future__ import annotations

import json
import subprocess
import sys
import unittest
from pathlib import Path

import pytest
import torch

from tests.gpu.run import call
from tests.support.commands import ROOT, environment
from tests.support.limits import HANG_S

OPTIONAL = ("pytest", "rich", "safetensors", "tokenizers", "transformers")


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
def test_a_machine_with_torch_alone_gets_a_report(tmp_path: Path) -> None:
    """Packages are hidden by modules that cannot be imported. What needs one is skipped and says
    so; the rest passes."""
    for package in OPTIONAL:
        (tmp_path / f"{package}.py").write_text(f"raise ImportError('no {package} here')\n")
    done = run_script(tmp_path / "new" / "gpu.json", DEVICE="cpu", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "new" / "gpu.json").read_text())
    assert set(report["missing_packages"]) >= set(OPTIONAL)
    assert report["torch"] and report["date"] and "git_commit" in report
    parts = report["parts"]
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(parts, 0)
    tests = parts["tests"]["result"]
    outcomes = {name: test["outcome"] for name, test in tests.items()}
    assert outcomes["test_float32_agrees_with_the_cpu_in_float64"] == "passed"
    assert outcomes["test_an_infinite_gradient_changes_nothing"] == "passed"
    assert outcomes["test_a_step_never_waits_for_the_gpu"] == "skipped"
    ended = tests["test_a_resumed_run_ends_as_an_uninterrupted_one"]
    assert ended["reason"] == "rich is not installed"
    for name in ("stack-8b", "llama-16x1024", "gpt2"):
        result = parts[name]["result"]
        assert [row["name"] for row in result["rows"]][:2] == ["ours, none", "ours, full"]
        assert "transformers" in result["skipped"]
    page = (tmp_path / "new" / "gpu.md").read_text()
    assert page.count("| ours, none ") == 3 and "\n## tests\n" in page


@pytest.mark.weekly
def test_without_a_gpu_it_says_what_is_missing(tmp_path: Path) -> None:
    done = run_script(tmp_path / "gpu.json")
    assert done.returncode == 2 and "torch sees no CUDA device" in done.stderr
    assert not (tmp_path / "gpu.json").exists()


def test_the_runner_without_pytest_tells_failures_from_skips() -> None:
    def fails(device: torch.device) -> None:
        raise AssertionError(f"wrong on {device}")

    def skips(device: torch.device) -> None:
        raise unittest.SkipTest("no such package")

    failed, skipped = call(fails, torch.device("cpu")), call(skips, torch.device("cpu"))
    assert failed["outcome"] == "failed" and "wrong on cpu" in failed["reason"]
    assert (skipped["outcome"], skipped["reason"]) == ("skipped", "no such package")
