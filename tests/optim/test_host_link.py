"""Copies of an optimizer on the host that run beside backward and the next forward change no bit,
and each is waited for before what it brings is read or overwritten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from arguments import parse_args
from megatron_lite.config.optimizer_settings import OptimizerConfig
from megatron_lite.optim import host_link
from megatron_lite.optim.host_link import HostLink
from tests.support.layouts import LAYOUTS, backward, build
from tests.support.models import tp_state
from tests.support.ranks import run_ranks
from tests.support.runs import rows, run_to_end, step_bytes, tiny_run
from tests.support.stand_in_device import run_watched
from tests.training.test_device_hot_path import GPT, SMALL
from tests.training.test_device_hot_path import LAYOUTS as FLAGS


class LateLink(HostLink):
    """Copies that another one may wait for take place at the last moment, in their order."""

    def _copy(self, side: Any, target: Any, source: Any) -> Any:
        returns = any(source.data_ptr() == one.data_ptr() for one in self._weights)
        late = _Late(self.__dict__.setdefault(f"queue {returns}", []), target, source)
        if returns and not self.overlaps:  # in the order of the current stream
            late.synchronize()
        return late

    def join(self) -> None:
        super().join()
        for late in self._taken.values():
            late.synchronize()

    def wait_for(self, name: str) -> None:
        if name in self._returning:
            self._returning.pop(name).synchronize()


class _Late:
    def __init__(self, queue: list[Any], target: Any, source: Any) -> None:
        self._queue, self._target, self._source = queue, target, source
        queue.append(self)

    def synchronize(self) -> None:
        while self in self._queue:
            first = self._queue.pop(0)
            first._target.copy_(first._source)


HOST = dict(optimizer_cpu_offload=True)
OVERLAPS = dict(HOST, overlap_cpu_optimizer_d2h_h2d=True)
# by name: the ranks, and the settings of tiny_run
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "fp16, some on the host, skipped steps": (
        1,
        dict(fp16=True, initial_loss_scale=2.0**20, hysteresis=1, optimizer_offload_fraction=0.4),
    ),
    "zero1, rounded": (
        2,
        dict(
            data_parallel=LAYOUTS["zero1, overlap"],
            bf16=True,
            use_precision_aware_optimizer=True,
            exp_avg_dtype="bf16",
            main_grads_dtype="bf16",
        ),
    ),
    "overlap in bf16, tp2": (
        4,
        dict(
            tp_size=2,
            sequence_parallel=True,
            bf16=True,
            overlap_grad_reduce=True,
            ddp_bucket_size=3000,
            grad_reduce_in_bf16=True,
        ),
    ),
    "tied, pp2": (2, dict(pipeline_model_parallel_size=2)),
    "muon, tp2": (2, dict(tp_size=2, optimizer="muon", bf16=True)),
    "replicated": (2, dict(optimizer="sgd")),
}


@pytest.mark.runs(daily=1, ci=3)
@pytest.mark.parametrize("name", CASES)
def test_overlap_changes_no_bit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, states and the log of clipped steps of several micro-batches, if copies take place
    as late and as early as they can."""
    ranks, settings = CASES[name]

    def work(rank: int, world_size: int) -> None:
        for folder, place in (("plain", HOST), ("early", OVERLAPS), ("late", OVERLAPS)):
            monkeypatch.setattr(host_link, "HostLink", LateLink if folder == "late" else HostLink)
            run_to_end(
                tiny_run(
                    **dict(settings, **place),
                    clip_grad=0.1,
                    learning_rate=0.01,
                    train_iters=4,
                    eval_iters=0,
                    save=str(tmp_path / folder),
                    metrics=tmp_path / f"{folder}.jsonl",
                )
            )

    run_ranks(work, ranks, detail=False) if ranks > 1 else work(0, 1)
    plain, *others = (rows(tmp_path / f"{one}.jsonl") for one in ("plain", "early", "late"))
    assert others == [plain] * 2 and all(
        row["grad_norm"] > 0.1 for row in plain if not row["skipped"]
    )
    assert any(row["skipped"] for row in plain) == ("skipped" in name)
    expected, *found = (step_bytes(tmp_path / one, 4) for one in ("plain", "early", "late"))
    assert found == [expected] * 2 and expected


def taken_during_backward(rank: int, world_size: int, tp_size: int, layout: str) -> list[str]:
    """The names of what is taken too late or too early, of three micro-batches."""
    settings = OptimizerConfig(**OVERLAPS)
    with tp_state(tp_size) as parallel, pytest.MonkeyPatch.context() as patch:
        model, optimizer = build(
            "gpt2", parallel, LAYOUTS[layout], settings=settings, sequence_parallel=tp_size > 1
        )
        names: list[str] = []
        patch.setattr(HostLink, "take", lambda self, name: names.append(name))
        backward(model, optimizer, parallel, 0, micro_batches=3)
        held = {piece.name: piece.spec.sum_grad_over_tp for piece in optimizer.layout.pieces}
        pending = held.keys() - {*names}
        assert len({*names}) == len(names)
        if tp_size > 1:
            pending ^= {name for name, is_partial in held.items() if is_partial}
            assert len(names) < len(held)
        if layout == "zero1, overlap":
            pending -= optimizer.buffer.buckets[-1].places.keys()
        return sorted(pending)


def test_every_final_gradient_leaves_during_backward() -> None:
    """All but those that a sum over TP ranks changes afterwards, and those of the last bucket."""
    assert taken_during_backward(0, 1, 1, "replicated") == []
    for tp_size, layout in ((1, "zero1, overlap"), (2, "replicated")):
        found = run_ranks(taken_during_backward, 2, tp_size, layout, detail=False)
        assert found == [[], []]


@pytest.mark.long
def test_streams_use_no_memory_in_no_order() -> None:
    """On a stand-in for a GPU: buckets of one gradient, two steps, rank 1 of 2."""

    def work(rank: int, world_size: int) -> dict[str, int]:
        dist.destroy_process_group()
        ranks, _, microbatches, flags = FLAGS["ZeRO-1, overlap"]
        flags = flags.replace("5000", "1")
        host = "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d"
        text = f"{SMALL} --num-layers 1 {GPT} {flags} {host}"
        config = parse_args(text.split()).config
        return run_watched(
            config, ranks - 1, world_size=ranks, num_microbatches=microbatches, steps=2
        )

    (faults,) = run_ranks(work, 1, detail=False)
    assert {fault for fault in faults if "no order" in fault or "freed" in fault} == set()
