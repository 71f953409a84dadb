"""The measurement of a machine: the fit is exact on exact rates, the file is one that the time
model reads, and wrong settings are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.config.checks import InputError
from megatron_lite.plan.hardware import load_hardware
from megatron_lite.tools import calibrate
from tests.support.gpus import show_gpus


@given(peak=st.floats(1e9, 1e15), half=st.floats(0.0, 1e4))
def test_exact_rates_give_the_curve_that_made_them(peak, half):
    found = calibrate.fit([(size, peak * size / (size + half)) for size in (16, 64, 128, 1024)])
    assert found == (pytest.approx(peak, rel=1e-3), pytest.approx(half, rel=1e-3, abs=1e-3))


def test_a_measured_machine_is_one_that_the_model_reads(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(calibrate, "SHAPES", ((32, 32, 32), (64, 64, 8)))
    monkeypatch.setattr(calibrate, "ELEMENTS", 1 << 14)
    small = "--num-layers 1 --hidden-size 64 --seq-length 32 --max-position-embeddings 32"
    monkeypatch.setitem(calibrate.RUN, "cpu", f"{small} --vocab-size 99")
    path = tmp_path / "here.json"
    monkeypatch.setattr(calibrate, "SECONDS", 0.002)
    show_gpus(monkeypatch, 0)
    assert calibrate.main(["--output", str(path)]) == 0
    assert f"{path}: written" in capsys.readouterr().out
    machine = load_hardware(str(path))  # a figure beyond its bounds would raise ValueError
    assert machine.device == "cpu" and machine.shares_cores and machine.pace != 1.0
    assert machine.inside == load_hardware("cpu").inside
    assert any("those of cpu" in source for source in machine.sources.values())


@pytest.mark.parametrize(
    "changes, fault",
    [
        (dict(output="here"), "must end in .json"),
        (dict(gpus=1), "--links-of: name a known machine of this device, cuda"),
        (dict(links_of="a100-80gb"), "--links-of: name a known machine of this device, cpu"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes, fault, monkeypatch):
    show_gpus(monkeypatch, changes.pop("gpus", 0))
    with pytest.raises(InputError, match=fault):
        calibrate.run(**{"output": "here.json", **changes})
