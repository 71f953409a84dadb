"""Each benchmark runs, and its rows have what can be checked without a clock."""

import json
import math

import pytest

from benchmarks import budgets, recompute, step_time

pytestmark = pytest.mark.long
FULL, TORCH = "uniform 1, no tail skip", "torch layers, reentrant"
TINY = "--device cpu --preset tiny --dtype float32 --threads 1 --repeats 1"


def report(module, words, folder):
    file = folder / "new" / "report.json"
    words = words.split() if isinstance(words, str) else words
    assert module.main([*words, "--json", str(file)]) == 0
    return json.loads(file.read_text())["rows"]


@pytest.mark.runs(daily=0, ci=1)
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3_moe"])
def test_every_contestant_of_a_step_has_the_same_loss(family, tmp_path):
    rows = report(step_time, f"{TINY} --dropout 0 --family {family}", tmp_path)
    names = [row["name"] for row in rows]
    assert names[0] == "ours, none" and {"ours, full", "transformers, full"} <= {*names}
    for row in rows:
        assert row["loss"] == pytest.approx(rows[0]["loss"], rel=1e-4), row["name"]
    assert abs(rows[0]["loss"] - math.log(256)) < 0.3  # a guess among the vocabulary's 256 ids


def test_engines_train_the_same_model(tmp_path):
    """A checkpoint that drops gradients would look fast."""
    engines = (
        *(FULL, "every-2:full, else pointwise", TORCH, "torch mlp, non-reentrant"),
        *("transformers, reentrant", "transformers, non-reentrant"),
    )
    words = [*TINY.split(), "--dropout", "0", "--engines", *engines]
    found = report(recompute, words, tmp_path)
    assert {row["engine"] for row in found} == {*engines, "none", "transformers, none"}
    rows = {row["engine"]: row for row in found}
    for name, row in rows.items():
        base = rows["transformers, none" if name.startswith("transformers") else "none"]
        assert row["loss"] == base["loss"], name
        assert row["grad_norm"] == pytest.approx(base["grad_norm"], rel=1e-4), name


@pytest.mark.weekly
def test_budgets_are_kept_beside_what_else_a_user_can_set(tmp_path, capsys):
    picture = tmp_path / "budgets.svg"
    words = ["--models", "Qwen3", "--repeats", "1", "--device", "cpu", "--picture", str(picture)]
    assert budgets.main(words) == 0  # it compares losses, and peaks with their budgets
    assert capsys.readouterr().out.count("| Qwen3 ") == 14
    assert picture.read_text().startswith("<?xml")
