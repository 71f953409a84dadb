"""A run that is told to stop stops after the same iteration on every rank, saves, and goes on as if
nothing had happened."""

from megatron_lite.supervision import exits
from tests.support.runs import run_to_end, tiny_run


def test_a_run_ends_after_its_duration_and_says_why(monkeypatch, capsys):
    # the start, then the end of each iteration; whole numbers, so that no difference is rounded
    times = iter([1000.0, 1059.0, 1060.0, 1061.0])
    monkeypatch.setattr(
        exits, "time", type("Clock", (), {"monotonic": staticmethod(lambda: next(times))})
    )
    assert run_to_end(tiny_run(train_iters=9, exit_duration_in_mins=1)).progress.iteration == 3
    assert "exiting at iteration 3: --exit-duration-in-mins 1" in capsys.readouterr().out
