"""A conversion holds one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_lite.config.model import ModelConfig
from megatron_lite.convert.hf_source import HfSource
from megatron_lite.convert.hf_target import HfTarget
from megatron_lite.convert.native_source import NativeSource
from megatron_lite.convert.native_target import NativeTarget
from megatron_lite.convert.parameters import parameter_specs
from megatron_lite.convert.weight_formats import Described, WeightSource, WeightTarget

MIB = 2**20
MODEL = ModelConfig(
    num_layers=24,
    hidden_size=256,
    num_attention_heads=8,
    ffn_hidden_size=512,
    max_position_embeddings=64,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)


class Ones:
    """A source of 60 MiB, whose largest tensor has 1 MiB."""

    def __init__(self, model: ModelConfig = MODEL) -> None:
        self._specs = parameter_specs(model, 512)
        self.described = Described(model=model, true_vocab_size=512)

    def read(self, name: str) -> Tensor:
        return torch.ones(self._specs[name].global_shape)

    def read_state(self, name: str, key: str) -> Tensor:
        raise AssertionError


def anonymous_bytes() -> int:
    """Returns the memory of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":") for line in lines)
    return int(fields["RssAnon"].split()[0]) * 1024


def peak_bytes(source: Callable[[], WeightSource], target: WeightTarget) -> int:
    """Returns by how much the process grew while it converted."""
    before, most = anonymous_bytes(), 0

    def advance(num_bytes: int) -> None:
        nonlocal most
        most = max(most, anonymous_bytes())

    target.write(source(), advance)
    return most - before


def test_the_peak_is_a_few_tensors_and_not_the_model(tmp_path: Path) -> None:
    """The tensor as it was read, its parts, and their copies: less than 8 times 1 MiB."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    # The first conversion of a process loads parts of torch, which stay.
    HfTarget(tmp_path / "first").write(Ones(replace(MODEL, num_layers=1)), lambda _: None)
    peaks = [
        peak_bytes(Ones, HfTarget(theirs)),
        peak_bytes(lambda: HfSource(theirs), NativeTarget(ours, tp_size=2, pp_size=2)),
        peak_bytes(lambda: NativeSource(ours), HfTarget(tmp_path / "again")),
    ]
    written = sum(path.stat().st_size for path in theirs.glob("*.safetensors"))
    assert written > 60 * MIB, written
    assert max(peaks) < 8 * MIB, [peak / MIB for peak in peaks]
