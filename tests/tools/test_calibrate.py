"""The measurement of a machine: the fit is exact on exact rates, the file is one that the time
model reads, and wrong settings are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.config.checks import InputError
from megatron_lite.plan.hardware import load_hardware
from megatron_lite.tools.calibrate import main, run
from megatron_lite.tools.device_rates import Effort, fit, measure
from tests.support.gpus import show_gpus

TINY = Effort(
    seconds=0.002, shapes=((32, 32, 32), (64, 64, 8)), elements=1 << 14, all_reduce_bytes=4096
)
CPU = torch.device("cpu")


@given(peak=st.floats(1e9, 1e15), half=st.floats(0.0, 1e4))
def test_exact_rates_give_the_curve_that_made_them(peak: float, half: float) -> None:
    samples = [(size, peak * size / (size + half)) for size in (16, 64, 128, 1024)]
    found = fit(samples)
    assert found.peak == pytest.approx(peak, rel=1e-3)
    assert found.half_dimension == pytest.approx(half, rel=1e-3, abs=1e-3)


def test_rates_that_fall_with_the_size_have_no_half_dimension() -> None:
    found = fit([(16, 3e9), (1024, 1e9)])
    assert found.half_dimension == 0.0 and 1e9 < found.peak < 3e9


def test_shapes_of_one_size_give_their_rate() -> None:
    assert fit([(64, 2e9), (64, 2e9)]) == (pytest.approx(2e9), 0.0)


@pytest.mark.long
def test_a_measured_machine_is_one_that_the_model_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = dict(shapes=TINY.shapes, large_bytes=TINY.all_reduce_bytes)
    path = tmp_path / "here.json"
    assert main(["--output", str(path), "--device", "cpu", "--seconds", "0.002"], **sizes) == 0
    machine = load_hardware(str(path))
    assert machine.device == "cpu" and machine.shares_cores
    assert machine.bf16.max_efficiency == 1.0 and machine.fp32.peak_flops > 1e6
    assert machine.inside == machine.between and machine.inside.latency_s > 0.0
    assert f"{path}: written" in capsys.readouterr().out


def test_links_of_a_known_machine_are_taken() -> None:
    a100 = load_hardware("a100-80gb")
    machine = measure(CPU, TINY, a100)
    assert machine.inside == a100.inside and machine.between == a100.between
    assert "a100-80gb" in machine.sources["inside, between"]
    # The same file again: a figure beyond its bounds would raise ValueError.
    assert replace(machine) == machine


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (dict(output="here"), "must end in .json"),
        (dict(seconds=0.0), "--seconds must be above 0"),
        (dict(seconds=float("nan")), "--seconds must be above 0"),
        (dict(links_of="x100"), "no machine is called"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict, fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        run(**{**dict(output="here.json", device="cpu", links_of=None, seconds=0.1), **changes})


@pytest.mark.parametrize(
    ("gpus", "fault"), [(0, "torch sees no GPU"), (1, "one GPU cannot measure a network")]
)
def test_gpus_that_are_missing_are_named(
    gpus: int, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    show_gpus(monkeypatch, gpus)
    with pytest.raises(InputError, match=fault):
        run("here.json", device="cuda", links_of=None, seconds=0.1)
