"""A name that is added to the choices of a flag, and nowhere else, is an error where it is built,
priced and counted: it never passes for one of the older choices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from megatron_lite.config import data_settings, optimizer_settings
from megatron_lite.config import model as model_config
from megatron_lite.config.model import ModelConfig
from megatron_lite.context_parallel.sharded_attention import EXCHANGES
from megatron_lite.data.tokenizers import TOKENIZERS
from megatron_lite.description.sizes import ELEMENT_BYTES, Sizes
from megatron_lite.memory.explain.recompute_report import likely_device
from megatron_lite.memory.predict.flops import step_flops
from megatron_lite.memory.predict.kept_tensors import activation_terms
from megatron_lite.memory.predict.states import parameter_count
from megatron_lite.model.norm import NORMS
from megatron_lite.optim.lr_schedule import DECAYS
from megatron_lite.recompute.recompute_plan import keep_everything
from tests.support.models import build_tiny_model, tiny_config, tp_state

NEW = "Newest"
SIZES = Sizes(
    micro_batch_size=2, seq_length=6, padded_vocab_size=72, tp_size=1, device="cpu", element_bytes=4
)


def build(config: ModelConfig) -> None:
    with tp_state(1) as parallel:
        build_tiny_model(config, parallel)


READERS: dict[str, Callable[[ModelConfig], Any]] = {
    "the model": build,
    "its parameters": lambda config: parameter_count(config, 72),
    "its memory": lambda config: activation_terms(
        config, keep_everything(config.num_layers), SIZES
    ),
    "its FLOPs": lambda config: step_flops(config, batch=2, seq_length=6, padded_vocab_size=72),
}
CHOICES = {  # field: the readers for whom its choices make a difference
    "normalization": ("the model", "its parameters", "its memory"),
    "position_embedding_type": ("the model", "its parameters", "its memory"),
    "attention_backend": ("the model", "its memory"),
}


def add_choice(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """The field accepts a choice that nobody has written code for."""
    field = next(one for one in fields(owner) if one.name == name)
    facts = field.metadata["setting"]
    new = facts._replace(choices=(*facts.choices, NEW))
    monkeypatch.setattr(field, "metadata", {"setting": new})


@pytest.mark.parametrize(
    ("field", "reader"),
    [(field, reader) for field, readers in CHOICES.items() for reader in readers],
)
def test_a_new_choice_of_the_model_is_an_error_for_every_reader(
    field: str, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_choice(monkeypatch, ModelConfig, field)
    flag = "--" + field.replace("_", "-")
    with pytest.raises(
        ValueError, match=f"^{flag} {NEW} is not implemented here, only .*: choose one of them"
    ):
        READERS[reader](tiny_config(**{field: NEW}))


def test_the_device_of_an_unknown_backend_is_not_guessed() -> None:
    with pytest.raises(ValueError, match=NEW):
        likely_device(NEW)


def test_every_choice_has_an_entry_in_every_table() -> None:
    assert model_config.NORM_VECTORS.keys() == NORMS.keys()
    assert set(data_settings.TOKENIZER_TYPES) == TOKENIZERS.keys()
    assert set(optimizer_settings.WSD_DECAY_STYLES) <= DECAYS.keys()
    assert set(optimizer_settings.LR_DECAY_STYLES) <= {
        *DECAYS,
        "constant",
        "inverse-square-root",
        "WSD",
    }
    assert {"p2p", "allgather"} == EXCHANGES.keys() and {
        "fp32",
        "bf16",
        "fp16",
    } == ELEMENT_BYTES.keys()
