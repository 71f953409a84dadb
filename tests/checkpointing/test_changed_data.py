"""A run goes on with the data that its checkpoint has read; with any other only where it is told
to."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.config.checks import InputError
from megatron_lite.config.data_settings import DataConfig
from megatron_lite.config.run import RunConfig
from tests.support.corpora import written
from tests.support.runs import run_to_end, tiny_run


def write(prefix: Path, seed: int = 1, documents: int = 40) -> str:
    draw = random.Random(seed)
    return written(prefix, ([draw.randrange(99) for _ in range(37)] for _ in range(documents)))


def config_of(
    data: dict[str, Any],
    *,
    train_iters: int = 3,
    training: dict[str, Any] | None = None,
    **checkpoint: Any,
) -> RunConfig:
    config = tiny_run(
        **dict(train_iters=train_iters, eval_iters=0, **(training or {})), **checkpoint
    )
    return replace(config, data=DataConfig(**{"seq_length": 16, "split": "90,10,0", **data}))


@pytest.fixture
def begun(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    data = dict(data_path=(write(tmp_path / "a"), write(tmp_path / "b", 2)))
    run_to_end(config_of(data, save=str(tmp_path / "steps")))
    return tmp_path, data


def other_tokens(folder: Path) -> dict[str, Any]:
    """As many documents of the same lengths."""
    return dict(data_path=(str(folder / "a"), write(folder / "b", 3)))


CHANGES: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "tokens": (other_tokens, "files"),
    "more documents": (
        lambda folder: dict(data_path=(str(folder / "a"), write(folder / "b", 2, 41))),
        "files",
    ),
    "order": (lambda folder: dict(data_path=(str(folder / "b"), str(folder / "a"))), "files"),
    "weights": (
        lambda folder: dict(data_path=("0.3", str(folder / "a"), "0.7", str(folder / "b"))),
        "weights",
    ),
    "split": (lambda folder: dict(split="80,20,0"), "split"),
    "mock": (lambda folder: dict(data_path=(), mock_data=True), "source"),
}


@pytest.mark.runs(daily=2, ci=6)
@pytest.mark.parametrize("change", CHANGES)
def test_other_data_is_refused_with_a_table(
    begun: tuple[Path, dict[str, Any]], change: str
) -> None:
    folder, data = begun
    make, field = CHANGES[change]
    changed = {**data, **make(folder)}
    load = str(folder / "steps")
    table = (
        rf"(?s)was trained on other data.*--allow-changed-data.*checkpoint +this run\n.*  {field} +"
    )
    with pytest.raises(InputError, match=table):
        run_to_end(config_of(changed, train_iters=4, load=load))
    for iterations, allowed in ((4, "allow_changed_data"), (1, "finetune")):
        config = config_of(changed, train_iters=iterations, load=load, **{allowed: True})
        assert run_to_end(config).progress.iteration == iterations


def test_the_same_data_elsewhere_is_the_same_and_so_is_another_order_of_it(
    begun: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Moved files, equal shares in other numbers, another seed and length of the run: the last two
    are told."""
    folder, _ = begun
    moved = []
    for name in ("a", "b"):
        (folder / "moved" / name).mkdir(parents=True)
        for kind in (".bin", ".idx"):
            (folder / f"{name}{kind}").rename(folder / "moved" / name / f"text{kind}")
        moved.append(str(folder / "moved" / name / "text"))
    data = dict(data_path=tuple(moved), split="9, 1")
    run_to_end(config_of(data, train_iters=4, training=dict(seed=5), load=str(folder / "steps")))
    printed = capsys.readouterr().out
    for change in ("--seed 1234 -> 5", "--train-iters 3 -> 4"):
        assert f"changed since the checkpoint: {change}" in printed
