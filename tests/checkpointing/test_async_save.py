"""A background save writes what a save in the foreground would have, and what becomes of it is
known to all ranks alike."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from torch import Tensor, nn

from megatron_lite.checkpointing import points, write
from megatron_lite.checkpointing.points import Point
from megatron_lite.checkpointing.snapshot import Snapshot, take_snapshot
from megatron_lite.checkpointing.step_files import LATEST
from megatron_lite.config.checks import InputError, PeerError
from megatron_lite.config.data_parallel import DataParallelConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.parallel.state import parallel_state
from megatron_lite.training import loop
from megatron_lite.training.build_trainer import build_trainer
from megatron_lite.training.step import TrainingError
from tests.support.ranks import run_ranks
from tests.support.runs import run_to_end, step_bytes, tiny_run

LAYOUTS = {
    "tp2 sp dp2": (4, dict(tp_size=2, sequence_parallel=True)),
    "zero1": (
        2,
        dict(
            data_parallel=DataParallelConfig(
                use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
            )
        ),
    ),
    "fsdp2": (2, dict(data_parallel=DataParallelConfig(use_torch_fsdp2=True))),
}


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """What a run imports late need not be imported again by each fork."""
    run_to_end(tiny_run(training=dict(train_iters=1, eval_iters=0)))


def train(rank: int, world_size: int, config: RunConfig) -> None:
    run_to_end(config)


@pytest.mark.parametrize(
    ("layout", "bf16"),
    [
        pytest.param(
            layout,
            bf16,
            id=f"{layout}-{'bf16' if bf16 else 'float32'}",
            marks=[pytest.mark.long] * ((number + bf16) % 2),
        )
        for number, layout in enumerate(LAYOUTS)
        for bf16 in (False, True)
    ],
)
def test_every_step_has_the_bytes_of_one_saved_in_the_foreground(
    tmp_path: Path, layout: str, bf16: bool
) -> None:
    """Training overwrites the tensors while they are written: each save is held up until the step
    after it has been made."""
    world_size, shape = LAYOUTS[layout]

    def slow_train(rank: int, world_size: int, config: RunConfig) -> None:
        steps, step = threading.Semaphore(0), loop.train_step

        def counted(*args: object, **options: object) -> object:
            result = step(*args, **options)  # type: ignore[arg-type]
            steps.release()
            return result

        def reached(at: Point) -> None:
            while at is Point.SNAPSHOT and steps.acquire(blocking=False):
                pass

        write_files = write._write_files

        def late(*args: object) -> object:
            steps.acquire(timeout=5 if run.progress.iteration < 5 else 0)
            return write_files(*args)  # type: ignore[arg-type]

        loop.train_step, points.reached, write._write_files = counted, reached, late  # type: ignore[assignment]
        with parallel_state(config.parallel, seed=config.training.seed) as parallel:
            run = build_trainer(config, parallel)
            run.run()

    def config_of(folder: str, *, async_save: bool) -> RunConfig:
        return tiny_run(
            **shape,
            training=dict(train_iters=5, eval_iters=0, bf16=bf16),  # type: ignore[arg-type]
            checkpoint=dict(save=str(tmp_path / folder), save_interval=1, async_save=async_save),
        )

    run_ranks(train, world_size, config_of("sync", async_save=False), detail=False)
    run_ranks(slow_train, world_size, config_of("async", async_save=True), detail=False)
    for step in range(1, 6):
        assert step_bytes(tmp_path / "async", step) == step_bytes(tmp_path / "sync", step) != {}, (
            step
        )
        for name in ("metadata.json", "parameters_pp00.json"):
            file = f"iter_{step:07d}/{name}"
            assert (tmp_path / "async" / file).read_bytes() == (
                tmp_path / "sync" / file
            ).read_bytes()


@pytest.mark.parametrize("copy", [True, False])
def test_a_snapshot_shares_no_memory_with_the_run_if_it_is_a_copy(copy: bool) -> None:
    config = tiny_run(training=dict(train_iters=1, bf16=True))
    with parallel_state(config.parallel, seed=1) as parallel:
        trainer = build_trainer(config, parallel)
        snapshot = take_snapshot(
            config, parallel, trainer.model, trainer.optimizer, trainer.progress, data={}, copy=copy
        )
    run_s = {
        _storage(tensor)
        for tensor in (*trainer.model.parameters(), *_states(trainer.optimizer.states))
    }
    snapshot_s = {
        _storage(tensor)
        for file in snapshot.files
        if file.kind != "rng"
        for tensor in file.tensors.values()
    }
    assert snapshot_s and bool(run_s & snapshot_s) != copy


def _storage(tensor: Tensor | nn.Parameter) -> int:
    return tensor.untyped_storage().data_ptr()


def _states(states: dict[str, dict[str, Tensor]]) -> list[Tensor]:
    return [value for of_parameter in states.values() for value in of_parameter.values()]


def fail_on_rank_1(rank: int, world_size: int, config: RunConfig, held: float = 0.0) -> str:
    """What the rank raised, and after which iteration. The thread of rank 0 ends later than that of
    rank 1."""
    if rank == 0:
        whole_write = write.StepWriter.write

        def ends_late(self: write.StepWriter, snapshot: Snapshot) -> list[str]:
            try:
                return whole_write(self, snapshot)
            finally:
                time.sleep(0.2)

        write.StepWriter.write = ends_late  # type: ignore[method-assign]
    if rank == 1:
        write_files = write._write_files

        def failing(temporary: Path, snapshot: Snapshot) -> object:
            time.sleep(held)
            if snapshot.iteration == 4:
                raise OSError("disk full")
            return write_files(temporary, snapshot)

        write._write_files = failing  # type: ignore[assignment]
    with parallel_state(config.parallel, seed=1) as parallel:
        trainer = build_trainer(config, parallel)
        try:
            trainer.run()
        except InputError as error:
            return f"{type(error).__name__} after {trainer.progress.iteration}: {error}"
    return ""


@pytest.mark.parametrize(("train_iters", "latest"), [(200, 199), (6, 6), (4, 4)])
def test_a_failed_save_ends_all_ranks_after_the_same_iteration(
    tmp_path: Path, train_iters: int, latest: int
) -> None:
    """At a step, at the next save, or at the end."""
    config = tiny_run(
        tp_size=2,
        training=dict(train_iters=train_iters, eval_iters=0),
        checkpoint=dict(
            save=str(tmp_path), save_interval=2 if train_iters < 200 else 4, async_save=True
        ),
    )
    messages = run_ranks(fail_on_rank_1, 2, config, 0.3 if train_iters < 200 else 0.0, detail=False)
    expected = (
        f"--save {tmp_path}: the checkpoint of iteration 4 could not be written by rank 1: "
        "disk full."
    )
    assert expected in messages[0] and messages[1] == messages[0].replace(
        InputError.__name__, PeerError.__name__
    )
    assert 4 <= int(messages[0].split("after ")[1].split(":")[0]) <= latest
    assert not list(tmp_path.glob("*.tmp*")) and not (tmp_path / "iter_0000004").exists()
    assert (
        not (tmp_path / LATEST).exists()
        if train_iters == 200
        else (tmp_path / LATEST).read_text() == "2"
    )


def test_a_run_that_fails_still_finishes_the_save_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files, step = write._write_files, loop.train_step

    def slow(*args: object) -> object:
        time.sleep(0.3)
        return write_files(*args)  # type: ignore[arg-type]

    calls = iter(range(100))

    def failing(*args: object, **options: object) -> object:
        if next(calls) == 3:
            raise TrainingError("the loss is gone")
        return step(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(write, "_write_files", slow)
    monkeypatch.setattr(loop, "train_step", failing)
    with pytest.raises(TrainingError, match="the loss is gone"):
        run_to_end(
            tiny_run(
                training=dict(train_iters=9),
                checkpoint=dict(save=str(tmp_path), save_interval=3, async_save=True),
            )
        )
    assert (tmp_path / LATEST).read_text() == "3" and step_bytes(tmp_path, 3)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("save")]


def test_the_log_says_when_a_step_is_durable_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The write is held up until two more iterations are logged."""
    go_on, write_files, step = threading.Event(), write._write_files, loop.train_step
    calls = iter(range(100))

    def held(*args: object) -> object:
        assert go_on.wait(30)
        return write_files(*args)  # type: ignore[arg-type]

    def counted(*args: object, **options: object) -> object:
        if next(calls) == 5:
            assert "successfully saved" not in (seen := capsys.readouterr().out), seen
            go_on.set()
        return step(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(write, "_write_files", held)
    monkeypatch.setattr(loop, "train_step", counted)
    run_to_end(
        tiny_run(
            training=dict(train_iters=8, eval_iters=0),
            checkpoint=dict(save=str(tmp_path), save_interval=4, async_save=True),
        )
    )
    printed = capsys.readouterr().out
    for iteration in (4, 8):
        assert (
            f"  successfully saved checkpoint from iteration {iteration:7d} to {tmp_path}"
            in printed
        )


def test_a_resumed_background_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    def config_of(folder: Path, **training: object) -> RunConfig:
        load = str(folder) if folder.exists() else None
        return tiny_run(
            tp_size=2,
            training=dict(train_iters=8, eval_iters=1, **training),
            checkpoint=dict(save=str(folder), load=load, save_interval=3, async_save=True),
        )

    run_ranks(train, 2, config_of(tmp_path / "whole"))
    run_ranks(train, 2, config_of(tmp_path / "parts", exit_interval=5))
    run_ranks(train, 2, config_of(tmp_path / "parts"))
    assert step_bytes(tmp_path / "parts", 8) == step_bytes(tmp_path / "whole", 8) != {}
