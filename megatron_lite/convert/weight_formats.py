"""The interface of every format of weights: one whole tensor at a time, under the names here.

A conversion reads from a WeightSource and writes to a WeightTarget. The tensors in between have the
names, the layout and the unsharded shapes of this project, so that each format needs one mapping,
not one for every other format. Only one tensor is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from megatron_lite.checkpointing.metadata import Progress
from megatron_lite.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Described:
    """Everything about weights but their values.

    model: the shape of the model.
    true_vocab_size: V, without padding.
    tokenizer: the files of the tokenizer; () if the format has none.
    token_ids: the ids of special tokens, as the config.json of Hugging Face names them.
    progress: how far the run had come that saved them; None if the format does not say.
    state_keys: the optimizer states that can be read for every parameter, such as "exp_avg"; () if
        there are none.
    num_updates: how many updates the optimizer had made.
    num_bytes: the bytes of all weights and states, for the progress bar; None if they are not known
        before they are read.
    notes: what is not taken over, in words for the user.
    """

    model: ModelConfig
    true_vocab_size: int
    tokenizer: tuple[Path, ...] = ()
    token_ids: Mapping[str, Any] = field(default_factory=dict)
    progress: Progress | None = None
    state_keys: tuple[str, ...] = ()
    num_updates: int = 0
    num_bytes: int | None = None
    notes: tuple[str, ...] = ()


class WeightSource(Protocol):
    """Weights that can be read. Opening one reads no tensor."""

    @property
    def described(self) -> Described:
        """Everything about the weights but their values."""

    def read(self, name: str) -> Tensor:
        """Returns one parameter of this project, whole and without vocabulary padding, on the CPU.

        name: as in a model's `named_parameters()`, such as
            "decoder.layers.3.self_attention.linear_qkv.weight", with the layer's number in the
            whole model.
        Raises InputError if the tensor is missing or has another shape; it names tensor and shapes.
        """

    def read_state(self, name: str, key: str) -> Tensor:
        """Returns one optimizer state of a parameter, with the parameter's shape, in float32.

        key: one of `described.state_keys`; "master" is the float32 weight.
        """


class WeightTarget(Protocol):
    """A place to which weights are written."""

    def write(self, source: WeightSource, advance: Callable[[int], None]) -> None:
        """Writes all that the source has. The target appears complete, or not at all.

        advance: called with the number of bytes after each tensor, for the progress bar.
        """
