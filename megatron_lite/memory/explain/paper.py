"""The kept bytes of a layer beside the formulas of arXiv 2205.05198 for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.regions import REGIONS
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage
from megatron_lite.description.operations import KeptTensor
from megatron_lite.description.sizes import Sizes, is_widened
from megatron_lite.description.transformer_layer import describe_layers
from megatron_lite.memory.predict.kept_tensors import activation_terms, kept_in
from megatron_lite.recompute.recompute_plan import RecomputePlan, Segment


class PaperFigure(NamedTuple):
    """A formula of arXiv 2205.05198 for a treatment of a layer, and its value in bytes.

    The paper assumes 16-bit activations and 1-byte masks.
    """

    formula: str
    num_bytes: int


class Comparison(NamedTuple):
    """The kept bytes of a layer or a unit, beside the paper's figure.

    paper: the paper's figure, if it has a formula for this treatment.
    in_paper_bytes: the paper's terms at this run's sizes.
    others: the kept tensors that the paper does not count.
    """

    segment: Segment
    paper: PaperFigure | None
    in_paper_bytes: int
    others: tuple[KeptTensor, ...]


def comparisons(
    config: RunConfig, plans: Iterable[tuple[Stage, RecomputePlan]], sizes: Sizes
) -> Iterator[Comparison]:
    """Yields one comparison for each treatment of a layer in the plans of the stages, in their
    order."""
    seen = set()
    for stage, plan in plans:
        own_sizes = replace(sizes, first_layer=stage.first_layer)
        terms = activation_terms(config.model, plan, own_sizes)
        layers = describe_layers(config.model, own_sizes, plan.num_layers)
        for segment in plan.segments:
            treatment = replace(segment, first_layer=0, num_layers=1), layers[segment.first_layer]
            if treatment in seen:
                continue
            seen.add(treatment)
            kept = kept_in(
                terms, range(segment.first_layer, segment.first_layer + segment.num_layers)
            )
            yield Comparison(
                segment,
                paper_figure(config, segment, sizes),
                sum(tensor.num_bytes for tensor in kept if tensor.in_paper),
                tuple(tensor for tensor in kept if not tensor.in_paper),
            )


def paper_figure(config: RunConfig, segment: Segment, sizes: Sizes) -> PaperFigure | None:
    """Returns the formula of arXiv 2205.05198 for the segment; None if the paper has none.

    The formulas are equations 1, 2 and 4, and those of section 5 and the appendix. They depend on
    the recomputed regions and on how the layer is split over ranks.
    """
    heads, t = config.model.num_attention_heads, sizes.tp_size
    sbh = sizes.tokens * config.model.hidden_size
    scores = 5 * heads * sizes.seq_length * sizes.tokens // t
    if segment.unit:
        split = sizes.sequence_parallel or segment.split
        return PaperFigure("2sbh/t" if split else "2sbh", 2 * sbh // (t if split else 1))
    # The paper's only region is the one that builds the scores: its recomputation drops 5as/h.
    if segment.ops or not all(REGIONS[region].needs_scores for region in segment.regions):
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


def unlike_the_paper(model: ModelConfig, sizes: Sizes) -> tuple[str, ...]:
    """Returns the reasons why a model's terms differ from the paper's formula."""
    scores = model.builds_scores(sizes.device)
    ffn_ratio = model.ffn_size / model.hidden_size
    channels = model.head_dim * model.num_attention_heads
    reasons = {
        f"1/{sizes.cp_size} of each sequence, on each context-parallel rank": sizes.cp_size > 1,
        "4-byte activations": sizes.element_bytes != 2,
        "a float32 residual stream": is_widened(model, sizes),
        "a parallel residual, whose norms share their input": model.parallel_residual,
        "flash attention, which keeps no scores": not scores,
        "float32 softmax": scores and model.attention_softmax_in_fp32,
        "no dropout of the scores": model.attention_dropout == 0.0,
        "no dropout of the residual": model.hidden_dropout == 0.0,
        f"{model.activation}": model.activation != "gelu",
        f"f = {ffn_ratio:.2f} h": model.ffn_size != 4 * model.hidden_size,
        f"{model.query_groups} query groups": model.query_groups != model.num_attention_heads,
        f"heads of {model.head_dim} channels": channels != model.hidden_size,
    }
    return tuple(reason for reason, holds in reasons.items() if holds)
