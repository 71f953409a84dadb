"""The predicted memory against what one H100 held: h100_peaks.json, and facts that it taught.

The file tells the card, torch and the day. Predictions are made on any machine. The rows were
measured when products rounded weight gradients and the loss had blocks of rows on CUDA, so they are
predicted that way.
"""

import json
from pathlib import Path

import pytest

from arguments import parse_args
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.stages import whole_model
from megatron_lite.description import sizes
from megatron_lite.description.model_ends import loss_blocks
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.predict.kept_tensors import activation_bytes
from megatron_lite.memory.predict.step_peak import step_peak
from megatron_lite.recompute.schedule import plan_stage

MEASURED = json.loads(Path(__file__).with_name("h100_peaks.json").read_text())
ROWS = [*MEASURED["rows"], *MEASURED["early"]]
GIB, MIB = 2.0**30, 2**20
LOWEST, HIGHEST = -0.003, 0.01


@pytest.fixture
def earlier_kernels(monkeypatch):
    monkeypatch.setattr(sizes, "has_gradient_tensor", lambda device: True)


def config_of(row):
    flags = [*row["flags"].split(), "--mock-data", "--lr", "1e-4", "--no-torch-compile"]
    return parse_args(flags).config


@pytest.mark.usefixtures("earlier_kernels")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_the_peak_of_a_step_is_the_measured_one(row):
    peak = step_peak(config_of(row), 0, device="cuda")
    predicted = peak.num_bytes / GIB + row.get("copied_gib", 0)
    assert LOWEST < predicted / row["peak_gib"] - 1.0 < HIGHEST, peak


@pytest.mark.parametrize("row", MEASURED["rows"], ids=lambda row: row["name"])
def test_the_kept_bytes_are_the_measured_ones(row):
    config = config_of(row)
    stage = whole_model(config.model.num_layers)
    plan = plan_stage(config.recompute, stage.num_layers)
    assert activation_bytes(plan, Sizes.of(config, device="cuda", stage=stage)) == row["kept_bytes"]


@pytest.mark.usefixtures("earlier_kernels")
@pytest.mark.parametrize("device, blocks", [("cuda", 1), ("cpu", 2)])
def test_a_softmax_casts_its_float16_rows_first_on_a_cpu(device, blocks):
    model = ModelConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, max_position_embeddings=8
    )
    shape = Sizes(
        model=model,
        micro_batch_size=1,
        seq_length=8,
        padded_vocab_size=64,
        device=device,
        element_bytes=2,
        is_float16=True,
    )
    assert loss_blocks(shape, 8, 64) == blocks * 8 * 64 * 4
