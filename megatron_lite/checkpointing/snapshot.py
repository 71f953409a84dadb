"""Collects the files that a rank writes for a step: tensors on the CPU, and texts.

With copied tensors, training can go on while another thread writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from megatron_lite.checkpointing.metadata import Metadata, Progress
from megatron_lite.checkpointing.shards import layouts_of, owned_rows
from megatron_lite.checkpointing.step_files import (
    CONFIG,
    METADATA,
    parameters_file,
    rng_file,
    shard_file,
)
from megatron_lite.config.run import RunConfig
from megatron_lite.optim.lr_schedule import LrSchedule
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.collectives import all_gather_first_dim
from megatron_lite.parallel.parameter_spec import saved_state, spec_of
from megatron_lite.parallel.state import ParallelState


class Snapshot(NamedTuple):
    """The files that this rank writes for a step: tensors and texts, by the names of the files."""

    iteration: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    texts: Mapping[str, bytes]


def take_snapshot(
    config: RunConfig,
    parallel: ParallelState,
    model: nn.Module,
    optimizer: Optimizer,
    progress: Progress,
    *,
    data: Mapping[str, Any],
    copy: bool,
    schedule: LrSchedule | None = None,
    computed_on: str = "",
    tokenizer: Mapping[str, bytes] | None = None,
) -> Snapshot:
    """Returns the files that this rank writes for a step.

    Every rank must call this. Tensors that are sharded over data-parallel ranks, and experts that
    are spread over them, are gathered, one parameter at a time.

    copy: whether to copy all tensors, so that later training steps do not change the snapshot.
    Otherwise tensors on a CPU are the model's own tensors, and the caller must write them before
    the next step.
    schedule: the learning-rate schedule of the run.
    computed_on: the processor of rank 0 and its libraries; "" if a reader need not know.
    tokenizer: the contents of the tokenizer's files, which rank 0 writes; None: none.
    """
    metadata = Metadata(
        progress=progress,
        tp_size=parallel.tp_size,
        dp_size=parallel.dp_size,
        pp_size=parallel.pp_size,
        cp_size=parallel.cp_size,
        num_updates=optimizer.num_updates,
        parameters=layouts_of(model, parallel.pp_rank),
        data=data,
        schedule=schedule,
        computed_on=computed_on,
        loss_scale=None if optimizer.loss_scale is None else optimizer.loss_scale.state(),
        mean_loss=None if optimizer.spikes is None else optimizer.spikes.state(),
    )
    tensors: dict[str, Mapping[str, Tensor]] = {}
    texts: dict[str, bytes] = {}
    held: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
    # Gathering a parameter is a collective, so every data-parallel rank must run the loop.
    for name, parameter in saved_state(model).items():
        weight, states = parameter, {}
        if isinstance(parameter, nn.Parameter):
            weight, states = optimizer.weight(name), optimizer.whole_states(name)
        spec = spec_of(parameter)
        place = parallel.holding(spec)
        if spec.of_experts:
            weight = all_gather_first_dim(weight.detach(), place.ep_group)
            states = {key: all_gather_first_dim(one, place.ep_group) for key, one in states.items()}
        if parallel.dp_cp_rank != 0:
            continue
        for kind, key, tensor in (
            ("model", name, weight),
            *(("optimizer", f"{name}/{key}", state) for key, state in states.items()),
        ):
            rows = owned_rows(
                tensor,
                spec,
                tp_rank=parallel.tp_rank,
                tp_size=parallel.tp_size,
                is_whole=place.tp_size < parallel.tp_size,
            )
            if rows is not None:
                held[kind][key] = rows.to("cpu", copy=copy)
    if parallel.dp_cp_rank == 0:
        for kind, own in held.items():
            tensors[shard_file(kind, parallel.pp_rank, parallel.tp_rank, parallel.tp_size)] = own
        if parallel.tp_rank == 0:
            layouts = metadata.parameters_to_json(parallel.pp_rank)
            texts[parameters_file(parallel.pp_rank)] = layouts.encode()
    tensors[rng_file(parallel.rank)] = parallel.rng.snapshot().states
    if parallel.rank == 0:
        texts |= {CONFIG: config.to_json().encode(), METADATA: metadata.to_json().encode()}
        texts |= tokenizer or {}
    return Snapshot(progress.iteration, tensors, texts)
