"""A log on a full disk, or one that is killed while it is rewritten, ends no run and loses no row
that was whole."""

import os
import shlex
import signal

import pytest

from megatron_lite.checkpointing.metadata import Progress
from megatron_lite.training import log_files
from megatron_lite.training.log_files import TensorBoard, metrics_file
from tests.support.commands import MOCK, SMALL_RUN, command, started
from tests.support.forks import dies_before, status_of_fork
from tests.support.runs import events_in, rows, run_to_end, tiny_run
from tests.support.syscalls import recorded

ROWS = "".join(f'{{"iteration": {number}}}\n' for number in range(1, 6))


def run_config(**logging):
    return tiny_run(train_iters=4, eval_iters=0, log_interval=1, **logging)


def test_a_metrics_file_on_a_full_device_is_said_once_and_training_goes_on(capsys):
    trainer = run_to_end(run_config(metrics_jsonl="/dev/full"))
    printed = capsys.readouterr()
    assert trainer.progress.iteration == 4 and " 4/4  " in printed.out
    assert printed.out.count("No space left") == 1 and "Traceback" not in printed.err
    assert (
        "warning: --metrics-jsonl /dev/full: iteration 1 could not be written (No space left "
        "on device); training goes"
    ) in printed.out


def test_rows_that_fit_again_are_written_and_the_others_leave_nothing(
    tmp_path, monkeypatch, capsys
):
    """Two writes fail as on a full disk: half of what was to be written is there."""
    written, count = os.write, iter(range(10**6))

    def write(descriptor, data):
        if next(count) in (1, 2):
            written(descriptor, data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        return written(descriptor, data)

    monkeypatch.setattr(log_files.os, "write", write)
    run_to_end(run_config(metrics_jsonl=str(tmp_path / "m")))
    lines = (tmp_path / "m").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ['{"iteration": 1', '{"iteration": 4']
    assert capsys.readouterr().out.count("No space left") == 1


def losses(folder):
    """The points that TensorBoard reads."""
    return [(event.step, event.value) for event in events_in(folder).Scalars("lm loss")]


def test_points_are_on_the_disk_at_once_and_void_from_where_a_later_start_goes_on(tmp_path):
    for done, loss in ((0, 5.0), (2, 7.0)):
        scalars = TensorBoard(str(tmp_path), Progress(iteration=done, consumed_samples=4 * done))
        for step in range(done + 1, 4):
            scalars.write(step, 4 * step, {"lm loss": loss})
        assert losses(tmp_path)[-1] == (3, loss), "before the file is closed"
        scalars.close()
    assert losses(tmp_path) == [(1, 5.0), (2, 5.0), (3, 7.0)]


def test_a_full_disk_at_the_start_ends_no_run_either(tmp_path, monkeypatch, capsys):
    path = tmp_path / "m"
    path.write_text(ROWS)

    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megatron_lite.training.log_files.written_beside", full_disk)
    assert run_to_end(run_config(metrics_jsonl=str(path))).progress.iteration == 4
    assert "No space left on device" in capsys.readouterr().out
    assert path.read_text() == ROWS


@pytest.mark.parametrize("output", [">/dev/full", ">&-", ">/dev/full 2>&1"])
def test_standard_output_that_is_full_or_closed_ends_no_run(output, tmp_path):
    program = shlex.join(command(*SMALL_RUN, *MOCK, "--metrics-jsonl", f"{tmp_path}/m"))
    done = started("sh", "-c", f"{program} {output}")
    lost = "warning: standard output cannot be written (No space left on device); training goes on"
    assert done.stderr.count(lost) == (output == ">/dev/full")
    assert done.returncode == 0 and len(rows(tmp_path / "m")) == 12
    done = started("sh", "-c", f"{shlex.join(command('--help'))} {output}")
    assert done.returncode == 2 * ("full" in output) and "Traceback" not in done.stderr


def test_a_kill_while_rows_are_dropped_leaves_the_whole_file_or_the_new_one(tmp_path):
    """Before every call that changes a name. The old text is there under one name, and the next
    start ends as without a kill."""
    number, status, shorter = 0, -1, ROWS[: len(ROWS) // 5 * 3]
    while status != 0:
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / "m"
        path.write_text(ROWS)

        def killed(number=number, path=path):
            dies_before(number, [(os, "replace"), (os, "unlink")])
            metrics_file(str(path), 3)

        status = status_of_fork(killed)
        assert status in (0, -signal.SIGKILL) and path.read_text() in (ROWS, shorter)
        metrics_file(str(path), 3)
        assert path.read_text() == shorter and (folder / "m.previous").read_text() == ROWS
        assert sorted(other.name for other in folder.iterdir()) == ["m", "m.previous"]
        number += 1
    assert number > 2


def test_the_new_text_is_on_the_disk_before_it_takes_the_files_name(tmp_path):
    path = tmp_path / "m"
    path.write_text(ROWS)
    with recorded() as calls:
        metrics_file(str(path), 3)
    renamed = next((place for place, call in enumerate(calls) if call.target == str(path)), None)
    assert renamed is not None
    assert calls[renamed - 1].name == "fsync" and calls[renamed - 1].times == calls[renamed].times
    assert (calls[renamed + 1].name, calls[renamed + 1].path) == ("fsync", str(tmp_path))
