"""The layers that each pipeline rank holds.

The command line, the prediction of memory and the pipeline read this. Standard library only. With 8
layers and --pipeline-model-parallel-size 2:

    flag                                          stages per rank    rank 0         rank 1
    none                                          1                  0-3            4-7
    --num-virtual-stages-per-pipeline-rank 2      2                  0-1 and 4-5    2-3 and 6-7
    --pipeline-model-parallel-layout 'Ettt|tt|tt|tL'  2               0-2 and 5-6    3-4 and 7

Every flag comes down to the number of layers of each stage. The first stage holds the embedding and
the last one the loss, also without layers.
"""

import re
from dataclasses import dataclass
from functools import cached_property

from .checks import shown
from .parallel import ParallelConfig
from .units import plural


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One virtual stage: neighbouring layers that one rank runs as one action of the pipeline.

    number, count: the number of this stage in the model, from 0, and the number of all stages.
    rank: the pipeline rank that holds the stage.
    first_layer: the number of its first layer in the whole model, from 0.
    """

    number: int
    count: int
    rank: int
    first_layer: int
    num_layers: int

    @cached_property
    def is_first(self) -> bool:
        """Tells whether the stage holds the embedding."""
        return self.number == 0

    @cached_property
    def is_last(self) -> bool:
        """Tells whether the stage holds the output layer and computes the loss."""
        return self.number == self.count - 1


def whole_model(num_layers: int) -> Stage:
    """Returns the one stage of a run without a pipeline."""
    return Stage(number=0, count=1, rank=0, first_layer=0, num_layers=num_layers)


def stages(parallel: ParallelConfig, num_layers: int) -> tuple[Stage, ...]:
    """Returns all stages in the order of the model.

    Raises ValueError if the layers do not divide over the stages as the flags ask.
    """
    size = parallel.pipeline_model_parallel_size
    if parallel.pipeline_model_parallel_layout is None:
        lengths = _equal_lengths(parallel, num_layers)
    else:
        lengths = layout_lengths(parallel.pipeline_model_parallel_layout, size, num_layers)
    # Stage n of the model is on rank n mod p, so the virtual stages of the ranks interleave.
    return tuple(
        Stage(
            number=number,
            count=len(lengths),
            rank=number % size,
            first_layer=sum(lengths[:number]),
            num_layers=length,
        )
        for number, length in enumerate(lengths)
    )


def layout_lengths(layout: str, size: int, num_layers: int) -> list[int]:
    """Returns the number of layers of each stage of --pipeline-model-parallel-layout.

    It is read as Megatron reads it: commas mean nothing, and repeats in parentheses come first.
    size: the number of pipeline ranks.
    """
    text = layout.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d{1,3})", r"(.)\*(\d{1,3})"):
        text = re.sub(repeated, lambda found: found[1] * int(found[2]), text)
    cut, kinds = text.split("|"), text.replace("|", "")
    unknown = sorted(set(kinds) - set("EtLm"))
    for is_wrong, why in (
        ("m" in kinds, "multi-token prediction (m) is not built: leave m out"),
        (unknown, f"{''.join(unknown)!r} is none of E, t, L, |, x*n and (..)*n, with n below 1000"),
        (
            (text[:1], text[-1:], kinds.count("E"), kinds.count("L")) != ("E", "L", 1, 1),
            "needs one E, at its start, and one L, at its end",
        ),
        (
            kinds.count("t") != num_layers,
            f"has {plural(kinds.count('t'), 'layer')} (t), not the {num_layers} of --num-layers",
        ),
        (
            len(cut) % size,
            f"has {plural(len(cut), 'stage')}, no multiple of --pipeline-model-parallel-size "
            f"{size}: change the number of |",
        ),
    ):
        if is_wrong:
            raise ValueError(f"--pipeline-model-parallel-layout {shown(layout)}: {why}")
    return [stage.count("t") for stage in cut]


def _equal_lengths(parallel: ParallelConfig, num_layers: int) -> list[int]:
    """Returns the number of layers of each stage, which are as many in all stages of a rank."""
    per_rank = _layers_by_rank(parallel, num_layers)
    num_chunks = parallel.num_virtual_stages_per_pipeline_rank or 1
    if length := parallel.num_layers_per_virtual_pipeline_stage:
        if len(set(per_rank)) > 1:
            raise ValueError(
                "--num-layers-per-virtual-pipeline-stage needs stages of equal length: with "
                "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers give "
                "--num-virtual-stages-per-pipeline-rank instead"
            )
        if per_rank[0] % length:
            raise ValueError(
                f"--num-layers-per-virtual-pipeline-stage {length} does not divide the "
                f"{per_rank[0]} layers of a pipeline rank"
            )
        num_chunks = per_rank[0] // length
    for rank, layers in enumerate(per_rank):
        if layers % num_chunks:
            raise ValueError(
                f"pipeline rank {rank} holds {layers} layers, which are not divisible by "
                f"{num_chunks} virtual stages: change --num-layers or "
                "--num-virtual-stages-per-pipeline-rank"
            )
    return [layers // num_chunks for layers in per_rank] * num_chunks


def most_in_flight(*, size: int, rank: int, num_microbatches: int, num_chunks: int = 1) -> int:
    """Returns the largest number of forwards that wait for their backward at once on a rank.

    Each forward counts for one micro-batch in one virtual stage. All but one of them come before
    the first pair of a forward and a backward.

    size: the number of pipeline ranks.
    num_chunks: the number of virtual stages of each pipeline rank.
    """
    warmup = size - rank - 1
    if num_chunks > 1:
        # The interleaved schedule (2104.04473, section 2.2): p forwards for each of the rank's
        # stages but one, and two more for each later rank.
        warmup = 2 * warmup + (num_chunks - 1) * size
    return min(warmup + 1, num_microbatches * num_chunks)


def _layers_by_rank(parallel: ParallelConfig, num_layers: int) -> list[int]:
    size = parallel.pipeline_model_parallel_size
    first = parallel.decoder_first_pipeline_num_layers
    last = parallel.decoder_last_pipeline_num_layers
    fixed = {end: layers for end, layers in (("first", first), ("last", last)) if layers}
    others, left = size - len(fixed), num_layers - sum(fixed.values())
    if not fixed and num_layers % size:
        raise ValueError(
            f"--num-layers {num_layers} is not divisible by --pipeline-model-parallel-size "
            f"({size}): the stages of the pipeline need whole layers; "
            "--decoder-first-pipeline-num-layers N gives the first one another number"
        )
    if fixed and (left < others or left % others if others else left):
        flags = [f"--decoder-{end}-pipeline-num-layers {layers}" for end, layers in fixed.items()]
        raise ValueError(
            f"{' and '.join(flags)} of --num-layers {num_layers} leave {left} for the "
            f"{plural(others, 'other rank')} of --pipeline-model-parallel-size {size}: give "
            "numbers that leave each of them the same number of layers, and at least one"
        )
    middle = [left // max(others, 1)] * others
    return [*filter(None, [first]), *middle, *filter(None, [last])]
