"""The report of `--explain-recompute` as data: the effect of a recompute plan, layer by layer.

report_text.py prints it. All figures are of one micro-batch on one rank; in a pipeline it is the
rank with the highest peak. They follow from the plan that training executes. Standard library only.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_lite.config.checks import chosen
from megatron_lite.config.run import RunConfig
from megatron_lite.description.operations import KeptTensor
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.explain.advice import Note, notes
from megatron_lite.memory.explain.layer_groups import LayerGroup, layer_groups, one_of_all_stages
from megatron_lite.memory.explain.paper import Comparison, comparisons, unlike_the_paper
from megatron_lite.memory.explain.prices import (
    ComparedRun,
    Priced,
    alternatives,
    price,
    rank_plans,
    with_flags,
)
from megatron_lite.memory.predict.kept_tensors import (
    EMBEDDING,
    HEAD,
    Term,
    activation_terms,
    largest_first,
)
from megatron_lite.memory.predict.pipeline_memory import RankMemory, ranks_memory, step_microbatches
from megatron_lite.memory.predict.step_peak import StepPeak, fullest_step_peak
from megatron_lite.memory.predict.traffic import Traffic, embedding_collectives, head_collectives
from megatron_lite.recompute.recompute_plan import keep_everything


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
class Report:
    """The report on a run. The kept bytes of its parts add up to `own.kept_bytes`.

    sizes: the sizes of a micro-batch in the rank's stages together.
    rank: the pipeline rank of the figures, the one with the highest peak of activations.
    ranks: the memory of all pipeline ranks; empty without a pipeline.
    num_microbatches: the micro-batches of a step with the run's largest batch.
    own: the cost of the run's own flags.
    without: the cost without recomputation, on the rank that then has the highest peak.
    without_here: the cost without recomputation, on `rank`.
    step: the whole peak of a step, on the pipeline rank where it is highest, as the run tells it.
        It is that of the first of `dp_cp_size` data-parallel and context-parallel ranks, which
        holds most.
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
    layer_groups: tuple[LayerGroup, ...]
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
    # A GPU under Windows' subsystem for Linux, and one of AMD, have other devices.
    there = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd")
    return "cuda" if not hidden and any(map(glob.glob, there)) else "cpu"


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
    groups: list[LayerGroup] = []
    terms: list[Term] = []
    for stage, plan in plans:
        own_sizes = Sizes.of(config, device=device, stage=stage)
        own_terms = activation_terms(model, plan, own_sizes)
        groups += layer_groups(
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
        layer_groups=one_of_all_stages(groups),
        head=head,
        policies=policies,
        without_here=price(with_flags(config), device, rank=own.rank),
        num_microbatches=step_microbatches(config),
        step=fullest_step_peak(config, device=device, dp_cp_size=dp_cp_size),
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
            layers_bytes=sum(group.count * group.kept_bytes for group in groups),
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
