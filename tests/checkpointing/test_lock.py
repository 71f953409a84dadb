"""One run at a time writes into a directory, and of the starts of a job the latest one."""

import json
import os
import resource
from pathlib import Path

import pytest

from megatron_lite.checkpointing.lock import LOCK, DirectoryLock, Holder, LockLost
from megatron_lite.config.checks import InputError
from tests.support.forks import status_of_fork
from tests.support.ranks import run_ranks
from tests.support.saves import saving_run, train


def holder(job="7", starts=(0, 0), token="a", run="r"):
    return Holder(
        job=job, run=run, requeues=starts[0], restarts=starts[1], host="node1", pid=42, token=token
    )


def refuses(folder, other=None):
    """The folder is in use by the job of `holder()`: another one, by default job 8, is refused."""
    with pytest.raises(InputError, match="in use by job 7, process 42 on node1: wait for its end"):
        DirectoryLock(folder, other or holder("8"))


@pytest.mark.parametrize("earlier", [(1, 9), (2, 3)])
def test_a_later_start_takes_the_lock_and_the_earlier_one_finds_out(tmp_path, earlier):
    stale = DirectoryLock(tmp_path, holder(starts=earlier, token="a"))
    new = DirectoryLock(tmp_path, holder(starts=(2, 4), token="b"))
    new.check()
    with pytest.raises(InputError, match=r"is now held by job 7, .*was given up for lost"):
        stale.check()
    refuses(tmp_path)
    stale.release()
    new.check()
    refuses(tmp_path)
    new.release()


def test_a_lock_that_another_start_takes_beside_the_look_for_it_is_lost(tmp_path, monkeypatch):
    """A caller that has renamed a step puts it back after LockLost only."""
    stale = DirectoryLock(tmp_path, holder(token="a"))
    DirectoryLock(tmp_path, holder(starts=(1, 0), token="b"))
    monkeypatch.setattr(Path, "exists", lambda self: False)  # as before the other one took it
    with pytest.raises(LockLost, match="a later start of this job"):
        stale.check()


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
def test_what_is_no_later_start_is_refused(tmp_path, other):
    """The same one, an earlier one, and restarts by another torchrun within the same job."""
    first = DirectoryLock(tmp_path, holder(starts=(0, 1)))
    refuses(tmp_path, other)
    first.release()


def test_a_start_from_before_a_requeue_is_refused_even_after_the_later_one_has_ended(tmp_path):
    DirectoryLock(tmp_path, holder(starts=(1, 0))).release()
    with pytest.raises(InputError, match=r"later start of this job \(requeued 1 times, this one 0"):
        DirectoryLock(tmp_path, holder(starts=(0, 5), token="b"))
    DirectoryLock(tmp_path, holder("8", token="c")).release()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"job": 1}', "9" * 100_000])
def test_a_lock_file_that_is_garbage_holds_nobody_up(tmp_path, text):
    (tmp_path / LOCK).write_text(text)
    lock = DirectoryLock(tmp_path, holder())
    assert json.loads((tmp_path / LOCK).read_text())["job"] == "7"
    lock.release()


def test_a_lock_file_that_was_removed_comes_back(tmp_path):
    lock = DirectoryLock(tmp_path, holder())
    (tmp_path / LOCK).unlink()
    lock.check()
    refuses(tmp_path)
    lock.release()


@pytest.mark.parametrize(
    "environ, expected",
    [
        ({"SLURM_JOB_ID": "11", "SLURM_RESTART_COUNT": "2"}, ("11", "", 2, 0)),
        (
            {"SLURM_JOB_ID": "11", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "3"},
            ("11", "x :", 0, 3),
        ),
        (
            {"TORCHELASTIC_RUN_ID": "abc", "MASTER_ADDR": "a", "MASTER_PORT": "5"},
            ("abc", "abc a:5", 0, 0),
        ),
    ],
)
def test_the_launcher_says_which_job_and_which_start(environ, expected, monkeypatch):
    monkeypatch.setattr(os, "environ", environ)
    found = Holder.this_process()
    assert (
        found.job,
        found.run,
        found.requeues,
        found.restarts,
    ) == expected and found.pid == os.getpid()


def test_a_run_in_use_refuses_another_on_every_rank_and_lets_it_in_at_its_end(tmp_path):
    other = DirectoryLock(tmp_path, holder("99"))
    config = saving_run(tmp_path, 2, tp_size=2)
    messages = run_ranks(train, 2, config)
    assert "in use by job 99, process 42 on node1" in messages[0]
    assert "another rank failed" in messages[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK]
    other.release()
    assert run_ranks(train, 2, config) == ["", ""]
    assert run_ranks(train, 2, config) == ["", ""]


def test_a_lock_of_which_a_part_is_written_is_not_taken(tmp_path):
    def on_a_full_disk():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        with pytest.raises(OSError, match="too large"):
            DirectoryLock(tmp_path, holder())

    assert status_of_fork(on_a_full_disk) == 0
