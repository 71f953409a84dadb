"""Whole runs with --context-parallel-size: data, loss, evaluation, checkpoints, reports."""

import pytest

from megatron_lite.training.evaluate import mean_loss
from tests.support import equality
from tests.support.layouts import LAYOUTS
from tests.support.rank_faults import NO_DROPOUT
from tests.support.ranks import run_ranks
from tests.support.runs import rows, run_to_end, tiny_run

LLAMA = dict(
    NO_DROPOUT, **equality.LLAMA, ffn_hidden_size=48, group_query_attention=True, num_query_groups=2
)
ITERATIONS = 10


def validated(rank, world_size, config):
    trainer = run_to_end(config)
    assert trainer.datasets.valid is not None
    return mean_loss(trainer, trainer.datasets.valid)


@pytest.mark.runs
@pytest.mark.parametrize(
    "model, world_size, layout, data_parallel",
    [
        (NO_DROPOUT, 2, {}, LAYOUTS["replicated"]),
        (NO_DROPOUT, 2, {}, LAYOUTS["fsdp2"]),
        (LLAMA, 4, dict(cp_comm_type="allgather"), LAYOUTS["zero1, overlap"]),
        (LLAMA, 4, dict(pipeline_model_parallel_size=2), LAYOUTS["replicated"]),
    ],
)
def test_ten_losses_and_the_validation_loss_are_those_of_one_rank(
    tmp_path, model, world_size, layout, data_parallel
):
    places = dict(layout, context_parallel_size=2, data_parallel=data_parallel)
    one, several = (
        tiny_run(**model, **place, train_iters=ITERATIONS, metrics=tmp_path / name)
        for name, place in (("one", {}), ("several", places))
    )
    alone = validated(0, 1, one)
    of_ranks = run_ranks(validated, world_size, several, detail=False)
    expected, found = rows(tmp_path / "one"), rows(tmp_path / "several")
    for field in ("lm_loss", "grad_norm"):
        assert [row[field] for row in found] == pytest.approx(
            [row[field] for row in expected], rel=1e-5
        )
    assert (
        len(found) == ITERATIONS
        and set(of_ranks) == {of_ranks[0]}
        and of_ranks[0] == pytest.approx(alone, rel=1e-5)
    )
    assert {
        row["activation_bytes_predicted"] == row["activation_bytes_measured"] for row in found
    } == {True}
