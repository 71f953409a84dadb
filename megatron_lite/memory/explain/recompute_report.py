"""The report of `--explain-recompute` as data: the effect of a recompute plan, part by part.

report_text.py prints it. All figures are of one micro-batch on one rank; in a pipeline it is the
rank with the highest peak. They follow from the plan that training executes. Standard library only.
"""

import glob
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import NamedTuple

from megatron_lite.config.checks import chosen
from megatron_lite.config.notices import notices
from megatron_lite.config.regions import without_effect
from megatron_lite.config.run import RunConfig
from megatron_lite.config.units import size
from megatron_lite.description.model_ends import embedding_operations, head_operations
from megatron_lite.description.operations import (
    ALL_GATHER,
    Collective,
    KeptTensor,
    LayerDescription,
    Operation,
)
from megatron_lite.description.sizes import Shape, Sizes
from megatron_lite.description.transformer_layer import describe_layers
from megatron_lite.memory.explain.prices import (
    Priced,
    alternatives,
    price,
    rank_plans,
    region_names,
)
from megatron_lite.memory.predict.kept_tensors import (
    EMBEDDING,
    HEAD,
    activation_terms,
    largest_first,
    replayed_calls,
)
from megatron_lite.memory.predict.pipeline_memory import RankMemory, rank_memory, step_microbatches
from megatron_lite.recompute.recompute_plan import RecomputePlan, Segment

MOST_SPANS = 4  # of layers, that a name spells out


class Traffic(NamedTuple):
    """The collectives of a part of the model. replay: those that backward issues while it
    rebuilds."""

    forward: tuple[Collective, ...] = ()
    backward: tuple[Collective, ...] = ()
    replay: tuple[Collective, ...] = ()


NO_TRAFFIC = Traffic()


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
    kept: tuple[KeptTensor, ...] = ()
    moved: tuple[KeptTensor, ...] = ()
    replayed: tuple[tuple[str, int], ...] = ()
    traffic: Traffic = NO_TRAFFIC

    @property
    def kept_bytes(self) -> int:
        """The bytes that one segment keeps on the device."""
        return sum(tensor.num_bytes for tensor in self.kept)


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
    device = chosen(
        "--distributed-backend", distributed_backend, {"auto": None, "gloo": "cpu", "nccl": "cuda"}
    )
    if device is not None:
        return device
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
    run, config = config, of_one_replica(config, dp_size)
    dp_cp_size = dp_size * config.parallel.context_parallel_size
    own = price(config, device, dp_cp_size)
    parts = tuple(_parts(config, own.step.rank, device))
    sizes = Sizes.of(config, device)
    ranks = range(config.parallel.pipeline_model_parallel_size)
    return Report(
        config=run,
        sizes=sizes,
        ranks=tuple(rank_memory(config, device, rank) for rank in ranks),
        num_microbatches=step_microbatches(config),
        own=own,
        dp_cp_size=dp_cp_size,
        parts=parts,
        policies=alternatives(config, device, dp_cp_size),
        notes=tuple(_notes(config, sizes, own, parts)),
    )


def _notes(config: RunConfig, sizes: Sizes, own: Priced, parts: Sequence[Part]) -> Iterator[str]:
    """Yields the reasons why memory would not drop as the recompute flags suggest."""
    warnings = notices(config, "recompute")
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


def of_one_replica(config: RunConfig, dp_size: int) -> RunConfig:
    """Returns the run of one data-parallel rank, with its part of the run's largest batch.

    ValueError: that part is not a whole number of micro-batches.
    """
    config.batch_schedule(dp_size)
    batch = config.training.largest_batch_size
    training = replace(
        config.training,
        global_batch_size=None if batch is None else batch // dp_size,
        rampup_batch_size=(),
        step_batch_size_schedule=None,
    )
    return replace(config, training=training)


def _parts(config: RunConfig, rank: int, device: str) -> Iterator[Part]:
    """Yields the parts of a rank. Those of all its stages with equal figures are one part."""
    alike = defaultdict[Part, dict[int, list[Sequence[int]]]](dict)  # layers by stage
    for stage, plan in rank_plans(config, rank):
        for part, layers in stage_parts(plan, Sizes.of(config, device, stage)):
            alike[part].setdefault(stage.number, []).append(layers)
    in_stages = config.parallel.pipeline_model_parallel_size > 1
    for part, by_stage in alike.items():
        names = {stage: [*chain(*layers)] for stage, layers in by_stage.items()}
        number = sum(map(len, by_stage.values()))
        yield replace(part, name=part.name or _name(names, in_stages), count=number)


def stage_parts(plan: RecomputePlan, sizes: Sizes) -> Iterator[tuple[Part, Sequence[int]]]:
    """Yields the parts of a stage, with the numbers of their layers. Layers have no name yet."""
    terms = activation_terms(plan, sizes)
    layers = describe_layers(sizes, plan.tiles)

    def end(name: str, operations: Sequence[Operation]) -> Iterator[tuple[Part, Sequence[int]]]:
        kept = largest_first(one for one in terms if one.operation == name)
        if operations:
            yield Part(name=name, kept=kept, traffic=_traffic(operations)), ()

    yield from end(EMBEDDING, embedding_operations(sizes))
    for one in terms:
        if one.tensor.shared:
            yield Part(name=f"{one.tensor.name}, shared by all layers", kept=(one.tensor,)), ()
    for segment in plan.segments:
        replayed = Counter[str]()
        sent = [Collective(ALL_GATHER, Shape(sizes).whole)] * segment.split
        for _, call in replayed_calls(layers, segment, plan.skip_tail):
            sent += call.collectives
            for matmul in call.matmuls:
                replayed[matmul.name] += matmul.flops
        own = [one for one in terms if one.layer in segment.numbers and not one.tensor.shared]
        part = Part(
            treatment=_treatment(segment, layers, sizes),
            num_layers=segment.num_layers,
            kept=largest_first(one for one in own if not one.on_host),
            moved=largest_first(one for one in own if one.on_host),
            replayed=tuple(replayed.items()),
            traffic=_traffic(
                chain(*(layers[number].operations for number in segment.numbers)), sent
            ),
        )
        yield part, segment.numbers
    yield from end(HEAD, head_operations(sizes))


def _traffic(operations: Iterable[Operation], replay: Sequence[Collective] = ()) -> Traffic:
    sent = zip(*((one.forward, one.backward) for one in operations), strict=True)
    forward, backward = (tuple(chain(*half)) for half in sent)
    return Traffic(forward, backward, tuple(replay))


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


def _name(layers: Mapping[int, Sequence[int]], in_stages: bool) -> str:
    """Returns the name of layers from their numbers by stage."""
    stages = defaultdict[tuple[int, ...], list[int]](list)
    for stage, numbers in layers.items():
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
