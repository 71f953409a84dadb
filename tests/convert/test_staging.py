"""A conversion's target appears complete or not at all, whatever ends the conversion."""

import os
import signal
from dataclasses import replace
from signal import SIGKILL

import pytest

from megatron_lite.config.checks import InputError
from megatron_lite.convert import hf
from megatron_lite.convert.target import LOCK, MARK, SUFFIX, complete_folder
from megatron_lite.tools.convert import formats
from tests.support.conversions import converted, saved_peer, there_and_back
from tests.support.forks import status_of_fork


def test_a_complete_folder_has_the_files_and_no_others(tmp_path):
    """After an error, such as that of a full disk, there is none. An empty folder is as good."""
    target = tmp_path / "deep" / "new"
    with (
        pytest.raises(InputError, match=r"--save .*new cannot be written: No space left"),
        complete_folder(target),
    ):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []
    target.mkdir(parents=True)
    with complete_folder(target) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("text")
    found = sorted(str(path.relative_to(target.parent)) for path in target.parent.rglob("*"))
    assert found == ["new", "new/inner", "new/inner/file"]


def test_an_existing_target_is_refused(tmp_path):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder" / "kept").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.rglob("*"))
    for kind in ("file", "folder", "link"):
        with (
            pytest.raises(InputError, match="exists already, and a conversion replaces nothing"),
            complete_folder(tmp_path / kind),
        ):
            pass
    assert sorted(tmp_path.rglob("*")) == before


def test_a_second_conversion_to_the_same_target_is_refused(tmp_path):
    with complete_folder(tmp_path / "new") as folder:
        (folder / "file").write_text("first")
        with (
            pytest.raises(InputError, match="another conversion writes there already"),
            complete_folder(tmp_path / "new"),
        ):
            pass
        assert (folder / "file").exists()
    assert (tmp_path / "new" / "file").read_text() == "first"


def test_a_killed_conversion_is_simply_run_again(tmp_path):
    """The child dies before its third tensor, as by an out-of-memory kill."""
    pytest.importorskip("transformers")
    saved_peer("llama", tmp_path / "theirs")

    def convert():
        left = iter(range(2))
        source = formats()["hf"].source(tmp_path / "theirs")

        def read(name):
            if next(left, None) is None:
                os.kill(os.getpid(), SIGKILL)
            return source.read(name)

        formats()["megatron-lite"].write(replace(source, read=read), tmp_path / "ours")

    assert status_of_fork(convert) == -SIGKILL
    left, theirs = sorted(tmp_path.iterdir())
    assert left.name.startswith(f"ours{SUFFIX}-") and theirs.name == "theirs"
    there_and_back(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "ours", "theirs"]


@pytest.mark.parametrize("kind", ["link", "folder", "with a lock of its own", "link as lock"])
def test_what_is_not_ours_stays(kind, tmp_path):
    """Whatever lies beside the target under the name of a conversion's folder."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis.txt").write_text("years of work")
    beside = tmp_path / "deep" / f"new{SUFFIX}-12345678"
    beside.parent.mkdir()
    if kind == "link":
        (theirs / LOCK).write_bytes(MARK)
        beside.symlink_to(theirs)
    else:
        theirs.rename(beside)
    if kind == "with a lock of its own":
        (beside / LOCK).touch()
    if kind == "link as lock":
        (tmp_path / "mark").write_bytes(MARK)
        (beside / LOCK).symlink_to(tmp_path / "mark")
    with complete_folder(tmp_path / "deep" / "new") as folder:
        (folder / "file").write_text("text")
    assert (beside / "thesis.txt").read_text() == "years of work"
    assert [path.name for path in (tmp_path / "deep" / "new").iterdir()] == ["file"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_a_conversion_in_one_line(number, tmp_path, capfd):
    """It arrives below torch's C++ code, where an exception would be lost."""
    pytest.importorskip("transformers")
    saved_peer("llama", tmp_path / "theirs")

    def convert():
        read = hf.TensorInFile.read

        def interrupted(self):
            os.kill(os.getpid(), number)
            return read(self)

        hf.TensorInFile.read = interrupted
        converted(tmp_path, "hf theirs -> megatron-lite ours")

    capfd.readouterr()
    assert status_of_fork(convert) == -number
    error = capfd.readouterr().err
    assert error.endswith(f"error: stopped by {signal.Signals(number).name}\n")
    assert len(error.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]
