"""The layers of a rank in groups: layers that a plan treats alike and that have equal figures.

The layers of a group need not be neighbours. `every-2:full` gives two groups, however many layers
the model has. Standard library only.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace

from megatron_lite.config.run import RunConfig
from megatron_lite.description.operations import KeptTensor, LayerDescription
from megatron_lite.description.self_attention import CORE
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.transformer_layer import describe_layers
from megatron_lite.memory.predict.flops import replayed_flops
from megatron_lite.memory.predict.kept_tensors import Term, kept_in
from megatron_lite.memory.predict.replays import left_out, replayed_calls
from megatron_lite.memory.predict.traffic import Traffic, segment_collectives
from megatron_lite.recompute.recompute_plan import RecomputePlan, Segment


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """The segments of a rank that are treated alike. Each figure is of one segment.

    A segment is one layer or one unit.
    layers: the numbers of the layers of all segments, counted within their stage, in order.
    stages: the numbers of the pipeline stages that have these layers. It is empty without a
        pipeline.
    segment: the first segment.
    count: the number of segments, in all stages together.
    kept: the tensors kept on the device. moved: those kept in host memory.
    rebuilt: the operations that backward runs again in each layer.
    left_out: those of them that the replay skips, in words, because only its unread output needs
        them; None if it skips none.
    replay_flops: the FLOPs of the replay on one rank.
    traffic: the collectives.
    peculiarity: what sets these layers apart from others of the model; "" if nothing.
    """

    layers: tuple[int, ...]
    stages: tuple[int, ...]
    segment: Segment
    count: int
    kept: tuple[KeptTensor, ...]
    moved: tuple[KeptTensor, ...]
    rebuilt: tuple[str, ...]
    left_out: str | None
    replay_flops: int
    traffic: Traffic
    peculiarity: str = ""

    @property
    def kept_bytes(self) -> int:
        """The kept bytes of one segment."""
        return sum(tensor.num_bytes for tensor in self.kept)


def layer_groups(
    config: RunConfig, plan: RecomputePlan, terms: tuple[Term, ...], sizes: Sizes, stage: int | None
) -> Iterator[LayerGroup]:
    """Yields the groups of one stage, in the order of their first layers.

    terms: the kept tensors of the stage.
    stage: the number of the stage; None without a pipeline.
    """
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
    alike: dict[Hashable, list[Segment]] = {}
    for segment in plan.segments:
        alike.setdefault(_treatment(segment, layers), []).append(segment)
    for segments in alike.values():
        segment, numbers = segments[0], _numbers(segments[0])
        yield LayerGroup(
            layers=tuple(number for one in segments for number in _numbers(one)),
            stages=() if stage is None else (stage,),
            segment=segment,
            count=len(segments),
            kept=kept_in(terms, numbers, on_host=False),
            moved=kept_in(terms, numbers, on_host=True),
            rebuilt=_rebuilt(plan, segment, layers),
            left_out=_left_out(plan, segment, layers),
            replay_flops=sum(sum(again[number].values()) for number in numbers) // sizes.num_ranks,
            traffic=segment_collectives(config.model, plan, segment, sizes, layers),
            peculiarity=_peculiarity(layers[number] for number in numbers),
        )


def one_of_all_stages(groups: Iterable[LayerGroup]) -> tuple[LayerGroup, ...]:
    """Returns the groups of all stages of a rank, with equal groups of several stages as one."""
    alike: dict[Hashable, list[LayerGroup]] = {}
    for group in groups:
        alike.setdefault(replace(group, stages=()), []).append(group)
    return tuple(
        replace(
            first,
            stages=tuple(stage for group in (first, *others) for stage in group.stages),
            count=first.count * (1 + len(others)),
        )
        for first, *others in alike.values()
    )


def _numbers(segment: Segment) -> range:
    return range(segment.first_layer, segment.first_layer + segment.num_layers)


def _peculiarity(layers: Iterable[LayerDescription]) -> str:
    """Returns in words how the layers of a segment differ from others of the model.

    If the layers differ from each other, the text has the words for each kind.
    """
    words = dict.fromkeys(layer.peculiarity for layer in layers)
    return " and ".join(word or "neither" for word in words) if any(words) else ""


def _treatment(segment: Segment, layers: tuple[LayerDescription, ...]) -> Hashable:
    """Returns the key by which the report puts segments into one group.

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
