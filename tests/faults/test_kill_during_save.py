"""SIGKILL before any change that a save makes to the disk: the last durable checkpoint loads, and
the run ends as if nothing had happened.

Each run starts from a directory whose two newest steps are damaged, so that its first save makes
every kind of change: it sets both aside, publishes a step, moves the pointer, and deletes the old
good step once the new one is durable.
"""

import os
import shutil
import signal
from functools import partial
from itertools import product

import pytest
import torch.distributed as dist

from megatron_lite.checkpointing import saver
from megatron_lite.checkpointing.start import candidates, newest_good_step, step_fault
from megatron_lite.checkpointing.step_files import LATEST
from megatron_lite.parallel.collectives import gather_values
from tests.support.checkpoints import flip_bit
from tests.support.ranks import RankFailure, run_ranks
from tests.support.runs import run_to_end, step_bytes, tiny_run
from tests.support.saves import saving_run, train

LAST = 4
CHANGES = ("mkdir", "fsync", "replace", "rename", "unlink", "rmdir")
run_of = partial(saving_run, last=LAST, tp_size=2)


def train_until_killed(rank, world_size, config, victim, number, takes_all):
    """The victim is killed before its change of this number, counted from 0 in its first save.

    takes_all: after it has killed the others.
    """
    pids = gather_values(os.getpid(), dist.group.WORLD)
    count = 0

    def counted(real):
        def call(*args, **options):
            nonlocal count
            if count == number:
                for pid in sorted(pids, key=os.getpid().__eq__) if takes_all else [os.getpid()]:
                    os.kill(pid, signal.SIGKILL)
            count += 1
            return real(*args, **options)

        return call

    real_write = saver.Saver.write

    def writing(self, snapshot):
        if rank == victim:
            for name in CHANGES:
                setattr(os, name, counted(getattr(os, name)))
        return real_write(self, snapshot)

    saver.Saver.write = writing
    run_to_end(config)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The final files of an uninterrupted run."""
    # what it imports need not be imported again by each fork
    run_to_end(tiny_run(train_iters=1, eval_iters=0))
    folder = tmp_path_factory.mktemp("whole")
    run_ranks(train, 2, run_of(folder, load=False))
    return step_bytes(folder, LAST)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """A directory of three steps, of which only the first is good."""
    folder = tmp_path_factory.mktemp("damaged") / "steps"
    run_ranks(train, 2, run_of(folder, stop=3, load=False))
    for step in (2, 3):
        flip_bit(folder / f"iter_{step:07d}" / "model_pp00_tp01of02.safetensors", 4001)
    return folder


# Rank 0 makes 40 changes or so, of which the last ones delete files. Rank 1 syncs its three files.
CASES = [*product([0], range(7)), *product([1], range(3)), *product([0], range(7, 28))]


@pytest.mark.runs(ci=4)
@pytest.mark.parametrize("victim, number", CASES)
def test_a_kill_before_any_change_costs_nothing(tmp_path, damaged, whole, victim, number):
    folder = shutil.copytree(damaged, tmp_path / "steps")
    takes_all, async_save = number % 2 == 0, number // 2 % 2 == 0
    config = run_of(folder, save_keep_last=1, async_save=async_save)
    with pytest.raises(RankFailure, match="exit code -9|Connection (closed|reset) by peer"):
        run_ranks(train_until_killed, 2, config, victim, number, takes_all)
    found = newest_good_step(folder, candidates(folder), step_fault, fallback=True)
    is_durable = (folder / LATEST).read_text() == "2"
    assert found.step.name in ("iter_0000002", *(() if is_durable else ("iter_0000001",)))
    run_ranks(train, 2, config)
    assert step_bytes(folder, LAST) == whole
    assert {path.suffix for path in folder.glob("iter_*")} <= {"", ".superseded"}
