"""What a run's recompute plan does, layer by layer, as data: see report_text.py for how `--explain-recompute` prints it.

All of it is of one micro-batch on one rank (of a pipeline, in its first stage), and follows from the plan that training
executes. Standard library only.
"""

from __future__ import annotations

import glob
import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage
from megatron_lite.memory.activations import EMBEDDING, HEAD, ROTARY_TABLES, Term, activation_terms
from megatron_lite.memory.advice import Note, notes
from megatron_lite.memory.collectives import Exchange, embedding_collectives, head_collectives, segment_collectives
from megatron_lite.memory.flops import replayed_layers
from megatron_lite.memory.layer_operators import layer_results, repeated_results
from megatron_lite.memory.layer_tensors import KeptTensor, Sizes, layer_tensors
from megatron_lite.memory.pipeline import RankMemory, ranks_memory
from megatron_lite.memory.prices import Priced, alternatives, first_stage, price, with_flags
from megatron_lite.recompute.plan import CORE_ATTENTION, MLP_REGION, RecomputePlan, Segment


class Part(NamedTuple):
    """What is kept, largest first, and what is sent, by something that stands once in the model."""

    kept: tuple[KeptTensor, ...]
    exchange: Exchange = Exchange()

    @property
    def kept_bytes(self) -> int:
        """Of all its tensors."""
        return sum(tensor.num_bytes for tensor in self.kept)


@dataclass(frozen=True, kw_only=True)
class LayerRun:
    """Neighbouring segments of the plan that are treated alike, `count` of them. Each figure is of one: a layer, or a unit.

    kept: on the device; moved: in host memory. rebuilt: the operations that backward runs again, in each of its layers.
    left_out: of them, what only an unread value needs.
    """

    segment: Segment
    count: int
    kept: tuple[KeptTensor, ...]
    moved: tuple[KeptTensor, ...]
    rebuilt: tuple[str, ...]
    left_out: str | None
    replay_flops: int
    exchange: Exchange

    @property
    def last_layer(self) -> int:
        """Of the run, which begins at `segment.first_layer`."""
        return self.segment.first_layer + self.count * self.segment.num_layers - 1

    @property
    def kept_bytes(self) -> int:
        """Of one segment."""
        return sum(tensor.num_bytes for tensor in self.kept)


class PaperFigure(NamedTuple):
    """A formula of arXiv 2205.05198 for a layer that is treated so, and its value: 16-bit activations, 1-byte masks."""

    formula: str
    num_bytes: int


class Comparison(NamedTuple):
    """What a layer (or a unit) keeps: the paper's figure, if it has one; its terms at this run's sizes; what else is kept."""

    segment: Segment
    paper: PaperFigure | None
    in_paper_bytes: int
    others: tuple[KeptTensor, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """own: the run as it is. without: the same without recomputation. The parts' kept bytes add up to `own.kept_bytes`.

    stage: the one that all of it is about: the first. ranks: all of the pipeline; none without one.
    """

    config: RunConfig
    sizes: Sizes
    stage: Stage
    ranks: tuple[RankMemory, ...]
    own: Priced
    without: Priced
    embedding: Part
    rotary_tables: Part
    runs: tuple[LayerRun, ...]
    head: Part
    comparisons: tuple[Comparison, ...]
    policies: tuple[Priced, ...]
    notes: tuple[Note, ...]

    @property
    def unlike_the_paper(self) -> tuple[str, ...]:
        """What makes this model's terms other than the paper's formula."""
        model, sizes = self.config.model, self.sizes
        reasons = {
            f"1/{sizes.cp_size} of each sequence, on each context-parallel rank": sizes.cp_size > 1,
            "4-byte activations": sizes.element_bytes != 2,
            "flash attention, which keeps no scores": not model.builds_scores(sizes.device),
            "float32 softmax": model.builds_scores(sizes.device) and model.attention_softmax_in_fp32,
            "no dropout of the scores": model.attention_dropout == 0.0,
            "no dropout of the residual": model.hidden_dropout == 0.0,
            f"{model.activation}": model.activation != "gelu",
            f"f = {model.ffn_size / model.hidden_size:.2f} h": model.ffn_size != 4 * model.hidden_size,
            f"{model.query_groups} query groups": model.query_groups != model.num_attention_heads,
            f"heads of {model.head_dim} channels": model.head_dim * model.num_attention_heads != model.hidden_size,
        }
        return tuple(reason for reason, holds in reasons.items() if holds)


def likely_device(distributed_backend: str) -> str:
    """Where training would run, "cpu" or "cuda", as far as can be seen without torch: `auto` takes a GPU if there is one."""
    if distributed_backend != "auto":
        return "cuda" if distributed_backend == "nccl" else "cpu"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return "cuda" if not hidden and glob.glob("/dev/nvidia[0-9]*") else "cpu"


def explain(config: RunConfig, device: str) -> Report:
    """The report of a run on a "cpu" or "cuda" device. The size of the vocabulary must be known."""
    stage, pipeline_size = first_stage(config), config.parallel.pipeline_model_parallel_size
    model, sizes = config.model, Sizes.of(config, device=device, stage=stage)
    own, without = price(config, device), price(with_flags(config), device)
    terms = activation_terms(model, own.plan, sizes)
    head = Part(_largest_first(term for term in terms if term.operation == HEAD),
                head_collectives(model, sizes) if sizes.has_head else Exchange())
    policies = alternatives(config, device)
    runs = tuple(_runs(config, own.plan, terms, sizes))
    return Report(
        config=config, sizes=sizes, stage=stage, own=own, without=without, runs=runs, head=head, policies=policies,
        ranks=ranks_memory(config, device) if pipeline_size > 1 else (),
        embedding=Part(_largest_first(term for term in terms if term.operation == EMBEDDING),
                       embedding_collectives(model, sizes)),
        rotary_tables=Part(_largest_first(term for term in terms if term.tensor.name == ROTARY_TABLES)),
        comparisons=tuple(_comparisons(config, without, own, sizes)),
        notes=notes(config, sizes, own=own, without=without, policies=policies, head_bytes=head.kept_bytes,
                    layers_bytes=sum(run.count * run.kept_bytes for run in runs)))


def _runs(config: RunConfig, plan: RecomputePlan, terms: tuple[Term, ...], sizes: Sizes) -> Iterator[LayerRun]:
    again = replayed_layers(config.model, plan, batch=sizes.micro_batch_size, seq_length=sizes.seq_length, device=sizes.device,
                            tp_size=sizes.tp_size, cp_size=sizes.cp_size)
    for _, alike in itertools.groupby(plan.segments, key=lambda segment: replace(segment, first_layer=0)):
        segment, *others = alike
        layers = range(segment.first_layer, segment.first_layer + segment.num_layers)
        yield LayerRun(segment=segment, count=1 + len(others), kept=_kept_in(terms, layers, on_host=False),
                       moved=_kept_in(terms, layers, on_host=True),
                       rebuilt=_rebuilt(config, plan, segment, sizes), left_out=_left_out(config, plan, segment, sizes),
                       replay_flops=sum(sum(again[layer]) for layer in layers) // sizes.num_ranks,
                       exchange=segment_collectives(config.model, plan, segment, sizes))


def _kept_in(terms: tuple[Term, ...], layers: range, *, on_host: bool | None = None) -> tuple[KeptTensor, ...]:
    """on_host: those in host memory, or those on the device; both without it."""
    return _largest_first(term for term in terms if term.layer in layers and term.tensor.name != ROTARY_TABLES
                          and on_host in (None, term.on_host))


def _largest_first(terms: Iterable[Term]) -> tuple[KeptTensor, ...]:
    return tuple(sorted((term.tensor for term in terms), key=lambda tensor: -tensor.num_bytes))


def _rebuilt(config: RunConfig, plan: RecomputePlan, segment: Segment, sizes: Sizes) -> tuple[str, ...]:
    names = [operation.name for operation in layer_tensors(config.model, sizes).operations
             if segment.unit or segment.ops or {operation.region, operation.name} & segment.regions]
    if MLP_REGION in segment.regions and plan.skip_tail:
        names.remove("linear_fc2")
    if segment.ops:
        names = _without_kept(names, config, plan, segment, sizes)
    return tuple(names)


def _without_kept(names: list[str], config: RunConfig, plan: RecomputePlan, segment: Segment, sizes: Sizes) -> list[str]:
    """The operations of which something runs again where the results of some operators are kept."""
    again = repeated_results(config.model, segment.ops, sizes, skip_tail=plan.skip_tail)
    again_in = {result.operation for result in again if result.matmuls}
    again_in |= {"core_attention"} if config.model.builds_scores(sizes.device) else set()  # at least its softmax
    matmuls = {result.operation for result in layer_results(config.model, sizes) if result.matmuls}
    return [name for name in names if name not in matmuls - again_in]


def _left_out(config: RunConfig, plan: RecomputePlan, segment: Segment, sizes: Sizes) -> str | None:
    if not plan.skip_tail:
        return None
    if segment.unit or segment.ops:
        return "the last linear_fc2" if segment.num_layers > 1 else "linear_fc2"
    scores = CORE_ATTENTION in segment.regions and config.model.builds_scores(sizes.device)
    parts = ["softmax x value"] * scores + ["linear_fc2"] * (MLP_REGION in segment.regions)
    return " and ".join(parts) or None


def _comparisons(config: RunConfig, without: Priced, own: Priced, sizes: Sizes) -> Iterator[Comparison]:
    """Of a layer where nothing is rebuilt, then of each other treatment in the plan."""
    seen = set()
    for plan in (without.plan, own.plan):
        terms = activation_terms(config.model, plan, sizes)
        for segment in plan.segments:
            treatment = replace(segment, first_layer=0, num_layers=1)
            if treatment in seen:
                continue
            seen.add(treatment)
            kept = _kept_in(terms, range(segment.first_layer, segment.first_layer + segment.num_layers))
            yield Comparison(segment, paper_figure(config, segment, sizes),
                             sum(tensor.num_bytes for tensor in kept if tensor.in_paper),
                             tuple(tensor for tensor in kept if not tensor.in_paper))


def paper_figure(config: RunConfig, segment: Segment, sizes: Sizes) -> PaperFigure | None:
    """2205.05198, equations 1, 2 and 4, section 5 and appendix: by what is rebuilt and by how the layer is split."""
    heads, t = config.model.num_attention_heads, sizes.tp_size
    sbh, scores = sizes.tokens * config.model.hidden_size, 5 * heads * sizes.seq_length * sizes.tokens // t
    if segment.unit:
        split = sizes.sequence_parallel or segment.split
        return PaperFigure("2sbh/t" if split else "2sbh", 2 * sbh // (t if split else 1))
    if segment.ops or segment.regions not in (frozenset(), frozenset({CORE_ATTENTION})):
        return None
    whole = not segment.regions
    linear = 34 * sbh // t if sizes.sequence_parallel else 10 * sbh + 24 * sbh // t
    if sizes.sequence_parallel:
        formula = "(sbh/t)(34 + 5as/h)" if whole else "34sbh/t"
    elif t > 1:
        formula = "sbh(10 + 24/t + 5as/ht)" if whole else "sbh(10 + 24/t)"
    else:
        formula = "sbh(34 + 5as/h)" if whole else "34sbh"
    return PaperFigure(formula, linear + (scores if whole else 0))
