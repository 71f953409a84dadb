"""--wandb-project: TensorBoard's scalars in an offline run of Weights & Biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_lite.config.checks import InputError
from megatron_lite.config.run import RunConfig
from tests.support.modules import provide
from tests.support.runs import rows, run_to_end, tiny_run


class FakeWandb:
    """Notes what is logged. The calls that `failing` names raise an error."""

    def __init__(self, failing: str = "") -> None:
        self.settings: dict[str, Any] = {}
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished, self.failing = False, failing

    def init(self, **settings: Any) -> FakeWandb:
        if self.failing == "init":
            raise RuntimeError("no")
        self.settings = settings
        return self

    def log(self, scalars: dict[str, float], step: int) -> None:
        if self.failing == "log":
            raise RuntimeError("no")
        self.logged.append((step, scalars))

    def finish(self, quiet: bool) -> None:
        self.finished = True


def _config(folder: Path) -> RunConfig:
    return tiny_run(
        metrics=folder / "m",
        train_iters=4,
        eval_iters=1,
        wandb_project="project",
        wandb_exp_name="name",
        wandb_save_dir=str(folder / "w"),
        tensorboard_log_interval=2,
        log_world_size_to_tensorboard=True,
        log_loss_scale_to_tensorboard=False,
    )


def test_the_scalars_of_every_second_iteration_and_of_evaluations_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb()
    provide(monkeypatch, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    config = _config(tmp_path)
    run_to_end(config)
    assert fake.settings.pop("config")["model"]["num_layers"] == 2
    names = dict(project="project", name="name", entity=None)
    assert fake.settings == dict(names, dir=str(tmp_path / "w"), mode="offline")
    written = {row["iteration"]: row for row in rows(tmp_path / "m")}
    training, evaluations = fake.logged[:2], fake.logged[2:]
    for (step, scalars), iteration in zip(training, (2, 4), strict=True):
        assert step == iteration
        for speed_or_memory in ("throughput", "tokens-per-second", "mem-peak-gib"):
            assert scalars.pop(speed_or_memory) > 0.0
        assert scalars == {
            "learning-rate": written[iteration]["learning_rate"],
            "batch-size": 4,
            "lm loss": written[iteration]["lm_loss"],
            "world-size": 1,
            "grad-norm": written[iteration]["grad_norm"],
            "samples vs steps": 4 * iteration,
        }
    assert [(step, sorted(scalars)) for step, scalars in evaluations] == [
        (4, ["lm loss validation", "samples vs steps"]),
        (4, ["lm loss test", "samples vs steps"]),
    ]
    assert fake.finished


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (None, "--wandb-project project needs the package wandb, which is not installed: pip"),
        (FakeWandb("init"), r"--wandb-project project: cannot be written \(no\)"),
    ],
)
def test_a_run_that_cannot_be_begun_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, message: str
) -> None:
    provide(monkeypatch, "wandb", module)
    with pytest.raises(InputError, match=message):
        run_to_end(_config(tmp_path))
