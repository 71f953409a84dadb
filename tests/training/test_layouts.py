"""The kept bytes of runs whose weights are sharded over data-parallel ranks."""

from __future__ import annotations

from dataclasses import replace

from megatron_lite.config.recompute import RecomputeConfig
from tests.support.layouts import LAYOUTS
from tests.support.ranks import run_ranks
from tests.support.runs import run_to_end, tiny_run

POLICIES = ("*:full/2", "*:pointwise@host", "*:core_attn+mlp", "*:ops(matmul)")


def test_kept_bytes_are_as_predicted_with_recomputation_and_sharded_weights() -> None:
    config = tiny_run(
        data_parallel=LAYOUTS["fsdp2, memory-efficient"],
        untie_embeddings_and_output_weights=True,
        train_iters=1,
        eval_iters=0,
    )

    def work(rank: int, world_size: int) -> list[str | None]:
        settings = (
            RecomputeConfig(recompute_policy=one, recompute_verify=True) for one in POLICIES
        )
        runs = [run_to_end(replace(config, recompute=one)) for one in settings]
        return [run.activation_bytes.fault for run in runs]

    assert run_ranks(work, 2, detail=False) == [[None] * len(POLICIES)] * 2
