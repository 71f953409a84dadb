"""--decoupled-lr: the word embedding and the output layer have a learning rate of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_lite.config.lr_schedule_settings import LrScheduleConfig
from megatron_lite.config.optimizer_settings import OptimizerConfig
from megatron_lite.config.run import RunConfig
from tests.support.layouts import LAYOUTS, backward, build
from tests.support.models import tp_state
from tests.support.ranks import run_ranks
from tests.support.runs import rows, run_to_end, step_bytes, tiny_run

ENDS = {"embedding.word_embeddings.weight", "output_layer.weight"}


def _weights(
    rank: int, world_size: int, layout: str, optimizer: str, variant: str
) -> list[dict[str, Tensor]]:
    """The weights after a step at rate 0.02, at 0.005, and at 0.02 with 0.005 at the ends."""
    found = []
    with tp_state(1) as parallel:
        for rate, ends in ((0.02, None), (0.005, None), (0.02, 0.005)):
            model, updater = build(
                variant,
                parallel,
                LAYOUTS[layout],
                settings=OptimizerConfig(optimizer=optimizer, weight_decay=0.1),
            )
            backward(model, updater, parallel, 0)
            updater.step(rate, decoupled_learning_rate=ends)
            updater.finish()
            names = [name for name, _ in model.named_parameters()]
            found.append({name: updater.weight(name).detach().clone() for name in names})
    return found


@pytest.mark.parametrize(
    ("layout", "optimizer", "variant"),
    [
        ("replicated", "adam", "llama"),
        ("zero1", "muon", "gpt2"),
        ("fsdp2", "adam", "llama"),
        *(
            pytest.param(layout, optimizer, variant, marks=pytest.mark.long)
            for layout in LAYOUTS
            for optimizer in ("adam", "muon")
            for variant in ("gpt2", "llama")
        ),
    ],
)
def test_the_ends_are_updated_at_their_rate_and_all_else_at_the_other(
    layout: str, optimizer: str, variant: str
) -> None:
    for every, ends, both in run_ranks(_weights, 2, layout, optimizer, variant, detail=False):
        assert ENDS & set(both)
        for name, weight in both.items():
            expected, other = (ends, every) if name in ENDS else (every, ends)
            assert torch.equal(weight, expected[name]), name
            assert not torch.equal(weight, other[name]), name


def _config(folder: Path, name: str, *, load: bool, exit_interval: int | None = None) -> RunConfig:
    config = tiny_run(
        training=dict(train_iters=6, exit_interval=exit_interval, eval_iters=0, bf16=True),
        metrics=folder / f"{name}.jsonl",
        checkpoint=dict(save=str(folder / name), load=str(folder / name) if load else None),
        model=dict(untie_embeddings_and_output_weights=True),
    )
    schedule = LrScheduleConfig(
        lr=0.01, lr_decay_style="cosine", lr_warmup_iters=2, decoupled_lr=0.04, min_lr=0.001
    )
    return replace(config, lr_schedule=schedule)


def test_a_run_with_a_decoupled_rate_is_resumed_bit_for_bit_and_logs_it(tmp_path: Path) -> None:
    run_to_end(_config(tmp_path, "whole", load=False))
    run_to_end(_config(tmp_path, "parts", load=False, exit_interval=3))
    run_to_end(_config(tmp_path, "parts", load=True))
    assert rows(tmp_path / "parts.jsonl") == rows(tmp_path / "whole.jsonl")
    assert step_bytes(tmp_path / "parts", 6) == step_bytes(tmp_path / "whole", 6)
    rates = [
        (row["learning_rate"], row["decoupled_learning_rate"])
        for row in rows(tmp_path / "whole.jsonl")
    ]
    assert rates[:3] == [(0.0, 0.0), (0.005, 0.02), (0.01, 0.04)]
    # both are the same share of the way to --min-lr
    for rate, decoupled in rates[2:]:
        assert (decoupled - 0.001) / 0.039 == pytest.approx((rate - 0.001) / 0.009, rel=1e-12)
    assert (
        f"| learning rate: {rates[5][0]:.6E} | decoupled learning rate: {rates[5][1]:.6E} | "
        "global batch size:     4 |"
    ) in (tmp_path / "whole" / "train.log").read_text()
