"""benchmarks/recompute.py: one model in every row, with bytes and FLOPs that can be checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import recompute
from benchmarks.engines import PRESETS
from megatron_lite.config.model import ModelConfig
from megatron_lite.memory.predict.flops import forward_flops

pytestmark = pytest.mark.long


@pytest.mark.slow
def test_every_engine_trains_the_same_model_and_units_cost_a_forward(tmp_path: Path) -> None:
    """A checkpoint that drops gradients would look fast. With dropout torch's own replays draw
    other attention masks."""
    file = tmp_path / "new" / "report.json"
    words = "--device cpu --preset tiny --dtype float32 --repeats 1 --threads 1 --json"
    assert recompute.main([*words.split(), str(file)]) == 0
    report = json.loads(file.read_text())
    shape = PRESETS["tiny"]
    layers = forward_flops(
        ModelConfig(
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            max_position_embeddings=shape.seq_length,
            num_attention_heads=shape.num_attention_heads,
        ),
        batch=shape.batch_size,
        seq_length=shape.seq_length,
        padded_vocab_size=0,
    )
    hidden = 4 * shape.seq_length * shape.batch_size * shape.hidden_size
    for dropout in (0.0, 0.1):
        rows: dict[str, dict[str, Any]] = {
            row["engine"]: row for row in report["rows"] if row["dropout"] == dropout
        }
        known = recompute.engine_names(shape.num_layers)
        assert known == {*rows, *(name for name in known if name.endswith("@host"))}
        for name, row in rows.items():
            base = rows["transformers, none" if name.startswith("transformers") else "none"]
            assert row["loss"] == base["loss"], name
            if dropout == 0.0 or not name.startswith("torch"):
                assert row["grad_norm"] == pytest.approx(base["grad_norm"], rel=1e-4), name
            assert row["peak_bytes"] > row["kept_bytes"] and row["ms"] > 0.0
        for name in ("uniform 1, no tail skip", "torch layers, reentrant"):
            assert rows[name]["flops"] - rows["none"]["flops"] == layers
        # Two units instead of one keep one more input, and one state of each random stream.
        more = rows["uniform 1"]["kept_bytes"] - rows["uniform 2"]["kept_bytes"]
        assert hidden <= more <= hidden + 3 * 5056


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--clock", "cpu"], "needs --threads 1"),
        (["--engines", "uniform 9"], "--engines 'uniform 9' must be one of "),
    ],
)
def test_settings_that_cannot_be_measured_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as ended:
        recompute.parse(["--device", "cpu", *arguments])
    assert ended.value.code == 2 and message in capsys.readouterr().err
