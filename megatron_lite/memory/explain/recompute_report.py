"""The report of `--explain-recompute` as data: the effect of a recompute plan, part by part.

report_text.py prints it. All figures are of one micro-batch on one rank; in a pipeline it is the
rank with the highest peak. They follow from the plan that training executes. Beside the run's own
flags stand the costs of usual settings: with other flags another rank may have the highest peak.
FLOPs are those of the whole model. Standard library only.
"""

import contextlib
import glob
import os
import shlex
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any, NamedTuple

from megatron_lite.config.checks import Values
from megatron_lite.config.notices import notices
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.regions import (
    ALIAS,
    CORE_ATTENTION,
    MLP_REGION,
    MOE,
    POINTWISE,
    without_effect,
)
from megatron_lite.config.run import RunConfig
from megatron_lite.config.run_flags import changed_settings
from megatron_lite.config.setting import settings_of
from megatron_lite.config.units import size
from megatron_lite.description.model_ends import embedding_operations, head_operations
from megatron_lite.description.operations import (
    ALL_GATHER,
    Collective,
    KeptTensor,
    LayerDescription,
    Operation,
)
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.transformer_layer import describe_layers
from megatron_lite.memory.predict.flops import PolicyFlops
from megatron_lite.memory.predict.kept_tensors import (
    EMBEDDING,
    HEAD,
    Term,
    activation_bytes,
    activation_terms,
    replayed_calls,
)
from megatron_lite.memory.predict.pipeline_memory import (
    RankMemory,
    rank_memory,
    spared_flops,
    step_microbatches,
)
from megatron_lite.memory.predict.step_peak import StepPeak, fullest_step_peak
from megatron_lite.recompute.recompute_plan import RecomputePlan, Segment
from megatron_lite.recompute.schedule import plan_model, stage_plan

LONGEST_NAME = 45
LOSS_CHUNK = 1024  # tokens; the value of --loss-chunk-size that the report compares
MOST_SPANS = 4  # of layers, that a name spells out


class Traffic(NamedTuple):
    """The collectives of a part of the model. replay: those that backward issues while it
    rebuilds."""

    forward: tuple[Collective, ...]
    backward: tuple[Collective, ...]
    replay: tuple[Collective, ...]


@dataclass(frozen=True, kw_only=True)
class Part:
    """The embedding, the head, shared tables, or segments that are treated alike.

    Each figure is of one segment, which is one layer or one unit.
    name: such as "layers 0-3 of stage 1".
    treatment: how a plan treats it, in words.
    num_layers: the layers of a segment; 0 for other parts.
    count: the number of segments.
    kept: the tensors kept on the device, the largest first. moved: those kept in host memory.
    replayed: (matmul, FLOPs on one rank) of what backward runs again.
    traffic: the collectives.
    """

    name: str = ""
    treatment: str = ""
    num_layers: int = 0
    count: int = 1
    kept: tuple[KeptTensor, ...]
    moved: tuple[KeptTensor, ...]
    replayed: tuple[tuple[str, int], ...] = ()
    traffic: Traffic

    @property
    def kept_bytes(self) -> int:
        """The bytes that one segment keeps on the device."""
        return sum(tensor.num_bytes for tensor in self.kept)


class Priced(NamedTuple):
    """The cost of a run.

    name: the name of its setting in the table.
    plan: the plan of the whole model.
    memory: the bytes kept for backward on the rank. host_bytes: those in host memory, of one
        micro-batch.
    step: the peak of a step on the rank.
    flops: those of a micro-batch, over all ranks that split a layer.
    """

    name: str
    config: RunConfig
    plan: RecomputePlan
    memory: RankMemory
    host_bytes: int
    step: StepPeak
    flops: PolicyFlops

    @property
    def execution(self) -> tuple[RecomputePlan, int | None]:
        """The plan and the loss chunks, by which two settings are told apart."""
        return self.plan, self.config.loss_chunk_size


class Report(NamedTuple):
    """The report on a run. The kept bytes of its parts add up to `own.memory.kept_bytes`.

    sizes: the sizes of a micro-batch.
    ranks: the memory of all pipeline ranks.
    num_microbatches: the micro-batches of a step with the run's largest batch.
    own: the cost of the run's own flags, on the first of `dp_cp_size` data-parallel and
        context-parallel ranks, which holds most.
    policies: the costs of the run's flags and of others, the highest peak first.
    """

    config: RunConfig
    sizes: Sizes
    ranks: tuple[RankMemory, ...]
    num_microbatches: int
    own: Priced
    dp_cp_size: int
    parts: tuple[Part, ...]
    policies: tuple[Priced, ...]
    notes: tuple[str, ...]


def likely_device(distributed_backend: str) -> str:
    """Returns the device on which training would run, "cpu" or "cuda", without importing torch.

    `auto` takes a GPU if the machine has a visible one.
    """
    if distributed_backend != "auto":
        return "cpu" if distributed_backend == "gloo" else "cuda"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    # A GPU under Windows' subsystem for Linux, and one of AMD, have other devices.
    there = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd")
    return "cuda" if not hidden and any(map(glob.glob, there)) else "cpu"


def explain(config: RunConfig, device: str, *, dp_size: int = 1) -> Report:
    """Returns the report on a run. The vocabulary size must be known.

    device: "cpu" or "cuda".
    dp_size: the number of data-parallel ranks that split --global-batch-size.
    ValueError: the run cannot split this batch.
    """
    config.batch_schedule(dp_size)
    runs = (*_usual(config, device), ("", config))
    priced = [price(run, device, dp_size, name) for name, run in runs]
    own = priced[-1]
    policies = {one.execution: one for one in priced}.values()
    parts = tuple(_parts(config, own.step.rank, device))
    sizes = Sizes.of(config, device)
    ranks = range(config.parallel.pipeline_model_parallel_size)
    return Report(
        config=config,
        sizes=sizes,
        ranks=tuple(rank_memory(config, device, rank, dp_size) for rank in ranks),
        num_microbatches=step_microbatches(config, dp_size),
        own=own,
        dp_cp_size=dp_size * config.parallel.context_parallel_size,
        parts=parts,
        policies=tuple(sorted(policies, key=lambda one: (-one.step.num_bytes, one.flops.replays))),
        notes=tuple(_notes(config, dp_size, sizes, own, parts)),
    )


def _notes(
    config: RunConfig, dp_size: int, sizes: Sizes, own: Priced, parts: Sequence[Part]
) -> Iterator[str]:
    """Yields the reasons why memory would not drop as the recompute flags suggest."""
    warnings = notices(config, "recompute", dp_size=dp_size)
    yield from (f"{warning}." for warning in warnings)
    named = frozenset[str]().union(*(segment.regions for segment in own.plan.segments))
    for region in without_effect(named, builds_scores=config.model.builds_scores(sizes.device)):
        if not any(region in warning for warning in warnings):
            yield (
                f"{region} is moot: flash attention keeps no scores, and rebuilds them in backward "
                "anyway."
            )
    if own.host_bytes and sizes.device == "cpu":
        yield f"On a CPU @host frees nothing: {size(own.host_bytes)} stay in the same memory."
    elif own.host_bytes:
        yield (
            f"@host copies {size(own.host_bytes)} to the host in forward and as much back in "
            "backward, for every micro-batch. Where that takes longer than the layers between, the "
            "device waits."
        )
    head = sum(one.kept_bytes for one in parts if one.name == HEAD)
    layers = sum(one.count * one.kept_bytes for one in parts if one.num_layers)
    if head > layers:
        yield (
            f"The head keeps {size(head)}, and all layers together {size(layers)}. Recomputing "
            "layers does not lower the head; --loss-chunk-size and a smaller --micro-batch-size "
            "do, and so does a larger --tensor-model-parallel-size."
        )


def _parts(config: RunConfig, rank: int, device: str) -> Iterator[Part]:
    """Yields the parts of a rank. Those of all its stages with equal figures are one part."""
    alike = defaultdict[Part, list[tuple[int, Sequence[int]]]](list)
    for stage in config.stages_of_rank(rank):
        sizes = Sizes.of(config, device, stage)
        for part, layers in stage_parts(stage_plan(config, stage), sizes):
            alike[part].append((stage.number, layers))
    in_stages = config.parallel.pipeline_model_parallel_size > 1
    for part, places in alike.items():
        yield replace(part, name=part.name or _name(places, in_stages), count=len(places))


def stage_parts(plan: RecomputePlan, sizes: Sizes) -> Iterator[tuple[Part, Sequence[int]]]:
    """Yields the parts of a stage, with the numbers of their layers. Layers have no name yet."""
    terms = activation_terms(plan, sizes)
    layers = describe_layers(sizes, plan.tiles)

    def end(name: str, operations: Sequence[Operation]) -> Iterator[tuple[Part, Sequence[int]]]:
        if operations:
            yield _part([one for one in terms if one.operation == name], operations, name=name), ()

    yield from end(EMBEDDING, embedding_operations(sizes))
    for one in terms:
        if one.tensor.shared:
            yield _part([one], name=f"{one.tensor.name}, shared by all layers"), ()
    for segment in plan.segments:
        replayed = Counter[str]()
        sent = [Collective(ALL_GATHER, sizes.whole)] * segment.split
        for _, call in replayed_calls(layers, segment, plan.skip_tail):
            sent += call.collectives
            for matmul in call.matmuls:
                replayed[matmul.name] += matmul.flops
        part = _part(
            [one for one in terms if one.layer in segment.numbers and not one.tensor.shared],
            [*chain(*(layers[number].operations for number in segment.numbers))],
            sent,
            treatment=_treatment(segment, layers, sizes),
            num_layers=segment.num_layers,
            replayed=tuple(replayed.items()),
        )
        yield part, segment.numbers
    yield from end(HEAD, head_operations(sizes))


def _part(
    terms: Sequence[Term],
    operations: Sequence[Operation] = (),
    replay: Iterable[Collective] = (),
    **facts: Any,
) -> Part:
    """Returns the part that keeps these tensors, the largest first. facts: its other fields."""
    largest_first = sorted(terms, key=lambda term: -term.num_bytes)
    kept, moved = (
        tuple(one.tensor for one in largest_first if one.on_host is on_host)
        for on_host in (False, True)
    )
    sent = (chain(*(getattr(one, half) for one in operations)) for half in ("forward", "backward"))
    return Part(kept=kept, moved=moved, traffic=Traffic(*map(tuple, (*sent, replay))), **facts)


def _treatment(segment: Segment, layers: Sequence[LayerDescription], sizes: Sizes) -> str:
    if segment.unit:
        split = f", 1/{sizes.tp_size} of it on each rank" if segment.split else ""
        text = f"units of {segment.num_layers}; only the input of each is kept{split}"
    elif segment.ops:
        text = f"results of {', '.join(segment.ops)} kept, all else rebuilt in backward"
    elif segment.regions:
        text = f"{', '.join(region_names(segment.regions))} rebuilt in backward"
    else:
        text = "everything is kept"
    if segment.tiles > 1:
        text += f", the MLP in {segment.tiles} tiles"
    # Layers of one model may differ from each other.
    kinds = dict.fromkeys(layers[number].peculiarity for number in segment.numbers)
    return text + "".join(f" ({kind})" for kind in kinds if kind)


def _name(places: Iterable[tuple[int, Sequence[int]]], in_stages: bool) -> str:
    """Returns the name of layers. places: numbers of stages, and of layers in them."""
    by_stage = defaultdict[int, list[int]](list)
    for stage, numbers in places:
        by_stage[stage] += numbers
    stages = defaultdict[tuple[int, ...], list[int]](list)
    for stage, numbers in by_stage.items():
        stages[tuple(numbers)].append(stage)
    return "; ".join(
        layers_name(numbers)
        + (f" of stage{'s' * (len(of) > 1)} {', '.join(map(str, of))}" if in_stages else "")
        for numbers, of in stages.items()
    )


def layers_name(layers: Sequence[int]) -> str:
    """Returns a short name of layers from their numbers in order, such as "layers 0-3, 8".

    Of many spans only the first two and the last are named: "layers 0, 2, .. 78".
    """
    spans = []
    # Within a span, a layer's number and its place grow alike.
    for _, span in groupby(enumerate(layers), lambda one: one[1] - one[0]):
        numbers = [str(layer) for _, layer in span]
        spans.append("-".join([numbers[0], *numbers[1:][-1:]]))
    if len(spans) > MOST_SPANS:
        spans = [*spans[:2], f".. {spans[-1]}"]
    return f"layer{'s' * (len(layers) > 1)} {', '.join(spans)}"


def price(config: RunConfig, device: str, dp_size: int, name: str) -> Priced:
    """Returns the cost of a run. The vocabulary size must be known.

    device: "cpu" or "cuda". name: "": that of its setting.
    """
    plan = plan_model(config)
    step = fullest_step_peak(config, device=device, dp_size=dp_size)
    flops = PolicyFlops.of(Sizes.of(config, device), plan)
    # Some micro-batches of a step may keep everything. The figure is the mean.
    number = step_microbatches(config, dp_size)
    spared = spared_flops(
        config, number, samples_per_microbatch=config.training.micro_batch_size, device=device
    )
    return Priced(
        name=name or short_name(config.recompute),
        config=config,
        plan=plan,
        memory=rank_memory(config, device, step.rank, dp_size),
        host_bytes=sum(
            activation_bytes(
                stage_plan(config, stage), Sizes.of(config, device, stage), on_host=True
            )
            for stage in config.stages_of_rank(step.rank)
        ),
        step=step,
        flops=flops._replace(replays=flops.replays - spared // number),
    )


def _usual(config: RunConfig, device: str) -> Iterator[tuple[str, RunConfig]]:
    """Yields the run with usual settings instead of its own, as far as its layout allows them.

    --no-recompute-tail-skip and --recompute-verify stay as they are in the run.
    Before each stands its name; "": that of its setting.
    """
    largest = MLP_REGION if config.model.num_experts is None else MOE
    modules = [(CORE_ATTENTION,), POINTWISE, (largest,)]
    if config.model.builds_scores(device):
        modules.append((CORE_ATTENTION, *POINTWISE))
    longest = max(stage.num_layers for stage in config.stages())
    policies = ["every-2:full"]
    if device == "cuda":  # on a CPU @host frees nothing
        policies += ["*:full@host", "*:none@host"]
    settings: list[Values] = [
        {},
        *(dict(recompute_granularity="selective", recompute_modules=names) for names in modules),
        *(
            dict(
                recompute_granularity="full",
                recompute_method=method,
                recompute_num_layers=count,
                distribute_saved_activations=split,
            )
            for split in (False, True)
            for method, count in (("uniform", 1), ("block", (longest + 1) // 2))
        ),
        *(dict(recompute_policy=policy) for policy in policies),
    ]
    for flags in settings:
        with contextlib.suppress(ValueError):  # not every layout can split the inputs of units
            yield "", replace(config, recompute=config.recompute.instead(**flags))
    tokens = config.data.seq_length * config.training.micro_batch_size
    if config.loss_chunk_size is None and tokens > LOSS_CHUNK:
        name = f"this run with --loss-chunk-size {LOSS_CHUNK}"
        yield name, config.with_fields({"loss_chunk_size": LOSS_CHUNK})


def flags_of(config: RunConfig) -> str:
    """Returns the command-line flags that decide the recomputation of a run."""
    own, changed = settings_of(RecomputeConfig), changed_settings(config)
    return shlex.join(word for name in changed if name in own for word in changed[name])


def region_names(regions: Iterable[str]) -> list[str]:
    """Returns the names of regions, in alphabetical order.

    The three cheap regions together become `pointwise`, as in --recompute-modules.
    """
    names = set(regions)
    return sorted(names - set(POINTWISE)) + [ALIAS] if set(POINTWISE) <= names else sorted(names)


def short_name(recompute: RecomputeConfig) -> str:
    """Returns the values without the flags' names, such as "full uniform 2, distributed"."""
    if recompute.recompute_policy is not None:
        text = f"policy {recompute.recompute_policy}"
        return textwrap.shorten(text, LONGEST_NAME, placeholder=" ...")
    if recompute.recompute_granularity is None:
        return "none"
    if recompute.recompute_granularity == "selective":
        return " ".join(["selective", *region_names(recompute.recompute_modules)])
    split = ", distributed" if recompute.distribute_saved_activations else ""
    return f"full {recompute.recompute_method} {recompute.recompute_num_layers}{split}"
