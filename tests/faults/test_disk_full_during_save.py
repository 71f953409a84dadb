"""A disk that is full, or a directory that has become read-only: one message, the checkpoints
before it as they were, nothing left behind, and the same final weights once there is room."""

from __future__ import annotations

import resource
import shutil
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from megatron_lite.checkpointing import points
from megatron_lite.checkpointing.points import Point
from megatron_lite.config.checks import InputError, PeerError
from megatron_lite.config.logging_settings import LOG_FILE
from megatron_lite.config.run import RunConfig
from tests.support.commands import MOCK, SMALL_RUN, command, environment
from tests.support.disks import check_can_mount, make_read_only, make_writable, small_disk
from tests.support.limits import HANG_S
from tests.support.ranks import run_ranks
from tests.support.runs import run_to_end, step_bytes, tiny_run

LAST = 5
WAYS = pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
ASYNC = pytest.mark.parametrize(
    "async_save", [pytest.param(False, marks=pytest.mark.long), True], ids=["sync", "async"]
)
SYNC = pytest.mark.parametrize(
    "async_save", [False, pytest.param(True, marks=pytest.mark.long)], ids=["sync", "async"]
)


def config_of(folder: Path, *, first: bool = False, **checkpoint: object) -> RunConfig:
    where = dict(save=str(folder), save_interval=2, **({} if first else {"load": str(folder)}))
    return tiny_run(
        tp_size=2,
        training=dict(train_iters=LAST, eval_iters=0, exit_interval=2 if first else None),
        checkpoint=dict(**where, **checkpoint),
    )


def train(
    rank: int, world_size: int, config: RunConfig, prepare: Callable[[int], None] | None = None
) -> str:
    """Type and text of what the rank raised."""
    if prepare is not None:
        prepare(rank)
    try:
        run_to_end(config)
    except InputError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the checkpoint of iteration 2."""
    run_to_end(tiny_run(training=dict(train_iters=1, eval_iters=0)))
    folder = tmp_path_factory.mktemp("begun") / "steps"
    run_ranks(train, 2, config_of(folder, first=True), detail=False)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, begun: Path) -> dict[str, bytes]:
    """The final files of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole") / "steps"
    shutil.copytree(begun, folder)
    run_ranks(train, 2, config_of(folder), detail=False)
    return step_bytes(folder, LAST)


def check(folder: Path, begun: Path, messages: list[str], *, rank: int, reason: str) -> None:
    """Both ranks raised the same, rank 0 in its own name, about the last save, and the directory is
    as it was.

    But for the log file, to which lines are appended."""
    said = (
        f"--save {folder}: the checkpoint of iteration {LAST} could not be written by rank {rank}: "
    )
    assert messages[0].startswith(f"{InputError.__name__}: {said}") and reason in messages[0]
    assert messages[1] == messages[0].replace(InputError.__name__, PeerError.__name__, 1)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        path.name for path in begun.iterdir()
    )
    for path in begun.rglob("*"):
        if path.name == LOG_FILE:
            assert (folder / LOG_FILE).read_bytes().startswith(path.read_bytes())
        elif path.is_file() and path.name != "lock.json":
            assert (folder / path.relative_to(begun)).read_bytes() == path.read_bytes(), path


@ASYNC
@pytest.mark.parametrize(
    "victim", ["metadata.json", pytest.param("manifest.json", marks=pytest.mark.long)]
)
def test_no_space_left_for_a_text(
    tmp_path: Path, begun: Path, whole: dict[str, bytes], victim: str, async_save: bool
) -> None:
    folder = tmp_path / "steps"
    shutil.copytree(begun, folder)

    def fill(rank: int) -> None:
        """The file is the device that is always full. (That of tensors is written under a random
        name.)"""

        def reached(at: Point) -> None:
            if at is Point.FOLDER:
                (next(folder.glob("*.tmp-*")) / victim).symlink_to("/dev/full")

        points.reached = reached

    messages = run_ranks(train, 2, config_of(folder, async_save=async_save), fill, detail=False)
    check(folder, begun, messages, rank=0, reason="No space left on device")
    assert run_ranks(train, 2, config_of(folder), detail=False) == ["", ""]
    assert step_bytes(folder, LAST) == whole


@SYNC
def test_a_limit_on_the_size_of_files(tmp_path: Path, begun: Path, async_save: bool) -> None:
    folder = tmp_path / "steps"
    shutil.copytree(begun, folder)

    def limit(rank: int) -> None:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))

    messages = run_ranks(train, 2, config_of(folder, async_save=async_save), limit, detail=False)
    check(folder, begun, messages, rank=1, reason="File too large")


@ASYNC
def test_a_disk_that_is_full(
    tmp_path: Path, begun: Path, whole: dict[str, bytes], async_save: bool
) -> None:
    size = sum(path.stat().st_size for path in begun.rglob("*") if path.is_file())
    with small_disk(tmp_path / "disk", kilobytes=size * 3 // 2 // 1024) as disk:
        folder = disk / "steps"
        shutil.copytree(begun, folder)
        messages = run_ranks(train, 2, config_of(folder, async_save=async_save), detail=False)
        rank = int(messages[0].partition("by rank ")[2][0])
        check(folder, begun, messages, rank=rank, reason="No space left on device")
        shutil.copytree(folder, tmp_path / "larger")
    assert run_ranks(train, 2, config_of(tmp_path / "larger"), detail=False) == ["", ""]
    assert step_bytes(tmp_path / "larger", LAST) == whole


@SYNC
def test_a_directory_that_becomes_read_only(
    tmp_path: Path, begun: Path, whole: dict[str, bytes], async_save: bool
) -> None:
    """After the run has begun. The kernel says so in one of two ways, by who asks."""
    check_can_mount(tmp_path)
    folder = tmp_path / "steps"
    shutil.copytree(begun, folder)
    with ExitStack() as undone:

        def close(rank: int) -> None:
            def reached(at: Point) -> None:
                if at is Point.SNAPSHOT and rank == 0:
                    points.reached = lambda at: None
                    make_read_only(folder)

            points.reached = reached

        undone.callback(make_writable, folder)
        messages = run_ranks(
            train, 2, config_of(folder, async_save=async_save), close, detail=False
        )
    check(
        folder,
        begun,
        messages,
        rank=0,
        reason="Read-only file system" if "Read-only" in messages[0] else "Permission denied",
    )
    assert run_ranks(train, 2, config_of(folder), detail=False) == ["", ""]
    assert step_bytes(folder, LAST) == whole


@pytest.mark.long
def test_the_program_ends_with_a_status_and_one_line(tmp_path: Path) -> None:
    arguments = command(
        *SMALL_RUN, *MOCK, "--train-iters", "3", "--eval-iters", "0", "--save", str(tmp_path)
    )
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 60; exec "$@"', "bash", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert (
        f"error: --save {tmp_path}: the checkpoint of iteration 3 could not be written by rank 0: "
        in done.stderr
    )
    assert "File too large" in done.stderr and not list(tmp_path.glob("iter_*"))
