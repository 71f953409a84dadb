"""The collectives of a whole model, as the sum of those of its parts."""

from megatron_lite.description.model_ends import embedding_operations, head_operations
from megatron_lite.description.sizes import Shape
from megatron_lite.description.transformer_layer import describe_layers
from megatron_lite.memory.predict.kept_tensors import Traffic, collectives, segment_collectives


def plan_collectives(plan, sizes):
    """Returns all collectives of one micro-batch."""
    layers, of = describe_layers(sizes, plan.tiles), Shape(sizes)
    parts = [collectives(embedding_operations(sizes))]
    for one in plan.segments:
        parts.append(segment_collectives(of, one, layers, skip_tail=plan.skip_tail))
    return summed([*parts, collectives(head_operations(sizes))])


def summed(parts):
    """Returns the collectives of several parts, in order."""
    columns = zip(*parts, strict=True)
    return Traffic(*(tuple(one for part in column for one in part) for column in columns))
