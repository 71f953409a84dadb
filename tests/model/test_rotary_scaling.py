"""Scaled rotary embeddings: the tables of transformers and of megatron-core, bit for bit."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from megatron_lite.config.model import RotaryScaling
from megatron_lite.model.rotary import rotary_tables

LENGTH, CHANNELS, BASE = 300, 64, 500000
SCALINGS = [
    RotaryScaling(),
    RotaryScaling(frequency_factor=8.0),
    RotaryScaling(frequency_factor=32.0),
    RotaryScaling(position_factor=3),
    RotaryScaling(frequency_factor=2.5, position_factor=4),
]


def cosines(scaling: RotaryScaling, length: int = LENGTH) -> Tensor:
    tables = rotary_tables(
        length, CHANNELS, BASE, device=torch.device("cpu"), dtype=torch.float32, scaling=scaling
    )
    return tables.cos[:, 0, 0, : CHANNELS // 2]


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_scaled_frequencies_equal_those_of_transformers(factor: float) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        head_dim=CHANNELS,
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=float(BASE),
            factor=factor,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / BASE ** (torch.arange(0, CHANNELS, 2) / CHANNELS)
    shares = frequencies / plain
    assert shares.min() < 1.001 / factor and shares.max() == 1.0
    assert ((shares > 1.001 / factor) & (shares < 0.999)).any(), "no frequency lies between"
    angles = torch.outer(torch.arange(LENGTH, dtype=torch.float32), frequencies)
    assert torch.equal(cosines(RotaryScaling(frequency_factor=factor)), angles.cos())


@pytest.mark.parametrize("scaling", SCALINGS)
def test_tables_equal_those_of_megatron_core(scaling: RotaryScaling) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of each GPU library that is not there
        pytest.importorskip("megatron.core")
        from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    theirs = RotaryEmbedding(
        CHANNELS,
        1.0,
        rotary_base=BASE,
        seq_len_interpolation_factor=scaling.position_factor,  # type: ignore[arg-type]
        rope_scaling=scaling.frequency_factor is not None,
        rope_scaling_factor=scaling.frequency_factor or 8.0,
        use_cpu_initialization=True,
    )
    assert torch.equal(cosines(scaling), theirs.get_freqs_non_repeated(LENGTH).cos())


def test_positions_divided_by_four_hit_those_of_an_unscaled_table() -> None:
    assert torch.equal(
        cosines(RotaryScaling(position_factor=4))[::4], cosines(RotaryScaling(), LENGTH // 4)
    )
