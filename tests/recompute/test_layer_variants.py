"""Layers with a parallel residual or with norms after attention and the MLP: no policy changes a
bit."""

from __future__ import annotations

import pytest
import torch

from megatron_lite.config.regions import LAYERNORM, MLP_REGION
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.transformer_layer import describe_layer
from tests.recompute.test_equality import check, policies
from tests.support.equality import variant_config

VARIANTS = ("olmo", "pythia")
# One of each kind: units, split units, regions, operators, host memory, and a verified replay.
IN_EVERY_RUN = {
    "uniform 2",
    "uniform 2 split",
    "core_attn+layernorm+mlp",
    "pointwise, verified",
    "*:ops(matmul/2,attention,collective)",
    "0:full/2; 1:none; *:ops(matmul)@host",
}


def chosen(*, every: bool, can_split: bool) -> list[str]:
    return [name for name in policies(can_split=can_split) if every or name in IN_EVERY_RUN]


@pytest.mark.runs(daily=1, ci=2)
@pytest.mark.parametrize(
    ("tp_size", "sequence_parallel", "precision", "every"),
    [
        (1, False, torch.bfloat16, False),
        (2, True, torch.float32, False),
        pytest.param(1, False, torch.bfloat16, True, marks=pytest.mark.long),
        pytest.param(2, True, torch.float32, True, marks=pytest.mark.long),
        pytest.param(2, False, torch.float32, True, marks=pytest.mark.long),
    ],
)
def test_gradients_are_unchanged_to_the_bit(
    tp_size: int, sequence_parallel: bool, precision: torch.dtype, every: bool
) -> None:
    models = {
        name: variant_config(name, num_layers=5, hidden_dropout=0.1, attention_dropout=0.1)
        for name in VARIANTS
    }
    names = chosen(every=every, can_split=tp_size > 1 and not sequence_parallel)
    assert len(names) > 4
    if every:  # each policy on one of the two by turns, and on the other one in the next layout
        first = VARIANTS if sequence_parallel else VARIANTS[::-1]
        of_models = {name: names[turn::2] for turn, name in enumerate(first)}
    else:
        of_models = dict.fromkeys(models, names)
    check(tp_size, sequence_parallel, precision, of_models, models)


def test_no_replay_leaves_out_a_matmul_whose_result_a_norm_reads() -> None:
    sizes = Sizes(micro_batch_size=2, seq_length=6, padded_vocab_size=72)
    after = describe_layer(variant_config("olmo"), sizes)
    assert after.tail() == after.tail(MLP_REGION) == frozenset()
    assert not any(LAYERNORM in one.regions for one in after.operations)
    before = describe_layer(variant_config("pythia"), sizes)
    assert {name for name, _ in before.tail()} == {"linear_fc2"}
