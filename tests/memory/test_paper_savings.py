"""The savings that arXiv 2205.05198 reports for selective recomputation, from the description."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lite.config.known_models import preset
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.predict.kept_tensors import activation_terms
from megatron_lite.recompute.schedule import plan_stage

SEQ_LENGTH, VOCAB = 2048, 51200
SELECTIVE = RecomputeConfig(
    recompute_granularity="selective",
    recompute_modules=("core_attn",),
    recompute_tail_skip=False,  # the paper's replays do all of attention
)


def model_of(name: str) -> ModelConfig:
    fields: dict[str, Any] = {**preset(name).fields, "attention_backend": "unfused"}
    return ModelConfig(**fields)


def paper_bytes(model: ModelConfig, recompute: RecomputeConfig) -> int:
    """Returns the bytes of one layer that the paper counts, on one of 8 sequence-parallel ranks."""
    sizes = Sizes(
        micro_batch_size=1,
        seq_length=SEQ_LENGTH,
        padded_vocab_size=VOCAB,
        tp_size=8,
        sequence_parallel=True,
        element_bytes=2,
        device="cuda",
        has_embedding=False,
        has_head=False,
    )
    terms = activation_terms(model, plan_stage(recompute, 1), sizes)
    others = ("statistics", "RNG state")  # which the paper does not count
    return sum(
        term.num_bytes for term in terms if not any(name in term.tensor.name for name in others)
    )


@pytest.mark.parametrize(("name", "saved"), [("175b", 0.70), ("530b", 0.65)])
def test_selective_recomputation_saves_the_share_of_the_activations_that_the_paper_reports(
    name: str, saved: float
) -> None:
    model = model_of(name)
    whole, selective = paper_bytes(model, RecomputeConfig()), paper_bytes(model, SELECTIVE)
    sbh = SEQ_LENGTH * model.hidden_size
    scores = 5 * model.num_attention_heads * SEQ_LENGTH / model.hidden_size
    assert whole == sbh * (34 + scores) / 8 and selective == sbh * 34 / 8  # table 2
    assert 1 - selective / whole == pytest.approx(saved, abs=0.005)
