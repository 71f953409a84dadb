"""A disk that is full, or a directory that has become read-only: one message, the checkpoints
before it as they were, nothing left behind, and the same final weights once there is room."""

import resource
import shutil
from functools import partial

import pytest

from megatron_lite.checkpointing import saver
from megatron_lite.config.checks import InputError, PeerError
from megatron_lite.config.logging_settings import LOG_FILE
from tests.support.disks import check_can_mount, make_read_only, make_writable
from tests.support.ranks import run_ranks
from tests.support.runs import run_to_end, step_bytes, tiny_run
from tests.support.saves import saving_run, train

LAST = 5
run_of = partial(saving_run, last=LAST, tp_size=2, save_interval=2)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A directory with the checkpoint of iteration 2."""
    run_to_end(tiny_run(train_iters=1, eval_iters=0))
    folder = tmp_path_factory.mktemp("begun") / "steps"
    run_ranks(train, 2, run_of(folder, stop=2, load=False))
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory, begun):
    """The final files of a run that nothing happens to."""
    folder = shutil.copytree(begun, tmp_path_factory.mktemp("whole") / "steps")
    run_ranks(train, 2, run_of(folder))
    return step_bytes(folder, LAST)


def check(folder, begun, messages, reasons):
    """Both ranks raised the same, rank 0 in its own name, about the last save, and the directory is
    as it was. But for the log file, to which lines are appended."""
    said = f"InputError: --save {folder}: the checkpoint of iteration {LAST} could not be written"
    assert messages[0].startswith(said) and any(reason in messages[0] for reason in reasons)
    assert messages[1] == messages[0].replace(InputError.__name__, PeerError.__name__, 1)
    names = (sorted(path.name for path in one.iterdir()) for one in (folder, begun))
    assert next(names) == next(names)
    for path in begun.rglob("*.*"):
        now = folder / path.relative_to(begun)
        if path.name == LOG_FILE:
            assert now.read_bytes().startswith(path.read_bytes())
        elif path.is_file() and path.name != "lock.json":
            assert now.read_bytes() == path.read_bytes(), path


def text_is_full(folder, rank):
    """The file is the device that is always full. (That of tensors has a random name.)"""

    real = saver._write_files

    def writing(temporary, snapshot):
        if rank == 0:
            (temporary / "manifest.json").symlink_to("/dev/full")
        return real(temporary, snapshot)

    saver._write_files = writing


def files_are_limited(folder, rank):
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


def folder_is_closed(folder, rank):
    """After the run has begun. The kernel says so in one of two ways, by who asks."""

    real = saver.Saver.write

    def writing(self, snapshot):
        if rank == 0:
            saver.Saver.write = real
            make_read_only(folder)
        return real(self, snapshot)

    saver.Saver.write = writing


FULL = ("No space left on device",)
CASES = [
    (text_is_full, FULL, True),
    (files_are_limited, ("by rank 1: ", "File too large"), False),
    (folder_is_closed, ("Read-only file system", "Permission denied"), False),
    (text_is_full, FULL, False),
    (folder_is_closed, ("Read-only", "denied"), True),
]


def test_a_folder_that_is_gone_has_no_earlier_checkpoints(tmp_path, monkeypatch):
    def gone(*_):
        shutil.rmtree(tmp_path)
        raise OSError

    monkeypatch.setattr(saver, "_write_files", gone)
    with pytest.raises(InputError, match="The folder is gone"):
        run_to_end(tiny_run(train_iters=1, save=str(tmp_path)))


@pytest.mark.runs(daily=0)
@pytest.mark.parametrize("fault, reasons, async_save", CASES)
def test_a_save_that_the_system_refuses_leaves_all_as_it_was(
    tmp_path, begun, whole, fault, reasons, async_save
):
    folder = shutil.copytree(begun, tmp_path / "steps")
    if fault is folder_is_closed:
        check_can_mount(tmp_path)
    config = run_of(folder, async_save=async_save)

    def work(rank, world_size):
        fault(folder, rank)
        return train(rank, world_size, config)

    try:
        messages = run_ranks(work, 2)
    finally:
        make_writable(folder)
    check(folder, begun, messages, reasons)
    assert run_ranks(train, 2, run_of(folder)) == ["", ""]
    assert step_bytes(folder, LAST) == whole
