"""--profile: traces of the named iterations and ranks, and marks for Nsight Systems."""

from __future__ import annotations

import gzip
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lite.config.logging_settings import ProfilingConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.training import profiler
from megatron_lite.training.profiler import Profiler
from tests.support.ranks import run_ranks
from tests.support.runs import rows, run_to_end, tiny_run


def _config(folder: Path, name: str, iterations: int = 6, **profiling: Any) -> RunConfig:
    config = tiny_run(metrics=folder / name, train_iters=iterations, eval_iters=0)
    return replace(
        config,
        logging=replace(config.logging, tensorboard_dir=str(folder / "tb")),
        profiling=ProfilingConfig(**profiling),
    )


def _run(rank: int, world_size: int, folder: Path) -> None:
    run_to_end(_config(folder, "without"))
    run_to_end(
        _config(
            folder,
            "with",
            profile=True,
            use_pytorch_profiler=True,
            pytorch_profiler_collect_shapes=True,
            profile_step_start=2,
            profile_step_end=4,
            profile_ranks=(1,),
        )
    )


def test_a_trace_holds_the_named_iterations_of_the_named_rank(tmp_path: Path) -> None:
    run_ranks(_run, 2, tmp_path, detail=False)
    traces = list((tmp_path / "tb" / "torch_profile").iterdir())
    assert [trace.name for trace in traces] == ["rank-1.json.gz"]
    with gzip.open(traces[0]) as file:
        events = json.load(file)["traceEvents"]
    names = [event.get("name", "") for event in events]
    # two micro-batches in each of two iterations, on this rank
    assert names.count("aten::_fused_adamw_") == 2 * 3  # iterations, groups of weights
    matmuls = [event for event in events if event.get("name") == "aten::addmm"]
    assert matmuls and all("Input Dims" in event["args"] for event in matmuls)
    assert rows(tmp_path / "with") == rows(tmp_path / "without")


class _Cuda:
    """Notes what is called of torch.cuda."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        note = self.calls.append
        cudart = SimpleNamespace(
            cudaProfilerStart=lambda: note("start"), cudaProfilerStop=lambda: note("stop")
        )
        patch.setattr(torch.cuda, "cudart", lambda: cudart)
        patch.setattr(torch.cuda.nvtx, "range_push", note)
        patch.setattr(torch.cuda.nvtx, "range_pop", lambda: note("pop"))
        patch.setattr(
            torch.autograd.profiler,
            "emit_nvtx",
            lambda record_shapes: note(f"operators, shapes {record_shapes}") or nullcontext(),
        )
        patch.setattr(profiler, "record_memory_history", lambda max_entries: note("history"))
        patch.setattr(profiler, "write_memory_history", lambda path: note(Path(path).name))


@pytest.mark.parametrize("first", [1, 3])
def test_iterations_are_marked_for_nsight_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """Also if the run begins between them."""
    cuda = _Cuda(monkeypatch)
    config = _config(
        tmp_path, "m", profile=True, profile_step_start=1, profile_step_end=3, nvtx_ranges=True
    )
    profiler = Profiler(config, SimpleNamespace(rank=0, device=torch.device("cuda")))
    for iteration in range(first, 6):
        profiler.begin(iteration)
        assert profiler.end(iteration) == []
    marked = [word for n in range(max(first, 2), 4) for word in (f"iteration {n}", "pop")]
    assert cuda.calls == ["start", "operators, shapes False", *marked, "stop"]


def test_allocations_are_written_at_each_log_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = _Cuda(monkeypatch)
    config = _config(tmp_path, "m", record_memory_history=True, memory_snapshot_path="a/s.pickle")
    profiler = Profiler(config, SimpleNamespace(rank=3, device=torch.device("cuda")))
    for iteration in range(1, 11):
        profiler.begin(iteration)
        profiler.end(iteration)
    assert cuda.calls == ["history", "s_3.pickle", "s_3.pickle"]
