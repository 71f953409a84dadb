"""One run at a time writes into a directory, and of the starts of a job the latest one."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from megatron_lite.checkpointing import lock as lock_module
from megatron_lite.checkpointing import points
from megatron_lite.checkpointing.lock import LOCK, DirectoryLock, Holder
from megatron_lite.checkpointing.points import Point
from megatron_lite.config.checks import InputError
from megatron_lite.config.run import RunConfig
from tests.support.ranks import RankFailure, run_ranks
from tests.support.runs import run_to_end, step_bytes, tiny_run


def holder(
    job: str = "7", starts: tuple[int, int] = (0, 0), token: str = "a", run: str = "r"
) -> Holder:
    return Holder(
        job=job, run=run, requeues=starts[0], restarts=starts[1], host="node1", pid=42, token=token
    )


def test_a_second_job_is_refused_with_the_first_ones_name(tmp_path: Path) -> None:
    first = DirectoryLock(tmp_path, holder("7"))
    with pytest.raises(
        InputError,
        match=r"is in use by job 7, process 42 on node1: wait for its end, or choose another",
    ):
        DirectoryLock(tmp_path, holder("8", token="b"))
    first.check()
    first.release()
    DirectoryLock(tmp_path, holder("8", token="b")).release()


@pytest.mark.parametrize("earlier", [(0, 0), (1, 9), (2, 0), (2, 3)])
def test_a_later_start_takes_the_lock_and_the_earlier_one_finds_out(
    tmp_path: Path, earlier: tuple[int, int]
) -> None:
    stale = DirectoryLock(tmp_path, holder(starts=earlier, token="a"))
    new = DirectoryLock(tmp_path, holder(starts=(2, 4), token="b"))
    new.check()
    with pytest.raises(
        InputError,
        match=r"is now held by job 7, .*was given up for lost, and writes no more checkpoints",
    ):
        stale.check()
    with pytest.raises(InputError, match="in use by job 7"):  # and nobody else can come in
        DirectoryLock(tmp_path, holder("8"))
    stale.release()
    new.check()
    with pytest.raises(InputError, match="in use by job 7"):  # also once the stale one is gone
        DirectoryLock(tmp_path, holder("8"))
    new.release()


@pytest.mark.parametrize(
    "other",
    [
        holder(),
        holder(starts=(0, 1)),
        holder(starts=(0, 9), run="another"),
        holder(starts=(0, 9), run=""),
        holder("8", starts=(5, 9)),
    ],
)
def test_what_is_no_later_start_is_refused(tmp_path: Path, other: Holder) -> None:
    """The same one, an earlier one, and restarts by another torchrun within the same job."""
    first = DirectoryLock(tmp_path, holder(starts=(0, 1)))
    with pytest.raises(InputError, match="in use by job 7"):
        DirectoryLock(tmp_path, other)
    first.release()


def test_a_start_from_before_a_requeue_is_refused_even_after_the_later_one_has_ended(
    tmp_path: Path,
) -> None:
    DirectoryLock(tmp_path, holder(starts=(1, 0))).release()
    with pytest.raises(
        InputError,
        match=r"a later start of this job \(requeued 1 times, this one 0\) has had the directory",
    ):
        DirectoryLock(tmp_path, holder(starts=(0, 5), token="b"))
    DirectoryLock(tmp_path, holder("8", token="c")).release()


def test_torchrun_counts_anew_when_a_user_starts_it_again(tmp_path: Path) -> None:
    DirectoryLock(tmp_path, holder(starts=(0, 3))).release()
    lock = DirectoryLock(tmp_path, holder(starts=(0, 0), token="b"))
    assert Holder.read(tmp_path / LOCK) == holder(starts=(0, 0), token="b")
    lock.release()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"job": 1}', "9" * 100_000])
def test_a_lock_file_that_is_garbage_holds_nobody_up(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK).write_text(text)
    lock = DirectoryLock(tmp_path, holder())
    assert json.loads((tmp_path / LOCK).read_text())["job"] == "7"
    lock.release()


def test_a_lock_file_that_was_removed_comes_back(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path, holder())
    (tmp_path / LOCK).unlink()
    lock.check()
    with pytest.raises(InputError, match="in use by job 7"):
        DirectoryLock(tmp_path, holder("8"))
    lock.release()


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(lock_module.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock_module.fcntl, "flock", unsupported)
    run_to_end(
        tiny_run(training=dict(train_iters=1, eval_iters=0), checkpoint=dict(save=str(tmp_path)))
    )
    assert f"warning: --save {tmp_path}: this file system keeps no locks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SLURM_JOB_ID": "11", "SLURM_RESTART_COUNT": "2"}, ("11", "", 2, 0)),
        (
            {"SLURM_JOB_ID": "11", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "3"},
            ("11", "x", 0, 3),
        ),
        ({"TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "1"}, ("abc", "abc", 0, 1)),
    ],
)
def test_the_launcher_says_which_job_and_which_start(
    environ: dict[str, str], expected: tuple[object, ...]
) -> None:
    found = Holder.this_process(environ)
    assert (
        found.job,
        found.run,
        found.requeues,
        found.restarts,
    ) == expected and found.pid == os.getpid()


@pytest.mark.parametrize("environ", [{}, {"TORCHELASTIC_RUN_ID": "none"}])
def test_a_run_without_an_id_is_no_other_ones_start(environ: dict[str, str]) -> None:
    assert Holder.this_process(environ).job != Holder.this_process(environ).job


def config_of(folder: Path, last: int = 4, **checkpoint: object) -> RunConfig:
    return tiny_run(
        tp_size=2,
        training=dict(train_iters=last, eval_iters=0),
        checkpoint=dict(
            save=str(folder),
            load=str(folder),
            save_interval=2,
            allow_fresh_start=True,
            **checkpoint,
        ),
    )


def attempt(rank: int, world_size: int, config: RunConfig, environ: dict[str, str]) -> str:
    os.environ.update(environ)
    try:
        run_to_end(config)
    except InputError as error:
        return str(error)
    return ""


def test_a_run_in_use_refuses_another_on_every_rank_and_lets_it_in_at_its_end(
    tmp_path: Path,
) -> None:
    other = DirectoryLock(tmp_path, holder("99"))
    messages = run_ranks(attempt, 2, config_of(tmp_path), {})
    assert (
        "in use by job 99, process 42 on node1" in messages[0]
        and "another rank failed" in messages[1]
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK]
    other.release()
    assert run_ranks(attempt, 2, config_of(tmp_path), {}) == ["", ""]
    assert run_ranks(attempt, 2, config_of(tmp_path), {}) == ["", ""]


def test_a_killed_run_leaves_no_lock_behind(tmp_path: Path) -> None:
    def killed(rank: int, world_size: int) -> None:
        def reached(at: Point) -> None:
            if at is Point.DONE:
                os.kill(os.getpid(), signal.SIGKILL)

        points.reached = reached
        run_to_end(config_of(tmp_path))

    with pytest.raises(RankFailure):
        run_ranks(killed, 2, detail=False)
    assert run_ranks(attempt, 2, config_of(tmp_path), {}) == ["", ""]
    assert step_bytes(tmp_path, 4)
