"""What a rank concludes from two beats of every other one: each cause of trouble, with ranks that
are silent, gone or behind."""

import signal

import pytest

from megatron_lite.supervision.exits import LEFT, Trouble, Verdict, judge

# BEATS MOVES WHERE; rank 0 judges
MOVES = {0: "5 4 iteration 3", 1: "5 3 iteration 2", 2: "7 4 iteration 3"}
SAVES = "no checkpoint is written for it (--save with --exit-signal-handler"


def judged(what, later, *, number=0, graceful=False):
    return judge(
        Trouble(what, number, before=dict(MOVES)), later, 0, timeout=2.0, graceful=graceful
    )


ALIVE = {0: "6 4 iteration 3", 1: "6 3 iteration 2", 2: "8 4 iteration 3"}
STOPPED = {**ALIVE, 1: MOVES[1]}
BOTH_STOPPED = {**MOVES, 0: ALIVE[0]}
ENDED = {**ALIVE, 2: LEFT}


@pytest.mark.parametrize(
    "what, later, text",
    [
        ("lost", STOPPED, "rank 1 is gone"),
        ("lost", BOTH_STOPPED, "ranks 1, 2 are gone"),
        ("lost", ENDED, "rank 2 has ended, with a message"),
        ("lost", ALIVE, "a connection to another rank broke, though all are alive"),
        ("late", STOPPED, "no progress for more than 2 s: rank 1 gives no sign of life"),
        ("late", ENDED, "no progress for more than 2 s: rank 2 has ended"),
        ("late", ALIVE, "no progress for more than 2 s: rank 1 is behind, at iteration 2"),
        (
            "late",
            {**ALIVE, 1: "6 4 iteration 3"},
            "no progress for more than 2 s: every rank is alive, and none is behind",
        ),
    ],
)
def test_the_text_names_who_is_missing_or_behind(what, later, text):
    assert judged(what, later) == Verdict(0, 1, text, with_stacks=what == "late")


def test_a_rank_that_had_ended_before_is_not_silent():
    before = {1: LEFT, 2: MOVES[2]}
    verdict = judge(
        Trouble("lost", before=before), {1: LEFT, 2: ALIVE[2]}, 0, timeout=2.0, graceful=False
    )
    assert verdict == Verdict(0, 1, "rank 1 has ended, with a message")


@pytest.mark.parametrize("name, graceful", [("TERM", False), ("TERM", True), ("INT", True)])
def test_a_signal_ends_the_run_unless_the_training_loop_takes_care_of_it(
    name, graceful, monkeypatch
):
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.default_int_handler)  # Ctrl-C
    number, more = signal.Signals[f"SIG{name}"], " --exit-signal SIGINT" * (name == "INT")
    stop = Verdict(0, 128 + number, f"SIG{name}; {SAVES}{more} writes one)")
    found = judged("signal", ALIVE, number=number, graceful=graceful)
    assert found == (None if graceful and not more else stop)
