"""benchmarks/gpu.sh, rehearsed on the CPU as it runs on a machine without any peer."""

import subprocess
import sys

import pytest

from tests.support.commands import ROOT, environment
from tests.support.limits import HANG_S


def run_script(output, **variables):
    return subprocess.run(
        ["bash", str(ROOT / "benchmarks/gpu.sh"), str(output)],
        capture_output=True,
        text=True,
        timeout=3 * HANG_S,
        env=environment(PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="", **variables),
        check=False,
    )


@pytest.mark.weekly
def test_without_a_gpu_it_says_what_is_missing(tmp_path):
    done = run_script(tmp_path / "gpu.json")
    assert done.returncode == 2 and "torch sees no CUDA device" in done.stderr
    assert not (tmp_path / "gpu.json").exists()
