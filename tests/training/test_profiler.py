"""--profile: traces of the named iterations and ranks, and marks for Nsight Systems."""

import gzip
import json
from dataclasses import replace

from megatron_lite.config.logging_settings import ProfilingConfig
from tests.support.ranks import run_ranks
from tests.support.runs import rows, run_to_end, tiny_run


def _config(folder, name, iterations=6, **profiling):
    config = tiny_run(metrics=folder / name, train_iters=iterations, eval_iters=0)
    return replace(
        config,
        logging=replace(config.logging, tensorboard_dir=str(folder / "tb")),
        profiling=ProfilingConfig(**profiling),
    )


def _run(rank, world_size, folder):
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


def test_a_trace_holds_the_named_iterations_of_the_named_rank(tmp_path):
    run_ranks(_run, 2, tmp_path)
    traces = list((tmp_path / "tb" / "torch_profile").iterdir())
    assert [trace.name for trace in traces] == ["rank-1.json.gz"]
    with gzip.open(traces[0]) as file:
        events = json.load(file)["traceEvents"]
    names = [event.get("name", "") for event in events]
    # two micro-batches in each of two iterations, on this rank
    assert names.count("aten::_fused_adamw_") == 2 * 2  # iterations, groups of weights
    matmuls = [event for event in events if event.get("name") == "aten::addmm"]
    assert matmuls and all("Input Dims" in event["args"] for event in matmuls)
    assert rows(tmp_path / "with") == rows(tmp_path / "without")
