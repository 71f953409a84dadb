"""Data files that are truncated, swapped or foreign end the run on all ranks; index caches survive
a kill at any point."""

import os
import shlex
import shutil
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.data import index_cache
from megatron_lite.data.index_cache import kept_arrays
from tests.support.commands import SMALL_RUN
from tests.support.corpora import written
from tests.support.forks import dies_before, status_of_fork
from tests.support.happenings import builds_second, happens
from tests.support.programs import completes, program
from tests.support.runs import rows, step_bytes

RUN = [
    *SMALL_RUN,
    *shlex.split(
        "--micro-batch-size 1 --train-iters 4 --tensor-model-parallel-size 2 "
        "--vocab-size 98 --split 80,10,10"
    ),
]


def _write(prefix, *, documents=40, first=0):
    texts = (np.arange(30) + first + document % 20 for document in range(documents))
    return Path(written(prefix, texts))


def _file(prefix, kind):
    return prefix.with_name(f"{prefix.name}.{kind}")


def _truncate(prefix, kind):
    os.truncate(_file(prefix, kind), _file(prefix, kind).stat().st_size - 10)


def _swap(prefix, kind, **other):
    shutil.copy(_file(_write(prefix.with_name("other"), **other), kind), _file(prefix, kind))


@pytest.mark.runs(ci=4)
@pytest.mark.parametrize(
    "damage, kind, message",
    [
        (_truncate, "bin", "data.bin: found 2390 bytes, expected 2400 bytes"),
        (_truncate, "idx", "data.idx: found "),
        (partial(_swap, documents=39), "idx", "data.bin: found 2400 bytes, expected"),
        # a .bin of the very same size: sizes cannot tell, its ids do
        (partial(_swap, first=70), "bin", "but the vocabulary has 99 ids"),
    ],
)
def test_a_damaged_pair_ends_every_rank_with_status_2(tmp_path, damage, kind, message):
    prefix = _write(tmp_path / "data")
    damage(prefix, kind)
    with program([*RUN, "--data-path", str(prefix)], ranks=2) as run:
        run.ends(2, 2)
        (said,) = run.messages()
        assert message in said and "Traceback" not in run.everything()


@pytest.mark.parametrize(
    "damage, message",
    [
        (partial(_truncate, kind="bin"), "[rank 1] error: data.bin: found 2390 bytes"),
        (partial(_write, first=3), "rank 1 has other data files than rank 0"),  # of the same sizes
    ],
)
def test_a_pair_that_one_node_has_otherwise_ends_the_run(tmp_path, damage, message):
    """Each rank is a node of its own here: the same relative path, its own files."""
    for rank in range(2):
        _write(tmp_path / str(rank) / "data")
    damage(tmp_path / "1" / "data")
    with program(
        [*RUN, "--data-path", "data"], ranks=2, prepare=lambda rank: os.chdir(tmp_path / str(rank))
    ) as run:
        run.ends(2, 2)
        (said,) = run.messages()
        assert message in said


@pytest.mark.long
def test_node_local_caches_one_of_them_empty_give_the_same_run(tmp_path):
    prefix = _write(tmp_path / "data")
    common = [*RUN, "--data-path", str(prefix), "--data-cache-path", "cache"]
    for name in ("shared", "0", "1"):
        (tmp_path / name).mkdir()

    def trains(name, folder):
        save, metrics = tmp_path / f"save {name}", tmp_path / f"rows {name}"
        with program(
            [*common, "--save", str(save), "--metrics-jsonl", str(metrics)],
            ranks=2,
            prepare=lambda rank: os.chdir(tmp_path / folder(rank)),
        ) as run:
            run.ends(0, 0)
        return rows(metrics), step_bytes(save, 4)

    expected = trains("shared", lambda rank: "shared")
    shutil.copytree(tmp_path / "shared" / "cache", tmp_path / "0" / "cache")
    assert trains("local", str) == expected
    assert sorted(os.listdir(tmp_path / "1" / "cache")) == sorted(
        os.listdir(tmp_path / "0" / "cache")
    )


def test_a_build_killed_at_any_point_leaves_nothing_that_looks_complete(tmp_path):
    arrays = {"order": np.arange(7)[::-1], "starts": np.arange(10).reshape(5, 2)}
    built, status = 0, -1

    def build():
        nonlocal built
        built += 1
        return arrays

    def kept(point, build=build):
        return kept_arrays(str(tmp_path), "", {"point": point}, build, fault=lambda _: None)

    points = 0
    changes = [(os, "mkdir"), (np, "save"), (os, "rename"), (index_cache, "sync")]
    while status != 0:

        def killed_at(point=points):
            dies_before(point, changes)
            kept(point)

        status = status_of_fork(killed_at)
        assert status in (0, -signal.SIGKILL)
        before = built
        found = kept(points)
        assert {name: array.tolist() for name, array in found.items()} == {
            name: array.tolist() for name, array in arrays.items()
        }
        assert built == before or status != 0
        kept(points, pytest.fail)
        assert not list(tmp_path.glob("*.tmp-*"))
        points += 1
    assert points >= 10  # a folder, two arrays, two lists, their folder, and the name


@pytest.mark.long
def test_a_killed_index_build_ends_the_other_rank_and_the_next_run_builds_it(tmp_path):
    prefix = _write(tmp_path / "data")

    def prepare(rank):
        if rank == 1:
            happens("index", lambda: os.kill(os.getpid(), signal.SIGKILL))
        else:
            builds_second(tmp_path / "data_cache")

    with program([*RUN, "--data-path", str(prefix)], ranks=2, prepare=prepare) as run:
        run.ends(1, -signal.SIGKILL)
        assert run.messages() == ["pretrain_gpt.py: [rank 0] stops at start-up: rank 1 is gone"]
    completes(*RUN, "--data-path", str(prefix))
