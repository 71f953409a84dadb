"""SIGTERM, SIGUSR1 or SIGUSR2 to one rank or to the launcher: all ranks stop at the same point,
save, and lose nothing."""

import ctypes
import os
import shlex
import signal

import numpy as np
import pytest
import torch.distributed as dist

from megatron_lite.training import build_trainer as build
from tests.support.commands import MOCK, SMALL_RUN
from tests.support.corpora import written
from tests.support.happenings import at, builds_second
from tests.support.programs import completes, program
from tests.support.runs import rows, step_bytes

RUN = [
    *SMALL_RUN,
    *shlex.split(
        "--micro-batch-size 1 --train-iters 6 --eval-interval 3 --eval-iters 2 "
        "--tensor-model-parallel-size 2 --exit-signal-handler"
    ),
]


def _gets(rank, place, *names, iteration=0):
    """The rank gets these signals there, all at once."""

    def send():
        numbers = [signal.Signals[name] for name in names]
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        for number in numbers:
            os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    return at(rank, place, send, iteration=iteration)


def _losses(text):
    return [line for line in text.splitlines() if " loss at iteration " in line]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing happens to: its files, and its validation and test losses."""
    folder = tmp_path_factory.mktemp("whole")
    into = f"--save {folder}/save --metrics-jsonl {folder}/rows"
    losses = _losses(completes(*RUN, *MOCK, *into.split()))
    assert [line.split()[0] for line in losses] == ["validation", "validation", "test"]
    return folder, losses


@pytest.mark.runs
@pytest.mark.parametrize(
    "rank, place, names, iteration",
    [
        (1, "evaluation", ["SIGUSR2"], 3),
        (0, "backward", ["SIGUSR1"], 2),
        (1, "step", ["SIGINT"], 3),
        (0, "saving", ["SIGTERM"], 4),
        (1, "step", ["SIGTERM", "SIGUSR1"], 3),
    ],
)
def test_a_signal_in_training_costs_nothing(tmp_path, whole, rank, place, names, iteration):
    """In a step; in the first batch of an evaluation, which is dropped and done again; in a
    checkpoint, which is finished; several signals, before an evaluation that is left to the next
    start."""
    into = f"--save-interval 4 --save {tmp_path}/save --metrics-jsonl {tmp_path}/rows"
    arguments = [*RUN, *MOCK, *into.split(), *["--exit-signal", "SIGINT"] * ("SIGINT" in names)]
    with program(
        arguments, ranks=2, prepare=_gets(rank, place, *names, iteration=iteration)
    ) as run:
        run.ends(0, 0)
        losses = _losses(run.output(0))
        assert run.output(0).count(f"exiting at iteration {iteration}: ") == 1
        assert ("is left unfinished" in run.output(0)) == (place == "evaluation")
        assert run.messages() == []
    losses += _losses(completes(*arguments, "--load", str(tmp_path / "save")))
    folder, expected = whole
    assert step_bytes(tmp_path / "save", 6) == step_bytes(folder / "save", 6) != {}
    assert rows(tmp_path / "rows") == rows(folder / "rows") and losses == expected


@pytest.mark.runs
@pytest.mark.parametrize("rank, name, place", [(1, "SIGUSR1", "model"), (0, "SIGTERM", "index")])
def test_before_the_first_iteration_all_stop_at_once(tmp_path, place, rank, name):
    """One rank builds the index while the other waits for it, or both their models: nothing is
    saved, and the next run makes the cache whole."""
    cache = tmp_path / "cache"
    into = f"--save {tmp_path}/save --data-cache-path {cache}"
    arguments = [*RUN, *_corpus(tmp_path), *into.split()]

    def prepare(own):
        _gets(rank, place, name)(own)
        if own != rank:
            builds_second(cache)

    with program(arguments, ranks=2, prepare=prepare) as run:
        status = 128 + signal.Signals[name]
        run.ends(status, status)
        (message,) = run.messages()
        assert f"[rank {rank}] stops at start-up: {name} (--exit-signal-handler)" in message
        assert "Traceback" not in run.everything()
    assert not list((tmp_path / "save").glob("iter_*"))
    completes(*arguments)
    assert not list(cache.glob("*.tmp-*"))  # what a rank that was stopped has left


# --- signals that come when all is done ---


@pytest.mark.runs
@pytest.mark.parametrize("rank_0_owns_store", [True, False])
def test_further_signals_at_the_end_of_a_saved_run_do_not_change_its_status(
    tmp_path, rank_0_owns_store
):
    """As Slurm sends them: once when the time is nearly over, and again. The second one comes when
    the groups are left."""

    def prepare(rank):
        _gets(1, "forward", "SIGTERM", iteration=2)(rank)
        destroy = dist.destroy_process_group

        def late():
            for name in ("SIGTERM", "SIGUSR1", "SIGUSR2"):
                os.kill(os.getpid(), signal.Signals[name])
            destroy()

        dist.destroy_process_group = late

    with program(
        [*RUN, *MOCK, "--save", str(tmp_path)],
        ranks=2,
        prepare=prepare,
        rank_0_owns_store=rank_0_owns_store,
    ) as run:
        run.ends(0, 0)
        assert run.messages() == []
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "2"


# --- Ctrl-C ---


def _interrupted(place, *ranks, iteration=0, name="SIGINT"):
    """These ranks get the signal there. A shell's job in the background would ignore it."""

    def prepare(rank):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for one in ranks:
            _gets(one, place, name, iteration=iteration)(rank)

    return prepare


@pytest.mark.runs
@pytest.mark.parametrize(
    "ranks, place, iteration",
    [
        ((0, 1), "forward", 2),
        ((1,), "saving", 4),
        ((0, 1), "index", 0),
        ((1,), "model", 0),
        ((1,), "backward", 2),
        ((0, 1), "replay", 2),
        ((1,), "evaluation", 3),
        ((0,), "step", 2),
    ],
)  # only one rank makes the index: it may be rank 0
def test_ctrl_c_is_one_line_and_no_traceback(tmp_path, place, iteration, ranks):
    """A terminal sends it to every rank, srun to one. Without --exit-signal-handler nothing is
    saved, and no rank trains on."""
    data = _corpus(tmp_path) if place == "index" else MOCK
    more = f"--save {tmp_path}/save --save-interval 4 --recompute-policy *:full"
    arguments = [*RUN[:-1], *data, *more.split()]
    name = "SIGTERM" if place == "step" else "SIGINT"
    prepare = _interrupted(place, *ranks, iteration=iteration, name=name)
    with program(arguments, ranks=2, prepare=prepare) as run:
        number = signal.Signals[name]
        assert set(run.wait()) <= {-number, 128 + number}, run.everything()
        (line,) = run.messages()
        assert f": {name}; no checkpoint is written for it (--save with --exit-signal-h" in line
        assert "stops at " in line and "Traceback" not in run.everything()
    assert place == "saving" or not [*tmp_path.glob("save/iter_*")]
    completes(*arguments, "--load", str(tmp_path / "save"), "--allow-fresh-start")


def test_ctrl_c_to_a_rank_that_cannot_be_interrupted_ends_the_run_too():
    """Its main thread waits for a collective, or as here for something else, outside of Python."""

    def prepare(rank):
        _interrupted("model")(rank)
        if rank == 1:

            def stuck(*args, **options):
                os.kill(os.getpid(), signal.SIGINT)
                ctypes.CDLL(None).pause()
                ctypes.CDLL(None).sleep(3600)

            build.build_datasets = stuck

    with program([*RUN, *MOCK], ranks=2, prepare=prepare) as run:
        assert set(run.wait()) <= {-signal.SIGINT, 128 + signal.SIGINT}, run.everything()
        assert len(run.messages()) == 1 and "Traceback" not in run.everything()


def _corpus(folder):
    prefix = written(folder / "data", (np.arange(30) + document for document in range(40)))
    return f"--vocab-size 98 --split 80,10,10 --data-path {prefix}".split()
