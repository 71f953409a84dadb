"""Weights that ranks hold alike and that part: found at the next comparison, with rank and tensor,
and never saved."""

import pytest
import torch

from megatron_lite.training.step import TrainingError
from tests.support.rank_faults import SHAPES, during_iteration, in_shape, run_until_it_ends
from tests.support.ranks import run_ranks
from tests.support.runs import step_bytes, tiny_run, with_checkpoint

FC1, NORM, TIED = (
    "decoder.layers.0.mlp.linear_fc1.weight",
    "decoder.final_layernorm.weight",
    "embedding.word_embeddings.weight",
)


def run_config(shape, interval, **settings):
    return in_shape(
        tiny_run(
            train_iters=6,
            eval_iters=0,
            check_weight_hash_across_dp_replicas_interval=interval,
            **settings,
        ),
        shape,
    )


def _perturbed(rank, world_size, config, odd, name, state=None):
    """The error, and the last iteration, of a run in which one value of one rank changes by one ulp
    after iteration 3."""
    trainers = []

    class ULP:
        def __enter__(self): ...

        def __exit__(self, *_):
            if rank != odd:
                return
            trainer = trainers[0]
            trainer.optimizer.finish()
            if state is not None:
                target = trainer.optimizer.states[name][state]
            else:
                target = dict(trainer.model.named_parameters())[name]
            with torch.no_grad():
                flat = target.detach().view(-1)
                flat[5] = torch.nextafter(flat[5], torch.full_like(flat[5], 9.0))

    with pytest.MonkeyPatch.context() as monkeypatch:
        during_iteration(monkeypatch, (3,), ULP)
        trainer, error = run_until_it_ends(config, trainers.append)
    assert error is None or isinstance(error, TrainingError)
    return None if error is None else str(error), trainer.progress.iteration


# layout, rank, tensor, what it is of it
CASES = [
    ("dp2", 0, FC1, "exp_avg_sq"),
    ("zero1-overlap", 0, TIED, None),
    ("zero1-instances", 0, TIED, "exp_avg_sq"),
    ("tp2", 1, NORM, None),
    ("pp2", 1, TIED, None),
    ("dp2-overlap", 1, NORM, None),
    ("cp2", 1, FC1, None),
]


@pytest.mark.runs(ci=4)
@pytest.mark.parametrize("shape, odd, name, state", CASES)
def test_one_ulp_on_one_rank_is_found_and_named(shape, odd, name, state):
    """Of two copies nobody knows which is right: both are named."""
    config, ranks = run_config(shape, 3, model=dict(attention_dropout=0.0)), SHAPES[shape].ranks
    for error, iteration in run_ranks(_perturbed, ranks, config, odd, name, state):
        assert iteration == 3 and error is not None
        whole = name if state is None else f"{name}/{state}"
        assert f"rank 0: {whole}; rank {ranks // 2}: {whole}." in error


def test_drifted_weights_are_not_saved_and_the_last_checkpoint_leads_to_the_same_end(tmp_path):
    """The interval alone would not have found it before the save."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    config = run_config("dp2", 100)
    drifts, goes_on, never = (
        with_checkpoint(config, save=str(save), load=load, save_interval=2)
        for save, load in ((parts, None), (parts, str(parts)), (whole, None))
    )
    for error, iteration in run_ranks(_perturbed, 2, drifts, 0, FC1):
        assert iteration == 4 and error is not None and error.startswith("iteration 4: ")
    assert (parts / "latest_checkpointed_iteration.txt").read_text() == "2"
    for config in (goes_on, never):
        run_ranks(_perturbed, 2, config, None, FC1)
    assert step_bytes(parts, 6) and step_bytes(parts, 6) == step_bytes(whole, 6)
