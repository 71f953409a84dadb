"""Weights that ranks hold alike and that part: found at the next comparison, with rank and tensor,
and never saved."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.config.data_parallel import DataParallelConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.training.loop import Trainer
from megatron_lite.training.step import TrainingError
from tests.support.pairs import only
from tests.support.rank_faults import SHAPES, during_iteration, in_shape, run_until_it_ends
from tests.support.ranks import run_ranks
from tests.support.runs import step_bytes, tiny_run, with_checkpoint

FC1, NORM, TIED = (
    "decoder.layers.0.mlp.linear_fc1.weight",
    "decoder.final_layernorm.weight",
    "embedding.word_embeddings.weight",
)


def run_config(shape: str, interval: int | None, **settings: Any) -> RunConfig:
    training = dict(
        train_iters=6, eval_iters=0, check_weight_hash_across_dp_replicas_interval=interval
    )
    return in_shape(tiny_run(training=training, **settings), shape)


def _perturbed(
    rank: int,
    world_size: int,
    config: RunConfig,
    odd: int | None,
    name: str,
    state: str | None = None,
    sign: bool = False,
) -> tuple[str | None, int]:
    """The error, and the last iteration, of a run in which one value of one rank changes by one ulp
    after iteration 3."""
    trainers: list[Trainer] = []

    class ULP:
        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None:
            if rank != odd:
                return
            trainer = trainers[0]
            trainer.optimizer.finish()
            if state is not None or not trainer.optimizer.layout.replicates_weights:
                piece = next(
                    piece for piece in trainer.optimizer.layout.pieces if piece.name == name
                )
                target = piece.master if state is None else trainer.optimizer.states[name][state]
            else:
                target = dict(trainer.model.named_parameters())[name]
            with torch.no_grad():
                flat = target.detach().view(-1)
                flat[5] = (
                    -flat[5] if sign else torch.nextafter(flat[5], torch.full_like(flat[5], 9.0))
                )

    with pytest.MonkeyPatch.context() as monkeypatch:
        during_iteration(monkeypatch, (3,), ULP)
        trainer, error = run_until_it_ends(config, trainers.append)
    assert error is None or isinstance(error, TrainingError)
    return None if error is None else str(error), trainer.progress.iteration


# layout, rank, tensor, what it is of it; whom the message names
CASES = [
    ("dp2", 1, FC1, None, f"rank 0: {FC1}; rank 1: {FC1}."),
    ("dp2", 0, FC1, "exp_avg_sq", f"rank 0: {FC1}/exp_avg_sq; rank 1: {FC1}/exp_avg_sq."),
    ("dp2-overlap", 1, NORM, None, f"rank 0: {NORM}; rank 1: {NORM}."),
    ("zero1", 1, FC1, None, f"rank 0: {FC1}; rank 1: {FC1}."),
    ("zero1-overlap", 0, TIED, None, f"rank 0: {TIED}; rank 1: {TIED}."),
    ("tp2", 1, NORM, None, f"rank 0: {NORM}; rank 1: {NORM}."),
    ("cp2", 1, FC1, None, f"rank 0: {FC1}; rank 1: {FC1}."),
    ("pp2", 1, TIED, None, f"rank 0: {TIED}; rank 1: {TIED}."),
]


@pytest.mark.parametrize(("shape", "odd", "name", "state", "named"), only(CASES, 1, 4, 5, 7))
def test_one_ulp_on_one_rank_is_found_and_named(
    shape: str, odd: int, name: str, state: str | None, named: str
) -> None:
    """Of two copies nobody knows which is right: both are named."""
    config = run_config(shape, 3, model=dict(attention_dropout=0.0))
    for error, iteration in run_ranks(_perturbed, 2, config, odd, name, state, detail=False):
        assert iteration == 3 and error is not None
        assert error.startswith(f"iteration 3: ranks no longer hold the same weights: {named}"), (
            error
        )


def test_a_sign_that_nothing_else_would_see_is_found() -> None:
    """A moment that is zero: -0.0 == 0.0."""
    config = run_config("dp2", 3)
    # rows that are never read
    config = replace(config, tokenizer=replace(config.tokenizer, make_vocab_size_divisible_by=200))
    name = TIED

    def padding(rank: int, world_size: int) -> tuple[str | None, int]:
        return _perturbed(rank, world_size, config, 1, name, "exp_avg", sign=True)

    assert all(
        error is not None and f"{name}/exp_avg" in error
        for error, _ in run_ranks(padding, 2, detail=False)
    )


@pytest.mark.parametrize("bf16", [False, True])
def test_of_four_copies_the_odd_one_is_named_alone(bf16: bool) -> None:
    config = run_config("dp2", 2)
    config = replace(config, training=replace(config.training, bf16=bf16))
    found = run_ranks(_perturbed, 4, config, 2, FC1, "master" if bf16 else None, detail=False)
    for error, iteration in found:
        # The ulp comes after iteration 3 and is found after iteration 4, in which it has gone into
        # the moments of no other rank.
        assert iteration == 4 and re.match(rf"iteration 4: [^:]*: rank 2: {re.escape(FC1)}", error)


def test_weights_of_tensor_parallel_ranks_under_fsdp2_are_compared_too() -> None:
    config = run_config("fsdp2", 3)
    config = replace(config, parallel=replace(config.parallel, tensor_model_parallel_size=2))
    for error, _ in run_ranks(_perturbed, 4, config, 1, NORM, detail=False):
        assert error is not None and f"rank 0: {NORM}; rank 1: {NORM}." in error


@pytest.mark.parametrize(
    "shape",
    only(
        ["dp2", "tp2", "alone", "pp2", "cp2", "dp2-overlap", "zero1", "zero1-overlap", "fsdp2"], 0
    ),
)
def test_without_a_fault_nothing_is_found_and_no_bit_changes(tmp_path: Path, shape: str) -> None:
    for name, interval in (("plain", None), ("compared", 1)):
        config = run_config(
            shape,
            interval,
            model=dict(attention_dropout=0.0),
            checkpoint=dict(save=str(tmp_path / name)),
        )
        assert {
            error
            for error, _ in run_ranks(
                _perturbed, SHAPES[shape].ranks, config, None, FC1, detail=False
            )
        } == {None}
    assert step_bytes(tmp_path / "plain", 6) == step_bytes(tmp_path / "compared", 6)


def test_drifted_weights_are_not_saved_and_the_last_checkpoint_leads_to_the_same_end(
    tmp_path: Path,
) -> None:
    """The interval alone would not have found it before the save."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    config = run_config("dp2", 100)
    saves = dict(save_interval=2)
    for error, iteration in run_ranks(
        _perturbed, 2, with_checkpoint(config, save=str(parts), **saves), 0, FC1, detail=False
    ):
        assert iteration == 4 and error is not None and error.startswith("iteration 4: ")
    assert (parts / "latest_checkpointed_iteration.txt").read_text() == "2" and not (
        parts / "iter_0000004"
    ).exists()
    run_ranks(
        _perturbed,
        2,
        with_checkpoint(config, save=str(parts), load=str(parts), **saves),
        None,
        FC1,
        detail=False,
    )
    run_ranks(
        _perturbed, 2, with_checkpoint(config, save=str(whole), **saves), None, FC1, detail=False
    )
    assert step_bytes(parts, 6) and step_bytes(parts, 6) == step_bytes(whole, 6)


def test_without_the_flag_drift_goes_unseen() -> None:
    """Which is why there is one."""
    assert (
        run_ranks(_perturbed, 2, run_config("dp2", None), 0, FC1, detail=False) == [(None, 6)] * 2
    )


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ("alone", "compares nothing over data-parallel ranks: there is one\n"),
        (
            "tp2",
            (
                "there is one (weights that tensor-parallel ranks or the ends of the pipeline hold "
                "alike are)\n"
            ),
        ),
        ("fsdp2", "compares nothing over data-parallel ranks: --use-torch-fsdp2 keeps one copy\n"),
        ("dp2", ""),
    ],
)
def test_what_is_not_compared_is_said(
    capfd: pytest.CaptureFixture[str], shape: str, said: str
) -> None:
    with nullcontext():
        run_ranks(_perturbed, SHAPES[shape].ranks, run_config(shape, 2), None, FC1, detail=False)
    printed = capfd.readouterr().out
    assert said in printed and ("compares nothing" in printed) == bool(said)


def test_the_interval_must_be_a_number_of_iterations() -> None:
    with pytest.raises(
        ValueError, match="--check-weight-hash-across-dp-replicas-interval must be at least 1"
    ):
        run_config("dp2", 0)
    assert DataParallelConfig() == SHAPES["dp2"].data_parallel
