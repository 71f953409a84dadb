"""How long a rank may stay where it is."""

from megatron_lite.supervision.exits import Pulse
from tests.support.runs import run_to_end, tiny_run


class Clock:
    """A clock that goes when it is told to."""

    seconds = 100.0

    def __call__(self):
        return self.seconds


def test_a_stretch_may_take_the_timeout_longer_than_the_longest_before_it():
    clock = Clock()
    pulse = Pulse(clock)
    pulse.at("iteration 1", limited=False)
    clock.seconds += 50.0
    assert pulse.seconds_left(10.0) is None
    pulse.at("iteration 2")
    clock.seconds += 4.0
    assert pulse.seconds_left(10.0) == 6.0
    pulse.at("iteration 3")
    assert pulse.seconds_left(10.0) == 14.0


def test_the_loop_tells_how_the_batch_grows(monkeypatch):
    told = []
    at = Pulse.at
    monkeypatch.setattr(
        Pulse,
        "at",
        lambda self, where, *, limited=True, growth=1.0: (
            told.append(growth),
            at(self, where, limited=limited, growth=growth),
        ),
    )
    run_to_end(
        tiny_run(
            global_batch_size=3,
            rampup_batch_size=(1, 1, 3),
            train_iters=4,
            eval_iters=0,
            log_interval=4,
        )
    )
    assert [growth for growth in told if growth != 1.0] == [2.0, 1.5]  # batches of 1, 1, 2 and 3
