"""--profile: traces of the named iterations and ranks, and marks for Nsight Systems."""

import gzip
import json

from tests.support.ranks import run_ranks
from tests.support.runs import rows, run_to_end, tiny_run


def test_a_trace_holds_the_named_iterations_of_the_named_rank(tmp_path):
    def run(name, **profiling):
        return run_to_end(
            tiny_run(
                metrics=tmp_path / name,
                train_iters=6,
                eval_iters=0,
                tensorboard_dir=str(tmp_path / "tb"),
                **profiling,
            )
        )

    def work(rank, world_size):
        run("without")
        traced = run(
            "with",
            log_peak_memory=True,
            profile=True,
            use_pytorch_profiler=True,
            pytorch_profiler_collect_shapes=True,
            profile_step_start=1,
            profile_step_end=3,
            profile_ranks=(1,),
        )
        assert traced.peak  # of the first step that is not profiled

    run_ranks(work, 2)
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
