"""The distributed optimizer: whose weights are gathered, when they are waited for, and what each
rank keeps."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_lite.config.parallel import DataParallelConfig
from megatron_lite.optim import layouts
from megatron_lite.parallel.collectives import start_all_gather_into_
from tests.support.collectives import recorded_collectives
from tests.support.layouts import LAYOUTS, backward, build, differing, train
from tests.support.models import on_ranks

BUCKETS = DataParallelConfig(
    use_distributed_optimizer=True,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    ddp_bucket_size=1,
)


class LateGather(NamedTuple):
    """A gather that moves nothing until somebody waits for it: whoever does not, reads old
    weights."""

    gathered: Tensor
    own: Tensor
    group: Any

    def wait(self):
        return start_all_gather_into_(*self).wait()


@pytest.mark.runs(ci=4)
@pytest.mark.parametrize(
    "name, chunk_size", [("gpt2", None), ("gpt2", 7), ("llama", None), ("llama", 7)]
)
def test_every_weight_is_waited_for_before_it_is_used(name, chunk_size, monkeypatch):
    """Also an output weight, tied or not, that is read without a call of its module."""

    def work(parallel):
        options = dict(steps=2, rate=0.1, dtype=torch.float32, loss_chunk_size=chunk_size)
        expected = train(name, parallel, LAYOUTS["replicated"], **options)
        monkeypatch.setattr(layouts, "start_all_gather_into_", LateGather)
        return differing(expected, train(name, parallel, BUCKETS, **options))

    assert on_ranks(work, 2, detail=False) == [[], []]


def test_instances_sum_gradients_within_and_then_their_shares_across():
    """Of n elements an instance of 2 ranks sends n, and each rank half of them to the other one.
    FSDP2 sends rows across in the last micro-batch alone, after each unit's reduction."""

    def work(parallel):
        model, optimizer = build("gpt2", parallel, LAYOUTS["zero1"], dtype=torch.float32)
        number = sum(one.flat.numel() for one in optimizer.layout.gradients.buckets)
        backward(model, optimizer, parallel, 0, micro_batches=3)
        with recorded_collectives() as sent:
            optimizer.step(0.0)
        model, optimizer = build("gpt2", parallel, LAYOUTS["fsdp2"], dtype=torch.float32)
        with recorded_collectives() as rows:
            backward(model, optimizer, parallel, 0, micro_batches=3)
        shared = [(one.name, one.shape[0]) for one in sent if one.shape[:1] > (1,)]
        return number, shared, [one.name for one in rows if one.shape]

    for number, sent, rows in on_ranks(work, 4, num_distributed_optimizer_instances=2):
        assert sent == [
            ("_reduce_scatter_base_", number),
            ("allreduce_", number // 2),
            ("_allgather_base_", number),
        ]
        units = rows.count("_reduce_scatter_base_") // 3
        last = [one for one in rows if "gather" not in one][2 * units :]
        assert units > 1 and last == ["_reduce_scatter_base_", "allreduce_"] * units
