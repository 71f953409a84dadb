"""The seam between optimizer and update rule: a third rule, with states of its own, needs an
entry in two tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_lite.config.data_parallel import DataParallelConfig
from megatron_lite.config.optimizer_settings import OPTIMIZERS, OptimizerConfig, StateBytes
from megatron_lite.config.run import RunConfig
from megatron_lite.optim.optimizer import RULES
from megatron_lite.optim.pieces import Layout
from megatron_lite.optim.update_rule import LearningRates
from megatron_lite.parallel.parameter_spec import ParameterSpec
from megatron_lite.parallel.state import ParallelState
from tests.support.ranks import run_ranks
from tests.support.runs import rows, run_to_end, step_bytes, tiny_run, with_checkpoint

NAME = "heavy_ball"


class HeavyBall:
    """velocity <- 0.9 velocity + gradient; weight <- weight - rate velocity. Vectors have no
    velocity."""

    def __init__(
        self,
        layout: Layout,
        specs: Mapping[str, ParameterSpec],
        config: OptimizerConfig,
        parallel: ParallelState,
    ) -> None:
        self._pieces, self._specs = list(layout.pieces), specs
        self.states = {
            piece.name: {
                key: torch.zeros_like(piece.master) for key in self.state_names(piece.name)
            }
            for piece in self._pieces
        }

    def state_names(self, parameter: str) -> tuple[str, ...]:
        return ("velocity",) if len(self._specs[parameter].global_shape) > 1 else ()

    @torch.no_grad()
    def step(self, rates: LearningRates, skipped: Tensor) -> None:
        made = 1.0 - skipped
        for piece in self._pieces:
            moved = piece.grad.clone()
            for velocity in self.states[piece.name].values():
                moved = velocity.copy_(torch.lerp(velocity, 0.9 * velocity + piece.grad, made))
            piece.master.sub_(moved * rates.every * made)

    def set_num_updates(self, number: int) -> None:
        """Counts nothing."""


@pytest.fixture(autouse=True)
def entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, NAME, StateBytes(matrix=4, other=0))  # type: ignore[arg-type]
    monkeypatch.setitem(RULES, NAME, HeavyBall)  # type: ignore[arg-type]


def _run(rank: int, world_size: int, config: RunConfig) -> None:
    run_to_end(config)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_third_rules_states_are_saved_under_their_names_and_resumed_bit_for_bit(
    ranks: int, tmp_path: Path
) -> None:
    """Over two ranks with ZeRO-1, which gathers states that it has never heard of."""

    def run(name: str, iterations: int, *, load: bool = False) -> None:
        config = tiny_run(
            training=dict(train_iters=iterations, eval_iters=0, bf16=True),
            metrics=tmp_path / f"{name}.jsonl",
            data_parallel=DataParallelConfig(use_distributed_optimizer=ranks > 1),
        )
        folder = str(tmp_path / name)
        config = with_checkpoint(
            replace(config, optimizer=OptimizerConfig(optimizer=NAME)),
            save=folder,
            save_interval=2,
            load=folder if load else None,
        )
        if ranks == 1:
            run_to_end(config)
        else:
            run_ranks(_run, ranks, config, detail=False)

    run("once", 4)
    run("twice", 2)
    run("twice", 4, load=True)
    assert rows(tmp_path / "twice.jsonl")[-2:] == rows(tmp_path / "once.jsonl")[-2:]
    assert step_bytes(tmp_path / "twice", 4) == step_bytes(tmp_path / "once", 4)
    saved = load_file(tmp_path / "once" / "iter_0000004" / "optimizer_pp00_tp00of01.safetensors")
    assert {key.rpartition("/")[2] for key in saved} == {"velocity", "master"}
    assert all(value.any() for key, value in saved.items() if key.endswith("velocity"))
