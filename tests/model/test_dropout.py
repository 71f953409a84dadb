"""Dropout: which stream each mask comes from, one byte per element, the right statistics, and
nothing at evaluation."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from megatron_lite.model import dropout as module
from megatron_lite.model.dropout import dropout, keep_mask, keep_scale
from megatron_lite.parallel.rng import DEFAULT, RngStreams
from tests.parallel.test_rng import _generator_is_put_back  # noqa: F401
from tests.support.equality import variant_config
from tests.support.models import build_tiny_model, on_ranks, sample_tokens, tp_state
from tests.support.saves import same

CPU = torch.device("cpu")


def model_with_dropout(parallel, *, sequence_parallel=False, **overrides):
    config = variant_config(
        "gpt2",
        **dict(hidden_dropout=0.5, attention_dropout=0.5, attention_backend="auto") | overrides,
    )
    return build_tiny_model(
        config, parallel, sequence_parallel=sequence_parallel, dtype=torch.float32
    )


@contextmanager
def recorded_masks():
    """Yields the masks that are drawn on the CPU in the block. True keeps the element.

    residual: [s, b, h], or [s/t, b, h] under sequence parallelism. attention: [b a/t, s, s].
    """
    masks = SimpleNamespace(residual=[], attention=[])

    def recording(numbers, shape, probability):
        mask = keep_mask(numbers, shape, probability)
        (masks.attention if shape[-1] == shape[-2] else masks.residual).append(mask.clone())
        return mask

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "keep_mask", recording)
        yield masks


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_share_residual_masks_if_they_hold_the_same_tokens_and_never_attention_masks(
    sequence_parallel,
):
    """A well-known engine entered the wrong stream for 17 months unnoticed: its tests compared
    shapes."""

    def work(parallel):
        with recorded_masks() as masks:
            model_with_dropout(
                parallel, sequence_parallel=sequence_parallel, attention_backend="unfused"
            )(*sample_tokens())
        return masks

    first, second = on_ranks(work, 2, tp_size=2)
    # embedding, and per layer attention and MLP; per layer one
    assert len(first.residual) == 5 and len(first.attention) == 2
    for mine, other in zip(first.residual, second.residual, strict=True):
        assert torch.equal(mine, other) != sequence_parallel  # ranks hold equal or own tokens
    for mine, other in zip(first.attention, second.attention, strict=True):
        assert not torch.equal(mine, other)  # each rank has its own heads


@pytest.mark.parametrize("backend", ["flash", "unfused", "auto"])
def test_evaluation_draws_nothing_and_drops_nothing(backend):
    with tp_state(1) as parallel, torch.no_grad():
        model = model_with_dropout(parallel, attention_backend=backend).eval()
        before = parallel.rng.snapshot().states
        with recorded_masks() as masks:
            logits = model(sample_tokens()[0])
        after = parallel.rng.snapshot().states
        plain = model_with_dropout(
            parallel, hidden_dropout=0.0, attention_dropout=0.0, attention_backend=backend
        )
        assert torch.equal(logits, plain(sample_tokens()[0]))
    assert same(before, after)
    assert masks.residual == masks.attention == []


@pytest.mark.parametrize("probability", [2.0**-16, 0.1, 0.5, 0.999999])
def test_the_share_of_dropped_elements_is_p_to_16_bits_and_the_scale_is_its_own(probability):
    """Exactly, over all 2^16 numbers that an element may be given."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    mask = keep_mask(every, torch.Size([2**8, 2**8]), probability)
    dropped = min(round(probability * 2**16), 2**16 - 1)
    assert int((~mask).sum()) == dropped
    assert keep_scale(probability, CPU) == 2**16 / (2**16 - dropped)


def test_the_gradient_passes_through_the_same_mask():
    ones = torch.ones(30, 40, requires_grad=True)
    output = dropout(ones, 0.3, RngStreams(CPU, seed=1), DEFAULT)
    output.backward(torch.full_like(output, 2.0))
    assert torch.equal(ones.grad, 2.0 * output.detach())
