"""The contestants of benchmarks/side_by_side.py: one model, built by every library that can.

Two models: "gpt" has learned positions, LayerNorm, biases, gelu and tied embeddings; "llama" has
rotary positions, RMSNorm, swiglu, no biases and an output layer of its own. All contestants of a
model have the weights of ours, so their losses are equal up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import side_by_side_peers as others
from benchmarks.collectives import way_of
from benchmarks.contestant import Contestant, peer
from benchmarks.engines import Setting, our_model, our_optimizer
from benchmarks.megatron_engines import engine_names, megatron_engines
from benchmarks.peer_engines import transformers_gpt2
from benchmarks.recompute_engines import Place, policies
from megatron_lite.config.checks import InputError
from megatron_lite.config.data_parallel import DataParallelConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.model.stage_models import ModelStages
from megatron_lite.parallel.compiled import CompiledKernels
from megatron_lite.parallel.shared_memory import CHANNELS
from megatron_lite.recompute.schedule import plan_stage
from megatron_lite.training.micro_batches import StageRunner
from megatron_lite.training.observe import Observer

OURS = "ours, none"
LOSS_CHUNKS, WHOLE_LOGITS = "ours, none, loss chunks", "ours, none, whole logits"
GLOO = "ours, none, gloo"
COMPILED, NO_ONEDNN = "ours, compiled", "ours, none, no oneDNN"
PEERS = ("megatron-core", "plain", "transformers", "litgpt", NO_ONEDNN, COMPILED)
OUR_POLICIES = {
    "none": "none",
    "full": "uniform 1",
    "core_attn": "core_attn",
    "pointwise": "*:pointwise",
    "distributed": "uniform 1, distribute",
}
CHUNKS = 4  # of the tokens of a micro-batch, in the row LOSS_CHUNKS


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


def libraries_of(
    family: str, *, tp_size: int, sequence_parallel: bool, compiled: bool, has_chunks: bool
) -> dict[str, str]:
    """Returns the name of every contestant of a setting, and the library that builds it.

    has_chunks: whether a run of ours computes the loss in chunks by default.
    """
    several = tp_size > 1
    names = {
        f"ours, {name}": "ours"
        for name in OUR_POLICIES
        if name != "distributed" or (several and not sequence_parallel)
    }
    names[WHOLE_LOGITS if has_chunks else LOSS_CHUNKS] = "ours"
    if several:
        names[GLOO] = "ours"
    names[NO_ONEDNN] = NO_ONEDNN
    if family == "gpt":
        for name in engine_names(tp_size, sequence_parallel=sequence_parallel):
            names[name] = "megatron-core"
    if several:
        return names
    if family == "gpt":
        names["plain torch, none"] = "plain"
        if compiled:
            names["plain torch, compiled"] = "plain"
    hf = "GPT-2" if family == "gpt" else "Llama"
    names |= {f"transformers {hf}, {policy}": "transformers" for policy in ("none", "full")}
    if family == "llama":
        names["litgpt, none"] = "litgpt"
    return {**names, COMPILED: COMPILED} if compiled else names


def build_contestants(
    family: str,
    setting: Setting,
    place: Place,
    *,
    compiled: bool,
    peers: Sequence[str] = PEERS,
    wanted: Callable[[str], bool] = lambda name: True,
    note: Callable[[str], object] = lambda name: None,
) -> tuple[list[Contestant], dict[str, str]]:
    """Returns the contestants, ours without recomputation first, and who is left out and why.

    peers: the libraries to compare with. wanted: whether to build the contestant, or the library,
    of this name; `ours, none` is always built. note: called with the name of each library before
    it builds.
    """
    libraries = libraries_of(
        family,
        tp_size=place.parallel.tp_size,
        sequence_parallel=place.sequence_parallel,
        compiled=compiled,
        has_chunks=setting.loss_chunk_size is not None,
    )
    names: dict[str, list[str]] = {}
    for name, library in libraries.items():
        if name == OURS or (
            library in ("ours", *peers) and wanted(name) and (library == "ours" or wanted(library))
        ):
            names.setdefault(library, []).append(name)
    note(OURS)
    model = our_model(setting, place.parallel, sequence_parallel=place.sequence_parallel)
    skipped: dict[str, str] = {}
    if not setting.onednn and names.pop(NO_ONEDNN, None):
        skipped[NO_ONEDNN] = "on this machine runs of this dtype do not use oneDNN's products"
    if GLOO in names["ours"] and place.parallel.tp_group not in CHANNELS:
        names["ours"].remove(GLOO)
        skipped[GLOO] = "the ranks do not share memory, so every row uses gloo"
    weights = {name: one.detach() for name, one in model.named_parameters()}
    found = list(_ours(model, setting, place, names=names.pop("ours")))
    for library, own in names.items():
        note(library)
        try:
            built = _built(library, family, setting, place, weights, own)
        except (ImportError, InputError, torch.OutOfMemoryError) as reason:
            skipped[library] = str(reason).splitlines()[0]
            continue
        found += [one for one in built if one.name in own]
    return found, skipped


def _built(
    library: str,
    family: str,
    setting: Setting,
    place: Place,
    weights: Mapping[str, Tensor],
    names: Sequence[str],
) -> Sequence[Contestant]:
    """Returns the contestants of a library, at least those of these names."""
    if library in (COMPILED, NO_ONEDNN):
        return _ours_otherwise(library, setting, place)
    if library == "megatron-core":
        return [peer(engine) for engine in megatron_engines(setting, place, weights, names)]
    canonical = others.canonical(weights, setting, family)
    if library == "plain":
        return others.plain(setting, canonical, compiled="plain torch, compiled" in names)
    if library == "litgpt":
        return others.litgpt(setting, canonical)
    build = others.hf_llama if family == "llama" else transformers_gpt2
    return others.transformers(
        names[0].rpartition(",")[0], partial(build, setting), setting, canonical
    )


def _ours(
    model: Any, setting: Setting, place: Place, *, names: Sequence[str]
) -> Iterator[Contestant]:
    """Yields our contestants. They share one model and the gradient buffer of its optimizer."""
    stages = ModelStages([model])
    optimizer = our_optimizer(stages, place.parallel, DataParallelConfig())
    runner = StageRunner(stages, place.parallel, loss_in_one_pass=setting.loss_in_one_pass)
    batch, shape = setting.batch(), setting.shape
    chunks = {LOSS_CHUNKS: max(1, setting.tokens // CHUNKS), WHOLE_LOGITS: None}
    table = policies(
        shape.num_layers, tp_size=place.parallel.tp_size, sequence_parallel=place.sequence_parallel
    )

    def run(plan: Any, loss_chunk_size: int | None) -> Tensor:
        model.decoder.plan, model.loss_chunk_size = plan, loss_chunk_size
        return runner.train(
            (batch,), loss_factor=1.0, observer=Observer(), before_last=optimizer.sync_next_backward
        )

    for name in names:
        policy = OUR_POLICIES[name.split(", ")[1]]
        plan = plan_stage(RecomputeConfig(**table[policy]), shape.num_layers)
        chunk = chunks.get(name, setting.loss_chunk_size)
        act: Any = partial(run, plan, chunk)
        if name == GLOO:
            act = partial(_through_gloo, place, act)
        yield Contestant(name, optimizer.zero_grad, act, list(model.parameters()))


def _through_gloo(place: Place, act: Callable[[], Tensor]) -> Tensor:
    assert place.parallel.tp_group is not None
    with way_of("gloo", place.parallel.tp_group):
        return act()


def _ours_otherwise(name: str, setting: Setting, place: Place) -> list[Contestant]:
    """Returns a model of ours with --torch-compile, or one with --no-onednn-matmuls."""
    if name == COMPILED:
        setting = replace(setting, kernels=CompiledKernels(setting.device))
    model = our_model(
        setting,
        place.parallel,
        sequence_parallel=place.sequence_parallel,
        onednn=False if name == NO_ONEDNN else None,
    )
    (one,) = _ours(model, setting, place, names=[OURS])
    return [replace(one, name=name, is_compiled=name == COMPILED)]
