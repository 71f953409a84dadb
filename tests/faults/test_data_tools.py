"""The data tools leave nothing half written, and nothing running: full disks, signals, killed
parents, lines without an end."""

import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_lite.config.checks import InputError
from megatron_lite.data import indexed
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.tools import preprocess_data, train_tokenizer
from tests.support.commands import ROOT, environment
from tests.support.corpora import written
from tests.support.disks import small_disk
from tests.support.forks import children_of, dies_before, status_of_fork
from tests.support.limits import HANG_S
from tests.support.syscalls import recorded

ERROR = "python -m megatron_lite.tools.preprocess_data: error: "


def _corpus(path, lines, text="1 2 3"):
    path.write_text((json.dumps({"text": text}) + "\n") * lines)
    return path


def _flags(source, prefix, *more):
    words = f"--input {source} --output-prefix {prefix} --tokenizer-type NullTokenizer"
    return [*words.split(), "--vocab-size", "50", *more]


# --- a full disk ---


def test_a_full_disk_at_the_index_leaves_the_pair_of_before(tmp_path, capsys):
    """The tokens fit; the index, which is larger, does not."""
    with small_disk(tmp_path / "disk", kilobytes=64) as disk:
        assert preprocess_data.main(_flags(_corpus(tmp_path / "in.jsonl", 10), disk / "out")) == 0
        before = {path.name: path.read_bytes() for path in disk.iterdir()}
        assert (
            preprocess_data.main(_flags(_corpus(tmp_path / "in.jsonl", 5000, "1"), disk / "out"))
            == 2
        )
        assert (
            f"error: {disk}/out_text_document.idx cannot be written: No space left"
            in capsys.readouterr().err
        )
        assert {path.name: path.read_bytes() for path in disk.iterdir()} == before


# --- signals ---


@pytest.mark.runs(ci=3)
@pytest.mark.parametrize("workers, name", [(2, "SIGTERM"), (1, "SIGINT"), (2, "SIGHUP")])
def test_a_signal_leaves_no_partial_file_and_no_worker(tmp_path, name, workers):
    """The tool dies of the signal, as a shell expects, and says so in one line."""
    with _endless(tmp_path, workers) as tool:
        tool.send_signal(signal.Signals[name])
        _, errors = tool.communicate(timeout=HANG_S)
        assert tool.returncode == -signal.Signals[name], errors
        assert errors.splitlines()[-1] == f"{ERROR}stopped by {name}" and "Traceback" not in errors
        assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_end_with_a_parent_that_is_killed_and_the_next_run_removes_its_partial_file(
    tmp_path,
):
    with _endless(tmp_path, workers=2) as tool:
        workers = [os.pidfd_open(pid) for pid in children_of(tool.pid)]
        assert len(workers) >= 2
        tool.kill()
        tool.wait()
        for worker in workers:
            assert select.select([worker], [], [], HANG_S)[0], "a worker lives on"
    assert [path.suffix for path in (tmp_path / "out").iterdir()] == [f".tmp-{tool.pid}"]
    flags = _flags(_corpus(tmp_path / "in.jsonl", 3), tmp_path / "out" / "a")
    assert preprocess_data.main(flags) == 0
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".bin", ".idx"}


@contextmanager
def _endless(folder, workers):
    """The tool in the middle of an input that does not end, in a group of processes of its own."""
    (folder / "out").mkdir()
    script = folder / "program.py"  # a file, which the workers import too
    script.write_text("""if __name__ == "__main__":
    import itertools, sys, time
    from megatron_lite.tools import preprocess_data as tool
    def blocks(path, *rest):
        for number in itertools.count():
            yield [(1, b'{"text": "1 2 3"}')] * 5
            if number == 30:
                print("in the middle", flush=True)
            time.sleep(0.005)
    tool._line_blocks = blocks
    sys.exit(tool.main(sys.argv[1:]))
""")
    arguments = _flags(
        _corpus(folder / "in.jsonl", 1), folder / "out" / "a", "--workers", str(workers)
    )
    process = subprocess.Popen(
        [sys.executable, str(script), *arguments],
        cwd=ROOT,
        env=environment(PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "in the middle\n", (
            process.communicate()
        )
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


# --- lines that are too long ---


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_line_beyond_the_limit_is_named_and_one_at_the_limit_is_read(tmp_path, capsys, workers):
    lines = [json.dumps({"text": "1 " * count}) for count in (3, 40, 3)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    flags = _flags(
        tmp_path / "in.jsonl", tmp_path / "out", "--workers", workers, "--max-line-bytes"
    )
    assert preprocess_data.main([*flags, str(len(lines[1]))]) == 0
    assert preprocess_data.main([*flags, str(len(lines[1]) - 1)]) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith(ERROR)]
    assert f"in.jsonl:2: the line is longer than --max-line-bytes {len(lines[1]) - 1}, " in error


def test_a_line_without_an_end_is_not_read_to_its_end(tmp_path):
    """A sparse file of 1 TiB: nothing but a bounded read comes back from it."""
    with open(tmp_path / "in.jsonl", "wb") as file:
        file.write(b'{"text": "1"}\n{"text": "')
        file.truncate(1 << 40)
    before = _bytes_read()
    assert preprocess_data.main(_flags(tmp_path / "in.jsonl", tmp_path / "out")) == 2
    assert train_tokenizer.main(f"--input {tmp_path}/in.jsonl --output {tmp_path}/out".split()) == 2
    assert _bytes_read() - before < 1 << 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 8 << 20  # KiB


def _bytes_read():
    """How much this process has read from files so far."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


# --- the order in which a pair is replaced ---

CHANGES = [*((os, name) for name in ("unlink", "replace")), (indexed, "sync")]
OLD, NEW = ([1, 2, 3], [4]), ([5], [6, 7, 8])  # of one size: no check of sizes tells them apart


def _read(prefix):
    try:
        found = IndexedDataset(prefix)
    except InputError as error:
        return str(error)
    return tuple(found.get(number).tolist() for number in range(len(found)))


def test_a_writer_killed_at_any_point_never_leaves_a_new_bin_beside_an_old_idx(tmp_path):
    seen, status, points = set(), -1, 0
    while status != 0:
        prefix = written(tmp_path / "a", OLD)

        def killed_before(change=points, prefix=prefix):
            dies_before(change, CHANGES)
            written(prefix, NEW)

        status = status_of_fork(killed_before)
        assert status in (0, -signal.SIGKILL)
        found = _read(prefix)
        assert found in (OLD, NEW) or "no such file" in found, (
            f"killed before change {points}: read {found}"
        )
        seen.add("none" if isinstance(found, str) else "old" if found == OLD else "new")
        points += 1
    assert seen == {"old", "none", "new"} and points >= 7


def test_the_pair_is_replaced_in_the_order_that_readers_and_a_power_cut_need(tmp_path):
    """A name reaches the disk when its folder is synced: between the end of the old index and the
    new .bin lies such a sync."""
    prefix = written(tmp_path / "a", OLD)
    with recorded() as calls:
        written(prefix, NEW)
    found = " ".join(f"{one.name} {os.path.basename(one.target or one.path)}" for one in calls)
    assert found.replace(f".tmp-{os.getpid()}", ".tmp").replace(tmp_path.name, "folder") == (
        "fsync a.idx.tmp fsync a.bin.tmp unlink a.idx fsync folder "
        "rename a.bin rename a.idx fsync folder"
    )


def test_a_reader_that_a_writer_overtakes_does_not_mix_the_pairs(tmp_path, monkeypatch):
    """The writer comes between the reader's look at the .idx and its look at the .bin."""
    prefix = written(tmp_path / "a", OLD)
    check = IndexedDataset._check_index

    def overtaken(self):
        size = check(self)
        monkeypatch.setattr(IndexedDataset, "_check_index", check)
        written(prefix, NEW)
        return size

    monkeypatch.setattr(IndexedDataset, "_check_index", overtaken)
    with pytest.raises(
        InputError, match=r"a\.idx was replaced while it was being read: start again"
    ):
        IndexedDataset(prefix)
    assert _read(prefix) == NEW
