"""The whole model: its parameter names and shapes, its logits, and that loss and logits tell the
same story."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.collectives import recorded_collectives
from tests.support.equality import VARIANTS, variant_config
from tests.support.models import (
    BATCH,
    SEQ_LENGTH,
    VOCAB_SIZE,
    build_tiny_model,
    padded_vocab_size,
    sample_tokens,
    tp_state,
)
from tests.support.ranks import run_ranks

H = 32  # tiny_config


@pytest.mark.parametrize("name", VARIANTS)
def test_the_loss_is_torchs_cross_entropy_of_the_logits(name):
    tokens, labels = sample_tokens()
    with tp_state(1) as parallel, torch.no_grad():
        model = build_tiny_model(variant_config(name, moe_input_jitter_eps=None), parallel)
        logits, losses = model(tokens), model.loss(tokens, labels)
    assert logits.shape == (BATCH, SEQ_LENGTH, VOCAB_SIZE) and losses.shape == (BATCH, SEQ_LENGTH)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(
        BATCH, SEQ_LENGTH
    )
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)


def test_padding_rows_never_get_a_gradient():
    for tied in (True, False):
        with tp_state(1) as parallel:
            model = build_tiny_model(
                variant_config("gpt2", untie_embeddings_and_output_weights=not tied), parallel
            )
            model.loss(*sample_tokens()).mean().backward()
            tables = [
                model.embedding.word_embeddings.weight,
                *([] if tied else [model.output_layer.weight]),
            ]
            assert len(tables[0]) == padded_vocab_size(1) > VOCAB_SIZE
            assert not any(table.grad[VOCAB_SIZE:].any() for table in tables)


COLLECTIVES = {  # of one layer: forward, and the same number backward
    # (forward, backward); backward gathers the inputs of the two column layers again
    False: ({"allreduce_": 2}, {"allreduce_": 2}),
    True: (
        {"_allgather_base_": 2, "_reduce_scatter_base_": 2},
        {"_allgather_base_": 4, "_reduce_scatter_base_": 2},
    ),
}


@pytest.mark.runs(daily=1, ci=2)
@pytest.mark.parametrize("sequence_parallel", COLLECTIVES)
def test_a_layer_sends_the_hidden_states_twice_each_way_and_the_loss_never_the_logits(
    sequence_parallel,
):
    """Counted as the difference of a model of 3 layers and one of 2. The largest message is [s, b,
    h]."""

    def work(rank, world_size):
        counts = []
        with tp_state(2) as parallel:
            for num_layers in (2, 3):
                model = build_tiny_model(
                    variant_config("llama", num_layers=num_layers),
                    parallel,
                    sequence_parallel=sequence_parallel,
                )
                with recorded_collectives() as forward:
                    loss = model.loss(*sample_tokens()).mean()
                with recorded_collectives() as backward:
                    loss.backward()
                counts.append((forward, backward))
        return counts

    hidden, per_token = (SEQ_LENGTH, BATCH, H), SEQ_LENGTH * BATCH
    for (fewer_forward, fewer_backward), (forward, backward) in run_ranks(work, 2):
        pairs = ((fewer_forward, forward), (fewer_backward, backward))
        for (fewer, more), expected in zip(pairs, COLLECTIVES[sequence_parallel], strict=True):
            names = [one.name for one in more]
            for one in fewer:
                names.remove(one.name)
            assert {name: names.count(name) for name in names} == expected
        assert {one.shape for one in forward} == {hidden, (per_token,), (2, per_token)}
        assert {one.shape for one in backward} == {hidden}
