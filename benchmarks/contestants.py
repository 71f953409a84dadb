"""The contestants of smoke.py and gpu_step.py: one model on one rank, built by several libraries.

Two models: "gpt" has learned positions, LayerNorm, biases, gelu and tied embeddings; "llama" has
rotary positions, RMSNorm, swiglu, no biases and an output layer of its own. All contestants of a
model have the weights of ours, so their losses are equal up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import contestant_peers as others
from benchmarks.contestant_peers import Contestant
from benchmarks.engines import Setting, one_rank, our_model, our_optimizer
from benchmarks.peer_engines import transformers_gpt2
from benchmarks.recompute_engines import policies
from megatron_lite.config.checks import InputError
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.parallel import DataParallelConfig
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.model.gpt import GPTModel, ModelStages
from megatron_lite.parallel.compiled import CompiledKernels
from megatron_lite.recompute.schedule import plan_stage
from megatron_lite.training.step import StageRunner

OURS, LOSS_CHUNKS, COMPILED = "ours, none", "ours, none, loss chunks", "ours, compiled"
PLAIN = "plain torch, none"
OUR_POLICIES = {
    "none": "none",
    "full": "uniform 1",
    "core_attn": "core_attn",
    "pointwise": "*:pointwise",
}
CHUNKS = 4  # of the tokens of a micro-batch, in the row LOSS_CHUNKS
LIBRARIES = {"gpt": ("plain", "transformers"), "llama": ("transformers", "litgpt")}


class LlamaSetting(Setting):
    """The setting of the Llama model."""

    def model_config(self) -> ModelConfig:
        return replace(
            super().model_config(),
            normalization="RMSNorm",
            swiglu=True,
            position_embedding_type="rope",
            add_bias_linear=False,
            untie_embeddings_and_output_weights=True,
            ffn_hidden_size=self.ffn_size,
        )

    @property
    def ffn_size(self) -> int:
        """The width of the MLP: 8/3 of the hidden size, in multiples of 64."""
        return -(-8 * self.shape.hidden_size // (3 * 64)) * 64


def build_contestants(
    family: str, setting: Setting, *, peers: Sequence[str], compiled: bool = False
) -> tuple[list[Contestant], dict[str, str]]:
    """Returns the contestants, ours without recomputation first, and who is left out and why.

    peers: the libraries to compare with, if they have the model (LIBRARIES).
    compiled: whether torch.compile's contestants are built too.
    """
    model = our_model(setting, one_rank(setting))
    weights = {name: one.detach() for name, one in model.named_parameters()}
    found = list(_ours(model, setting, [f"ours, {name}" for name in OUR_POLICIES] + [LOSS_CHUNKS]))
    canonical = others.canonical(weights, setting, family)
    skipped: dict[str, str] = {}
    for library in (one for one in LIBRARIES[family] if one in peers):
        try:
            found += _built(library, family, setting, canonical, compiled)
        except (ImportError, InputError, torch.OutOfMemoryError) as reason:
            skipped[library] = str(reason).splitlines()[0]
    if compiled:
        try:
            found.append(_compiled(setting))
        except InputError as reason:
            skipped[COMPILED] = str(reason).splitlines()[0]
    return found, skipped


def _built(
    library: str, family: str, setting: Setting, weights: list[Tensor], compiled: bool
) -> list[Contestant]:
    if library == "plain":
        return others.plain(setting, weights, compiled=compiled)
    if library == "litgpt":
        return others.litgpt(setting, weights)
    build = others.hf_llama if family == "llama" else transformers_gpt2
    name = "transformers Llama" if family == "llama" else "transformers GPT-2"
    return others.transformers(name, partial(build, setting), setting, weights)


def _ours(model: GPTModel, setting: Setting, names: Sequence[str]) -> Iterator[Contestant]:
    """Yields our contestants. They share one model and the gradient buffer of its optimizer."""
    stages, parallel = ModelStages([model]), one_rank(setting)
    optimizer = our_optimizer(stages, parallel, DataParallelConfig())
    runner = StageRunner(stages, parallel, loss_in_one_pass=setting.loss_in_one_pass)
    batch, num_layers = setting.batch(), setting.shape.num_layers
    table = policies(num_layers)

    def run(plan: Any, loss_chunk_size: int | None) -> Tensor:
        model.decoder.plan, model.loss_chunk_size = plan, loss_chunk_size
        return runner.train((batch,), loss_factor=1.0, before_last=optimizer.sync_next_backward)

    for name in names:
        flags = table[OUR_POLICIES[name.split(", ")[1]]]
        plan = plan_stage(RecomputeConfig(**flags), num_layers)
        chunk = setting.tokens // CHUNKS if name == LOSS_CHUNKS else setting.loss_chunk_size
        yield Contestant(name, optimizer.zero_grad, partial(run, plan, chunk))


def _compiled(setting: Setting) -> Contestant:
    """Returns ours without recomputation and with --torch-compile."""
    setting = replace(setting, kernels=CompiledKernels(setting.device))
    (one,) = _ours(our_model(setting, one_rank(setting)), setting, [OURS])
    return one._replace(name=COMPILED)
