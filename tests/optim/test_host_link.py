"""Copies of an optimizer on the host that run beside backward and the next forward change no bit,
and each is waited for before what it brings is read or overwritten."""

from typing import Any, NamedTuple

import pytest
from torch import Tensor

from megatron_lite.config import optimizer_settings
from megatron_lite.config.optimizer_settings import OptimizerConfig
from megatron_lite.optim import layouts
from megatron_lite.optim.host_link import HostLink
from megatron_lite.parallel.parameter_spec import spec_of
from tests.support.layouts import LAYOUTS, SMALL, backward, build
from tests.support.models import on_ranks
from tests.support.ranks import run_ranks
from tests.support.runs import rows, run_to_end, step_bytes, tiny_run
from tests.training.test_device_hot_path import GPT, faults_of
from tests.training.test_resume import MUON, ROUNDED, SCALE, SEQUENCE


class LateLink(HostLink):
    """Copies that another one may wait for take place at the last moment, in their order."""

    def _copy(self, side, target, source):
        returns = any(source.data_ptr() == one.data_ptr() for one in self._weights)
        queue = vars(self).setdefault(f"queue {returns}", [])
        queue.append(late := Late(queue, target, source))
        if returns and not self.overlaps:  # in the order of the current stream
            late.synchronize()
        return late

    def join(self):
        super().join()
        for late in self._taken.values():
            late.synchronize()

    def wait_for(self, name):
        if name in self._returning:
            self._returning.pop(name).synchronize()


class Late(NamedTuple):
    queue: list[Any]
    target: Tensor
    source: Tensor

    def synchronize(self):
        while any(one is self for one in self.queue):
            _, target, source = self.queue.pop(0)
            target.copy_(source)


HOST, FOLDERS = dict(optimizer_cpu_offload=True), ("plain", "late, plain", "early", "late")
# by name: the ranks, and the settings of tiny_run
CASES = {
    "fp16, some on the host, skipped steps": (
        1,
        dict(SCALE, loss_scale_window=9.0, optimizer_offload_fraction=0.4),
    ),
    "zero1, rounded": (2, dict(ROUNDED, data_parallel=LAYOUTS["zero1, overlap"], bf16=True)),
    "overlap in bf16, tp2": (4, dict(SEQUENCE, **SMALL, grad_reduce_in_bf16=True, bf16=True)),
    "tied, pp2": (2, dict(pipeline_model_parallel_size=2)),
    "muon, tp2": (2, dict(MUON, tp_size=2)),
}


@pytest.mark.runs
@pytest.mark.parametrize("name", CASES)
def test_overlap_changes_no_bit(name, tmp_path, monkeypatch):
    """Weights, states and the log of clipped steps of several micro-batches, if copies take place
    as late and as early as they can."""
    ranks, settings = CASES[name]
    monkeypatch.setattr(optimizer_settings, "PART", 1000)  # elements, of up to 4096

    def work(rank, world_size):
        for folder in FOLDERS:
            monkeypatch.setattr(layouts, "HostLink", LateLink if "late" in folder else HostLink)
            run_to_end(
                tiny_run(
                    **dict(settings, **HOST, overlap_cpu_optimizer_d2h_h2d="plain" not in folder),
                    clip_grad=1e-3,
                    learning_rate=0.01,
                    train_iters=4,
                    eval_iters=0,
                    save=tmp_path / folder,
                    metrics=tmp_path / f"{folder}.jsonl",
                )
            )

    run_ranks(work, ranks, detail=False) if ranks > 1 else work(0, 1)
    plain, *others = (rows(tmp_path / f"{one}.jsonl") for one in FOLDERS)
    assert others == [plain] * 3
    assert any(row["skipped"] for row in plain) == ("skipped" in name)
    expected, *found = (step_bytes(tmp_path / one, 4) for one in FOLDERS)
    assert found == [expected] * 3 and expected


@pytest.mark.parametrize(
    "ranks, tp_size, layout", [(1, 1, "replicated"), (2, 2, "replicated"), (2, 1, "zero1, overlap")]
)
def test_every_final_gradient_leaves_during_backward(ranks, tp_size, layout, monkeypatch):
    """Before a step of three micro-batches ends. All but those that a sum over TP ranks changes
    afterwards, and those of the last bucket."""
    settings = OptimizerConfig(**HOST, overlap_cpu_optimizer_d2h_h2d=True)

    def work(parallel):
        names = []
        monkeypatch.setattr(HostLink, "take", lambda self, name: names.append(name))
        model, optimizer = build(
            "gpt2", parallel, LAYOUTS[layout], settings=settings, sequence_parallel=tp_size > 1
        )
        backward(model, optimizer, parallel, 0, micro_batches=3)
        final = {
            name
            for name, one in model.named_parameters()
            if tp_size == 1 or not spec_of(one).sum_grad_over_tp
        }
        if parallel.dp_cp_group is not None:
            final -= optimizer.layout.gradients.buckets[-1].places.keys()
        assert sorted(names) == sorted(final) != []

    on_ranks(work, ranks, tp_size=tp_size, detail=False)


@pytest.mark.long
def test_streams_use_no_memory_in_no_order():
    """On a stand-in for a GPU. The host reads values of the device there, unlike without it."""
    flags = "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d"
    (faults,) = faults_of(("ZeRO-1, overlap", GPT, flags, 2)).values()
    assert not any("no order" in fault or "freed" in fault for fault in faults)
