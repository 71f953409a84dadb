"""A rank that holds the others up is named with its ratio; where none does, nobody is."""

import re
import time

import pytest

from megatron_lite.model.layer import TransformerLayer
from megatron_lite.parallel.collectives import WAITING
from megatron_lite.supervision.slow_rank import RankTime, slow_ranks
from tests.support.limits import patiently
from tests.support.mutants import replaces
from tests.support.rank_faults import SHAPES, in_shape, run_until_it_ends
from tests.support.ranks import run_ranks
from tests.support.runs import tiny_run


def times(*ms):
    return [RankTime(rank, 0, f"node{rank // 2}", one) for rank, one in enumerate(ms)]


def test_the_slowest_are_named_first_and_no_more_of_them_than_asked_for():
    found = slow_ranks(times(10.0, 10.5, 18.0, 9.5, 30.0, 10.0, 10.0, 10.0), ratio=1.2, at_most=2)
    assert found == [
        "slow rank: 4 (node2) 3.0x the median of 8 ranks (30.0 ms against 10.0 ms)",
        "slow rank: 2 (node1) 1.8x the median of 8 ranks (18.0 ms against 10.0 ms)",
    ]
    of_two = slow_ranks(times(15.0, 10.0), ratio=1.4, at_most=9)  # the faster is the measure
    assert of_two == ["slow rank: 0 (node0) 1.5x the median of 2 ranks (15.0 ms against 10.0 ms)"]


@pytest.mark.runs(daily=0, ci=1)
@pytest.mark.parametrize("shape, ranks", [("tp2", 2), ("dp2", 2), ("fsdp2", 2), ("pp2", 4)])
def test_a_rank_that_sleeps_in_its_layers_is_named_and_no_other_is(capfd, shape, ranks):
    """All ranks' steps take equally long: those that wait for it are not named. A step without the
    sleep takes some 10 ms, and several times as long where other work takes the processors: the
    sleep is long enough to be told from that, or becomes so. Nothing is timed afterwards."""
    config = tiny_run(
        train_iters=6,
        eval_iters=0,
        global_batch_size=ranks,
        log_interval=3,
        log_straggler=True,
        straggler_ratio=3.0,
    )

    def check(seconds):
        def work(rank, world_size):
            @replaces("forward", TransformerLayer)
            def slowly(forward, layer, *inputs):
                if rank == 1:
                    time.sleep(seconds)
                return forward(layer, *inputs)

            with pytest.MonkeyPatch.context() as monkeypatch:
                slowly(monkeypatch)
                _, error = run_until_it_ends(in_shape(config, shape))
            return error, WAITING.is_timed

        assert run_ranks(work, ranks) == [(None, False)] * ranks
        named = re.findall(
            r"slow rank: (\d) \(\S+\) ([\d.]+)x the median of (\d) ranks", capfd.readouterr().out
        )
        assert [rank for rank, *_ in named] == ["1"] * 2  # 6 iterations, a line every 3
        assert all(
            float(ratio) >= 3.0 and int(compared) == SHAPES[shape].ranks
            for _, ratio, compared in named
        )

    patiently(check, 0.5 if shape == "pp2" else 0.25)  # where the rank has one of the two layers
