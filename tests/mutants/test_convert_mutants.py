"""Faults in the mapping of Hugging Face's models and in the files of a conversion are seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.config.model import ModelConfig
from megatron_lite.convert import hf, target
from tests.convert import test_safetensors_file as files
from tests.model import test_transformers_parity as parity
from tests.support.changes import with_fields
from tests.support.mutants import Fault, Mutant, each_is_seen, replaces

pytest.importorskip("transformers")


def joined_by(name: str, join: Callable[[Sequence[Tensor], ModelConfig], Tensor]) -> Fault:
    """Returns a fault of how a layout joins its parts.

    A round trip does not see such a fault if the other direction has it too.
    """

    @replaces(name, hf.LAYOUTS)
    def fault(layout: Any) -> Any:
        return with_fields(layout, join=join)

    fault.__name__ = f"{name} is joined wrongly"
    return fault


@replaces("ALIGNMENT", target)
def tensors_begin_anywhere(_):
    return 1


def parity_of(name: str) -> dict[str, object]:
    return dict(name=name, dtype=torch.float32, tolerance=1e-5)


MUTANTS = (
    Mutant(
        joined_by("by group", lambda parts, _: torch.cat(list(parts))),
        parity.test_logits_loss_and_gradients_equal_those_of_transformers,
        parity_of("llama"),
    ),
    Mutant(
        joined_by("stacked", lambda parts, _: torch.cat(list(parts)[::-1])),
        parity.test_logits_loss_and_gradients_equal_those_of_transformers,
        parity_of("qwen3"),
    ),
    Mutant(
        joined_by("by expert", lambda parts, _: torch.stack(list(parts)[::-1])),
        parity.test_logits_loss_and_gradients_equal_those_of_transformers,
        parity_of("mixtral"),
    ),
    Mutant(
        joined_by("fused", lambda parts, _: parts[0]),
        parity.test_logits_loss_and_gradients_equal_those_of_transformers,
        parity_of("phi3"),
    ),
    Mutant(tensors_begin_anywhere, files.test_any_order_of_dtypes_is_read_back_bit_for_bit),
)


test_is_seen = each_is_seen(MUTANTS)
