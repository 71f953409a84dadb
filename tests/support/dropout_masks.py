"""Which dropout masks each TP rank drew in one forward pass, and whether that is what the parallelism asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from megatron_lite.model import dropout
from megatron_lite.parallel.state import ParallelState
from tests.support.equality import variant_config
from tests.support.models import build_tiny_model, sample_tokens


@dataclass
class Masks:
    """In order of drawing. residual: [s, b, h] or [s/t, b, h]; attention: [b a/t, s, s]. True keeps the element."""

    residual: list[Tensor] = field(default_factory=list)
    attention: list[Tensor] = field(default_factory=list)


@contextmanager
def recorded_masks() -> Iterator[Masks]:
    """Collects every mask drawn on the CPU inside the block."""
    masks, draw = Masks(), dropout.draw_keep_mask

    def recording(shape: torch.Size, probability: float) -> dropout.KeepMask:
        drawn = draw(shape, probability)
        (masks.attention if shape[-1] == shape[-2] else masks.residual).append(drawn.mask.clone())
        return drawn

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dropout, "draw_keep_mask", recording)
        yield masks


def masks_of_one_forward(parallel: ParallelState, *, sequence_parallel: bool) -> Masks:
    """The masks of a two-layer GPT-2 with dropout 0.5 on this rank."""
    config = variant_config("gpt2", hidden_dropout=0.5, attention_dropout=0.5, attention_backend="unfused")
    model = build_tiny_model(config, parallel, sequence_parallel=sequence_parallel, dtype=torch.float32)
    with recorded_masks() as masks:
        model.loss(*sample_tokens())
    return masks


def mask_faults(first: Masks, second: Masks, *, sequence_parallel: bool) -> set[str]:
    """What is wrong with the masks of two TP ranks: "residual", "attention", or both; empty where all is well."""
    faults = set()
    for mine, other in zip(first.residual, second.residual, strict=True):
        if torch.equal(mine, other) == sequence_parallel:  # the same tokens on each rank, or each its own
            faults.add("residual")
    for mine, other in zip(first.attention, second.attention, strict=True):
        if torch.equal(mine, other):  # each rank has its own heads
            faults.add("attention")
    return faults
