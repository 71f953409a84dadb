"""The collectives of a whole model, as the sum of those of its parts."""

from megatron_lite.memory.explain.recompute_report import Traffic, stage_parts


def plan_collectives(plan, sizes):
    """Returns all collectives of one micro-batch."""
    return summed(part.traffic for part, _ in stage_parts(plan, sizes))


def summed(parts):
    """Returns the collectives of several parts, in order."""
    columns = zip(*parts, strict=True)
    return Traffic(*(tuple(one for part in column for one in part) for column in columns))
