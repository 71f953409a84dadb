"""The report of `--explain-recompute` as data: the effect of a recompute plan, layer by layer.

report_text.py prints it. All figures are of one micro-batch on one rank; in a pipeline it is the
rank with the highest peak. They follow from the plan that training executes. Standard library only.
"""

from __future__ import annotations

import glob
import itertools
import os
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_lite.config.checks import chosen
from megatron_lite.config.run import RunConfig
from megatron_lite.description.operations import KeptTensor, LayerDescription
from megatron_lite.description.self_attention import CORE
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.transformer_layer import describe_layers
from megatron_lite.memory.explain.advice import Note, notes
from megatron_lite.memory.explain.paper import Comparison, comparisons, unlike_the_paper
from megatron_lite.memory.explain.prices import (
    ComparedRun,
    Priced,
    alternatives,
    price,
    rank_plans,
    with_flags,
)
from megatron_lite.memory.predict.flops import replayed_flops
from megatron_lite.memory.predict.kept_tensors import (
    EMBEDDING,
    HEAD,
    Term,
    activation_terms,
    kept_in,
    largest_first,
)
from megatron_lite.memory.predict.pipeline_memory import RankMemory, ranks_memory, step_microbatches
from megatron_lite.memory.predict.replays import left_out, replayed_calls
from megatron_lite.memory.predict.step_peak import StepPeak, step_peak
from megatron_lite.memory.predict.traffic import (
    Traffic,
    embedding_collectives,
    head_collectives,
    segment_collectives,
)
from megatron_lite.recompute.recompute_plan import RecomputePlan, Segment, keep_everything


class ReportPart(NamedTuple):
    """A part that the model has once, such as the embedding.

    kept: its kept tensors, the largest first. traffic: its collectives.
    """

    kept: tuple[KeptTensor, ...]
    traffic: Traffic = Traffic()

    @property
    def kept_bytes(self) -> int:
        """The kept bytes of the part."""
        return sum(tensor.num_bytes for tensor in self.kept)


@dataclass(frozen=True, kw_only=True)
class LayerRun:
    """Neighbouring segments of a stage that are treated alike. Each figure is of one segment.

    A segment is one layer or one unit.
    count: the number of segments.
    stage: the number of the pipeline stage; None without a pipeline.
    kept: the tensors kept on the device. moved: those kept in host memory.
    rebuilt: the operations that backward runs again in each layer.
    left_out: those of them that the replay skips, in words, because only its unread output needs
        them; None if it skips none.
    replay_flops: the FLOPs of the replay on one rank.
    traffic: the collectives.
    peculiarity: what sets these layers apart from others of the model; "" if nothing.
    """

    segment: Segment
    count: int
    stage: int | None
    kept: tuple[KeptTensor, ...]
    moved: tuple[KeptTensor, ...]
    rebuilt: tuple[str, ...]
    left_out: str | None
    replay_flops: int
    traffic: Traffic
    peculiarity: str = ""

    @property
    def last_layer(self) -> int:
        """The last layer of these segments. The first is `segment.first_layer`."""
        return self.segment.first_layer + self.count * self.segment.num_layers - 1

    @property
    def kept_bytes(self) -> int:
        """The kept bytes of one segment."""
        return sum(tensor.num_bytes for tensor in self.kept)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The report on a run. The kept bytes of its parts add up to `own.kept_bytes`.

    sizes: the sizes of a micro-batch in the rank's stages together.
    rank: the pipeline rank of the figures, which is the one with the highest peak.
    ranks: the memory of all pipeline ranks; empty without a pipeline.
    num_microbatches: the micro-batches of a step with the run's largest batch.
    own: the cost of the run's own flags.
    without: the cost without recomputation, on the rank that then has the highest peak.
    without_here: the cost without recomputation, on `rank`.
    step: the whole peak of a step on `rank`, on the first of `dp_cp_size` data-parallel and
        context-parallel ranks, which holds most.
    """

    config: RunConfig
    sizes: Sizes
    rank: int
    ranks: tuple[RankMemory, ...]
    num_microbatches: int
    own: Priced
    without: Priced
    without_here: Priced
    step: StepPeak
    dp_cp_size: int
    embedding: ReportPart
    rotary_tables: ReportPart
    runs: tuple[LayerRun, ...]
    head: ReportPart
    comparisons: tuple[Comparison, ...]
    policies: tuple[Priced, ...]
    notes: tuple[Note, ...]

    @property
    def unlike_the_paper(self) -> tuple[str, ...]:
        """The reasons why this model's terms differ from the paper's formula."""
        return unlike_the_paper(self.config.model, self.sizes)


def likely_device(distributed_backend: str) -> str:
    """Returns the device on which training would run, "cpu" or "cuda", without importing torch.

    `auto` takes a GPU if the machine has a visible one.
    """
    device = chosen(
        "--distributed-backend", distributed_backend, {"auto": None, "gloo": "cpu", "nccl": "cuda"}
    )
    if device is not None:
        return device
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return "cuda" if not hidden and glob.glob("/dev/nvidia[0-9]*") else "cpu"


def explain(
    config: RunConfig, device: str, *, dp_size: int = 1, others: Sequence[ComparedRun] = ()
) -> Report:
    """Returns the report on a run. The vocabulary size must be known.

    device: "cpu" or "cuda".
    dp_size: the number of data-parallel ranks that split --global-batch-size.
    others: further settings for the table of alternatives.
    ValueError: the run cannot split this batch.
    """
    run, config = config, of_one_replica(config, dp_size)
    pipeline_size, model = config.parallel.pipeline_model_parallel_size, config.model
    dp_cp_size = dp_size * config.parallel.context_parallel_size
    own, without = price(config, device), price(with_flags(config), device)
    plans = rank_plans(config, own.rank)
    sizes = replace(
        Sizes.of(config, device=device),
        has_embedding=any(stage.is_first for stage, _ in plans),
        has_head=any(stage.is_last for stage, _ in plans),
    )
    runs: list[LayerRun] = []
    terms: list[Term] = []
    for stage, plan in plans:
        own_sizes = Sizes.of(config, device=device, stage=stage)
        own_terms = activation_terms(model, plan, own_sizes)
        runs += _runs(
            config, plan, own_terms, own_sizes, stage.number if pipeline_size > 1 else None
        )
        terms += own_terms
    head = ReportPart(
        largest_first(term for term in terms if term.operation == HEAD),
        head_collectives(model, sizes) if sizes.has_head else Traffic(),
    )
    others = [one._replace(config=of_one_replica(one.config, dp_size)) for one in others]
    policies = alternatives(config, device, dp_cp_size=dp_cp_size, others=others)
    return Report(
        config=run,
        sizes=sizes,
        rank=own.rank,
        own=own,
        without=without,
        runs=tuple(runs),
        head=head,
        policies=policies,
        without_here=price(with_flags(config), device, rank=own.rank),
        num_microbatches=step_microbatches(config),
        step=step_peak(config, own.rank, device=device, dp_cp_size=dp_cp_size),
        dp_cp_size=dp_cp_size,
        ranks=ranks_memory(config, device) if pipeline_size > 1 else (),
        embedding=ReportPart(
            largest_first(term for term in terms if term.operation == EMBEDDING),
            embedding_collectives(model, sizes) if sizes.has_embedding else Traffic(),
        ),
        rotary_tables=ReportPart(largest_first(term for term in terms if term.tensor.shared)),
        comparisons=tuple(
            comparisons(
                config, [(plans[0][0], keep_everything(plans[0][0].num_layers)), *plans], sizes
            )
        ),
        notes=notes(
            config,
            sizes,
            own=own,
            without=without,
            policies=policies,
            head_bytes=head.kept_bytes,
            layers_bytes=sum(run.count * run.kept_bytes for run in runs),
            dp_size=dp_size,
        ),
    )


def of_one_replica(config: RunConfig, dp_size: int) -> RunConfig:
    """Returns the run of one data-parallel rank, with its part of the run's largest batch.

    ValueError: that part is not a whole number of micro-batches.
    """
    config.batch_schedule(dp_size)
    batch = config.training.largest_batch_size
    batch_of_rank = None if batch is None else batch // dp_size
    return replace(
        config,
        training=replace(
            config.training,
            global_batch_size=batch_of_rank,
            rampup_batch_size=(),
            step_batch_size_schedule=None,
        ),
    )


def _runs(
    config: RunConfig, plan: RecomputePlan, terms: tuple[Term, ...], sizes: Sizes, stage: int | None
) -> Iterator[LayerRun]:
    layers = describe_layers(config.model, sizes, plan.num_layers)
    again = replayed_flops(
        config.model,
        plan,
        batch=sizes.micro_batch_size,
        seq_length=sizes.seq_length,
        device=sizes.device,
        tp_size=sizes.tp_size,
        cp_size=sizes.cp_size,
        first_layer=sizes.first_layer,
    )
    for _, alike in itertools.groupby(
        plan.segments, key=lambda segment: _treatment(segment, layers)
    ):
        segment, *others = alike
        numbers = range(segment.first_layer, segment.first_layer + segment.num_layers)
        yield LayerRun(
            segment=segment,
            count=1 + len(others),
            stage=stage,
            kept=kept_in(terms, numbers, on_host=False),
            moved=kept_in(terms, numbers, on_host=True),
            rebuilt=_rebuilt(plan, segment, layers),
            left_out=_left_out(plan, segment, layers),
            replay_flops=sum(sum(again[number].values()) for number in numbers) // sizes.num_ranks,
            traffic=segment_collectives(config.model, plan, segment, sizes, layers),
            peculiarity=_peculiarity(layers[number] for number in numbers),
        )


def _peculiarity(layers: Iterable[LayerDescription]) -> str:
    """Returns in words how the layers of a segment differ from others of the model.

    If the layers differ from each other, the text has the words for each kind.
    """
    words = dict.fromkeys(layer.peculiarity for layer in layers)
    return " and ".join(word or "neither" for word in words) if any(words) else ""


def _treatment(segment: Segment, layers: tuple[LayerDescription, ...]) -> Hashable:
    """Returns the key by which the report puts neighbouring segments into one line.

    It consists of the treatment and of the layers' descriptions.
    """
    own = layers[segment.first_layer : segment.first_layer + segment.num_layers]
    return replace(segment, first_layer=0), own


def _rebuilt(
    plan: RecomputePlan, segment: Segment, layers: tuple[LayerDescription, ...]
) -> tuple[str, ...]:
    """Returns the operations that backward runs again in a layer of the segment."""
    layer = layers[segment.first_layer]
    named = [operation for operation in layer.operations if not operation.only_copies]
    if segment.unit:
        return tuple(operation.name for operation in named)
    again = {
        operation.name
        for _, operation, call in replayed_calls((layer,), segment, skip_tail=plan.skip_tail)
        if call.matmuls
    }
    inside = named if segment.ops else layer.inside(segment.regions)
    return tuple(
        operation.name
        for operation in inside
        if operation.name in again
        or not any(call.matmuls for call in operation.calls)
        # Where attention builds its scores, at least the softmax runs again.
        or (len([call for call in operation.calls if call.matmuls]) > 1)
    )


def _left_out(
    plan: RecomputePlan, segment: Segment, layers: tuple[LayerDescription, ...]
) -> str | None:
    """Returns in words the matmuls that a replay of the segment skips; None if it skips none."""
    if not plan.skip_tail:
        return None
    own = layers[segment.first_layer : segment.first_layer + segment.num_layers]
    skipped = left_out(own, segment)
    names = [
        "softmax x value" if one.name == CORE else one.name
        for one in own[-1].operations
        if any(
            (one.name, number) in skipped and call.matmuls for number, call in enumerate(one.calls)
        )
    ]
    return (
        " and ".join(f"the last {name}" if segment.num_layers > 1 else name for name in names)
        or None
    )
