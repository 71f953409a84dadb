"""Records the dropout masks that each TP rank draws in a forward, and checks which are equal."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from megatron_lite.model import dropout
from tests.support.equality import variant_config
from tests.support.models import build_tiny_model, sample_tokens


@dataclass
class Masks:
    """The dropout masks in the order in which they were drawn. True keeps the element.

    residual: [s, b, h], or [s/t, b, h] under sequence parallelism.
    attention: [b a/t, s, s].
    """

    residual: list[Tensor] = field(default_factory=list)
    attention: list[Tensor] = field(default_factory=list)


@contextmanager
def recorded_masks():
    """Yields the list of masks, to which every mask drawn on the CPU in the block is added."""
    masks, drawn = Masks(), dropout.keep_mask

    def recording(numbers, shape, probability):
        mask = drawn(numbers, shape, probability)
        (masks.attention if shape[-1] == shape[-2] else masks.residual).append(mask.clone())
        return mask

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dropout, "keep_mask", recording)
        yield masks


def masks_of_one_forward(parallel, *, sequence_parallel):
    """Returns this rank's masks of a forward of a two-layer GPT-2 with dropout 0.5."""
    config = variant_config(
        "gpt2", hidden_dropout=0.5, attention_dropout=0.5, attention_backend="unfused"
    )
    model = build_tiny_model(
        config, parallel, sequence_parallel=sequence_parallel, dtype=torch.float32
    )
    with recorded_masks() as masks:
        model.loss(*sample_tokens())
    return masks


def mask_faults(first, second, *, sequence_parallel):
    """Returns the kinds of masks that are wrong between two TP ranks: "residual", "attention".

    Residual masks must be equal, or under sequence parallelism different. Attention masks must be
    different.
    """
    faults = set()
    for mine, other in zip(first.residual, second.residual, strict=True):
        if torch.equal(mine, other) == sequence_parallel:  # ranks hold equal or own tokens
            faults.add("residual")
    for mine, other in zip(first.attention, second.attention, strict=True):
        if torch.equal(mine, other):  # each rank has its own heads
            faults.add("attention")
    return faults
