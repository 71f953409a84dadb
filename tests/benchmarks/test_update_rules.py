"""benchmarks/update_rules.py: every rule has its row, and both sides of the row called muon make
the same update."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import update_rules
from benchmarks.engines import PRESETS, Setting
from benchmarks.update_rules import MUON, RULES, main
from megatron_lite.parallel.parameter_spec import spec_of


def test_every_rule_has_its_row_and_times_of_every_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "rules.json"
    assert main(["--device", "cpu", "--preset", "tiny", "--repeats", "2", "--json", str(file)]) == 0
    rows = {row["rule"]: row for row in json.loads(file.read_text())["rows"]}
    assert list(rows) == list(RULES) and len(capsys.readouterr().out.splitlines()) == 3 + len(rows)
    for row in rows.values():
        assert (
            len(row["samples_ms"]) == len(row["torch_samples_ms"]) == 2
            and min(row["samples_ms"]) > 0.0
        )
        assert row["time_ratio"][1] <= row["time_ratio"][0] <= row["time_ratio"][2]


def test_both_sides_of_muon_make_the_same_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are clipped by norms that are summed in another order: a bfloat16 direction may
    be rounded the other way."""
    setting, models = (
        Setting(shape=PRESETS["tiny"], device=torch.device("cpu"), dtype="float32", dropout=0.0),
        [],
    )
    real = update_rules.model_with_gradients
    monkeypatch.setattr(
        update_rules,
        "model_with_gradients",
        lambda setting: models.append(real(setting)) or models[-1],
    )
    for step in (update_rules.our_step(setting, MUON), update_rules.torch_step(setting, muon=True)):
        step()
    start = {name: value.detach() for name, value in real(setting).named_parameters()}
    ours, theirs = (dict(model.named_parameters()) for model in models)
    matrices = [name for name, value in ours.items() if spec_of(value).matrices]
    assert len(matrices) == 8
    for name in matrices:
        mine, other = ours[name].detach() - start[name], theirs[name].detach() - start[name]
        assert (mine - other).norm() < 0.02 * other.norm(), name


def test_what_has_no_meaning_for_an_optimizer_step_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--dtype", "bf16"])
    assert (
        caught.value.code == 2
        and "leave --dtype, --dropout and --profile out" in capsys.readouterr().err
    )
