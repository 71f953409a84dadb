"""A background save writes what a save in the foreground would have, and what becomes of it is
known to all ranks alike."""

import itertools
import multiprocessing
import threading

import pytest

from megatron_lite.checkpointing import saver, shards
from megatron_lite.checkpointing.step_files import LATEST
from megatron_lite.config.checks import InputError, PeerError
from megatron_lite.config.logging_settings import LOG_FILE
from megatron_lite.parallel.state import parallel_state
from megatron_lite.training import loop
from megatron_lite.training.build_trainer import build_trainer
from megatron_lite.training.step import TrainingError
from tests.support.layouts import LAYOUTS
from tests.support.limits import HANG_S
from tests.support.mutants import replaces
from tests.support.ranks import run_ranks
from tests.support.runs import run_on_ranks, run_to_end, step_bytes, tiny_run

CASES = {
    "tp2 sp dp2": (4, dict(tp_size=2, sequence_parallel=True)),
    "zero1": (2, dict(data_parallel=LAYOUTS["zero1, overlap"])),
    "fsdp2": (2, dict(data_parallel=LAYOUTS["fsdp2"])),
}


@pytest.fixture(scope="module", autouse=True)
def warm():
    """What a run imports late need not be imported again by each fork."""
    run_to_end(tiny_run(train_iters=1, eval_iters=0))


class Steps:
    """The training steps that this rank has made."""

    def __init__(self, patch):
        self._made, self._seen = threading.Semaphore(0), 0

        @replaces("train_step", loop)
        def counted(step, *args, **options):
            result = step(*args, **options)
            self._made.release()
            return result

        counted(patch)

    def wait_until(self, number):
        """Waits until so many steps have been made. One thread may wait."""
        while self._seen < number:
            assert self._made.acquire(timeout=HANG_S)
            self._seen += 1


@pytest.mark.runs
@pytest.mark.parametrize("layout, bf16", itertools.product(CASES, (False, True)))
def test_every_step_has_the_bytes_of_one_saved_in_the_foreground(tmp_path, layout, bf16):
    """Training overwrites the tensors while they are written: each save is held up until the step
    after it has been made."""
    world_size, shape = CASES[layout]

    def slow_train(rank, world_size, config):
        with pytest.MonkeyPatch.context() as patch:
            steps = Steps(patch)

            @replaces("write", saver.Saver)
            def late(real, self, snapshot):
                steps.wait_until(min(snapshot.iteration + 1, 5))
                return real(self, snapshot)

            late(patch)
            run_to_end(config)

    def config_of(folder, *, async_save):
        return tiny_run(
            **shape,
            train_iters=5,
            eval_iters=0,
            bf16=bf16,
            save=tmp_path / folder,
            save_interval=1,
            async_save=async_save,
        )

    run_on_ranks(config_of("sync", async_save=False), world_size)
    run_ranks(slow_train, world_size, config_of("async", async_save=True))
    for step in range(1, 6):
        folders = [tmp_path / name / f"iter_{step:07d}" for name in ("async", "sync")]
        kinds = ("*.safetensors", "metadata.json", "parameters*.json")
        found = [
            {path.name: path.read_bytes() for kind in kinds for path in folder.glob(kind)}
            for folder in folders
        ]
        assert found[0] == found[1] != {}, step


def fail_on_rank_1(rank, world_size, config, held, ended):
    """What the rank raised, and after which iteration. The thread of rank 0 ends later than that of
    rank 1.

    held: the number of steps before which rank 1 does not fail.
    ended: a semaphore of both ranks, which counts the writes that rank 1 has ended.
    """

    @replaces("write", saver.Saver)
    def ends_in_order(real, self, snapshot):
        try:
            return real(self, snapshot)
        finally:
            if rank == 1:
                ended.release()
            else:
                assert ended.acquire(timeout=HANG_S)

    @replaces("save_file", shards)
    def failing(save_file, tensors, path, metadata):
        if rank == 1 and "iter_0000004" in str(path):
            steps.wait_until(held)
            raise OSError("disk full")
        save_file(tensors, path, metadata)

    with pytest.MonkeyPatch.context() as patch, parallel_state(config.parallel, seed=1) as parallel:
        steps = Steps(patch)
        for fault in (ends_in_order, failing):
            fault(patch)
        trainer = build_trainer(config, parallel)
        try:
            trainer.run()
        except InputError as error:
            return f"{type(error).__name__} after {trainer.progress.iteration}: {error}"
    return ""


@pytest.mark.runs
@pytest.mark.parametrize("train_iters, latest", [(6, 6), (4, 2)])
def test_a_failed_save_ends_a_run_only_if_it_is_the_last_one(tmp_path, train_iters, latest):
    """The save of iteration 4 fails, at every try. All ranks go on, or all raise."""
    config = tiny_run(
        tp_size=2,
        train_iters=train_iters,
        eval_iters=0,
        save=tmp_path,
        save_interval=2,
        async_save=True,
    )
    ended = multiprocessing.get_context("fork").Semaphore(0)
    messages = run_ranks(fail_on_rank_1, 2, config, train_iters, ended)
    fault = (
        f"--save {tmp_path}: the checkpoint of iteration 4 could not be written by rank 1: "
        "disk full."
    )
    log = (tmp_path / LOG_FILE).read_text()
    assert f"warning: {fault}" in log and "saved checkpoint from iteration       4" not in log
    assert "successfully saved checkpoint from iteration       2" in log
    if latest == train_iters:
        assert messages == ["", ""]
    else:
        assert f"after 4: {fault}" in messages[0]
        assert messages[1] == messages[0].replace(InputError.__name__, PeerError.__name__)
    assert not list(tmp_path.glob("*.tmp*")) and not (tmp_path / "iter_0000004").exists()
    assert (tmp_path / LATEST).read_text() == str(latest)


def test_a_run_that_fails_still_finishes_the_save_under_way(tmp_path, monkeypatch):
    calls, failed = iter(range(100)), threading.Event()

    @replaces("write", saver.Saver)
    def held(real, self, snapshot):
        assert failed.wait(HANG_S)
        return real(self, snapshot)

    @replaces("train_step", loop)
    def failing(step, *args, **options):
        if next(calls) == 3:
            failed.set()
            raise TrainingError("the loss is gone")
        return step(*args, **options)

    for fault in (held, failing):
        fault(monkeypatch)
    with pytest.raises(TrainingError, match="the loss is gone"):
        run_to_end(tiny_run(train_iters=9, save=tmp_path, save_interval=3, async_save=True))
    assert (tmp_path / LATEST).read_text() == "3" and step_bytes(tmp_path, 3)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("save")]
