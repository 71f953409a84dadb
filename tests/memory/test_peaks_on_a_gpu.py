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
from megatron_lite.description.sizes import Shape, Sizes, allocated
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
    peak = step_peak(config_of(row), 0, device="cuda", dp_cp_size=1)
    assert LOWEST < peak.num_bytes / GIB / row["peak_gib"] - 1.0 < HIGHEST, peak


@pytest.mark.parametrize("row", MEASURED["rows"], ids=lambda row: row["name"])
def test_the_kept_bytes_are_the_measured_ones(row):
    config = config_of(row)
    stage = whole_model(config.model.num_layers)
    plan = plan_stage(config.recompute, stage.num_layers)
    sizes = Sizes.of(config, device="cuda", stage=stage)
    assert activation_bytes(config.model, plan, sizes) == row["kept_bytes"]


@pytest.mark.parametrize(
    ("num_bytes", "on_cuda"),
    [
        (9 * MIB + 1, 9 * MIB + 1),  # below 10 MiB a block is cut from a larger one
        (11 * MIB, 12 * MIB),
        (11 * MIB - 1, 11 * MIB - 1),  # the rest is above 1 MiB, and is split off
        (12 * MIB, 12 * MIB),
    ],
)
def test_large_blocks_are_rounded_up_where_the_rest_is_small(num_bytes, on_cuda):
    assert allocated(num_bytes, "cuda") == on_cuda
    assert allocated(num_bytes, "cpu") == num_bytes


@pytest.mark.usefixtures("earlier_kernels")
@pytest.mark.parametrize(
    ("device", "element_bytes", "is_float16", "blocks"),
    [("cuda", 2, False, 2), ("cuda", 2, True, 1), ("cuda", 4, False, 1), ("cpu", 2, True, 2)],
)
def test_a_softmax_casts_its_rows_first_except_float16_on_cuda(
    device, element_bytes, is_float16, blocks
):
    shape = Sizes(
        micro_batch_size=1,
        seq_length=8,
        padded_vocab_size=64,
        device=device,
        element_bytes=element_bytes,
        is_float16=is_float16,
    )
    model = ModelConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, max_position_embeddings=8
    )
    assert loss_blocks(Shape(model, shape), 8, 64) == blocks * 8 * 64 * 4
