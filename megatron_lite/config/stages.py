"""Which layers each pipeline rank holds. Standard library only: read by the command line, the memory model and the engine.

    --pipeline-model-parallel-size 2, 8 layers       1 stage per rank     rank 0: layers 0-3         rank 1: layers 4-7
    --num-virtual-stages-per-pipeline-rank 2         2 stages per rank    rank 0: layers 0-1, 4-5    rank 1: layers 2-3, 6-7
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.parallel import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Consecutive layers that one rank runs as one step of the pipeline.

    number: its place in the model, of `count`. rank: the pipeline rank that holds it. chunk: its place among that rank's stages.
    """

    number: int
    count: int
    rank: int
    chunk: int
    first_layer: int
    num_layers: int

    @property
    def is_first(self) -> bool:
        """Whether it holds the embedding."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether it holds the output layer, and computes the loss."""
        return self.number == self.count - 1


def whole_model(num_layers: int) -> Stage:
    """The one stage of a run without a pipeline."""
    return Stage(number=0, count=1, rank=0, chunk=0, first_layer=0, num_layers=num_layers)


def stages(parallel: ParallelConfig, num_layers: int) -> tuple[Stage, ...]:
    """All stages, in the order of the model. ValueError where the layers cannot be divided so."""
    size = parallel.pipeline_model_parallel_size
    per_rank = _layers_by_rank(parallel, num_layers)
    chunks = _chunks(parallel, per_rank)
    for rank, layers in enumerate(per_rank):
        if layers % chunks:
            raise ValueError(f"pipeline rank {rank} holds {layers} layers, which are not divisible by {chunks} virtual stages: "
                             "change --num-layers or --num-virtual-stages-per-pipeline-rank")
        if not layers:
            raise ValueError(f"pipeline rank {rank} would hold no layer: --num-layers {num_layers} over "
                             f"--pipeline-model-parallel-size {size}")
    found: list[Stage] = []
    first = 0
    for number in range(size * chunks):
        rank, chunk = number % size, number // size
        found.append(Stage(number=number, count=size * chunks, rank=rank, chunk=chunk, first_layer=first,
                           num_layers=per_rank[rank] // chunks))
        first += found[-1].num_layers
    return tuple(found)


def stages_of_rank(parallel: ParallelConfig, num_layers: int, rank: int) -> tuple[Stage, ...]:
    """Those of one pipeline rank, in the order of the model."""
    return tuple(stage for stage in stages(parallel, num_layers) if stage.rank == rank)


def _layers_by_rank(parallel: ParallelConfig, num_layers: int) -> list[int]:
    size = parallel.pipeline_model_parallel_size
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    fixed = [layers for layers in (first, last) if layers is not None]
    middle, left = size - len(fixed), num_layers - sum(fixed)
    if left < 0 or (middle == 0 and left) or (middle and left % middle):
        named = "" if not fixed else (f" less {sum(fixed)} of --decoder-first-pipeline-num-layers and "
                                      "--decoder-last-pipeline-num-layers")
        over = "--pipeline-model-parallel-size" if not fixed else "the other stages of --pipeline-model-parallel-size"
        raise ValueError(f"--num-layers {num_layers}{named} is not divisible by {over} ({middle}): the stages of the pipeline "
                         "need whole layers; --decoder-first-pipeline-num-layers N gives the first one another number")
    per_rank = [left // middle if middle else 0] * middle
    return ([first] if first is not None else []) + per_rank + ([last] if last is not None else [])


def _chunks(parallel: ParallelConfig, per_rank: list[int]) -> int:
    if parallel.num_virtual_stages_per_pipeline_rank is not None:
        return parallel.num_virtual_stages_per_pipeline_rank
    layers = parallel.num_layers_per_virtual_pipeline_stage
    if layers is None:
        return 1
    if len(set(per_rank)) > 1:
        raise ValueError("--num-layers-per-virtual-pipeline-stage needs stages of equal length: with "
                         "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers give "
                         "--num-virtual-stages-per-pipeline-rank instead")
    if per_rank[0] % layers:
        raise ValueError(f"--num-layers-per-virtual-pipeline-stage {layers} does not divide the {per_rank[0]} layers of a "
                         "pipeline rank")
    return per_rank[0] // layers
