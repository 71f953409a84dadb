"""The schedules beside those of torch.distributed.pipelining, which this project does not use at
run time."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_lite.pipeline.order import Action, order
from tests.support.ranks import run_ranks


def theirs(size: int, num_chunks: int, microbatches: int) -> list[list[Action]]:
    """What torch's schedule does on every rank. Idle slots are left out."""

    def work(rank, world_size):
        dist.destroy_process_group()
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
        example = torch.zeros(1)
        stages = [
            PipelineStage(
                nn.Identity(),
                chunk * size,
                size * num_chunks,
                torch.device("cpu"),
                input_args=(example,),
                output_args=(example,),
            )
            for chunk in range(num_chunks)
        ]
        schedule = ScheduleInterleaved1F1B(
            stages, microbatches, loss_fn=lambda output, target: output.sum()
        )
        return [
            [
                Action(
                    "forward" if one.computation_type.name == "FORWARD" else "backward",
                    one.microbatch_index,
                    one.stage_index // size,
                )
                for one in schedule.pipeline_order[rank]
                if one is not None
            ]
            for rank in range(size)
        ]

    return run_ranks(work, 1, detail=False)[0]


@pytest.mark.parametrize(
    ("size", "num_chunks", "microbatches"), [(2, 2, 4), (3, 2, 6), (4, 2, 8), (4, 3, 4)]
)
def test_the_interleaved_order_is_torchs(size, num_chunks, microbatches):
    ours = [
        order(size=size, rank=rank, num_microbatches=microbatches, num_chunks=num_chunks)
        for rank in range(size)
    ]
    assert ours == theirs(size, num_chunks, microbatches)
