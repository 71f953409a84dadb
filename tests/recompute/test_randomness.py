"""The states of the global generators are read again as soon as one of them has changed."""

import random

import numpy as np
import pytest

from megatron_lite.recompute.randomness import drawn_again, global_states

NORMAL = np.random.RandomState(1)
NORMAL.normal()  # holds a second one now, which it will return without another draw of bits
CHANGES = {
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "second gauss": lambda: random.gauss(0, 1),
    "seed": lambda: random.seed(5),
    "setstate": lambda: random.setstate(random.Random(6).getstate()),
    "numpy": np.random.rand,
    "numpy's normal": np.random.normal,
    "numpy's second normal": np.random.normal,
    "numpy's binomial": lambda: np.random.binomial(40, 0.4),
    "numpy's seed": lambda: np.random.seed(7),
    "numpy's set_state": lambda: np.random.set_state(NORMAL.get_state()),
    "numpy's own kept normal": np.random.normal,
    "another generator of bits": lambda: np.random.set_bit_generator(np.random.PCG64(3)),
    "its draw": np.random.rand,
}


@pytest.fixture(autouse=True)
def afterwards_as_before():
    bits = np.random.get_bit_generator()
    with drawn_again(global_states()):
        yield
        np.random.set_bit_generator(bits)


def test_each_draw_is_seen_and_nothing_else():
    for name, change in CHANGES.items():
        before = global_states()
        assert global_states() is before, name
        change()
        now = global_states()
        assert now is not before, name
        values = random.gauss(0, 1), np.random.normal(), np.random.normal()
        with drawn_again(now):
            assert values == (random.gauss(0, 1), np.random.normal(), np.random.normal()), name
        for each in now:
            each.restore()
