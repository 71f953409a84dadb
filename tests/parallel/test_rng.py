"""Named RNG streams: which stream a draw belongs to, and that leaving and coming back never repeats
a number."""

import pytest
import torch

from megatron_lite.parallel.rng import DEFAULT, TENSOR_PARALLEL, RngStreams, derive_seed

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _generator_is_put_back():
    with torch.random.fork_rng(devices=[]):
        yield


def streams(seed=1, **place):
    return RngStreams(CPU, seed=seed, **place)


def draw(rng=None, stream=DEFAULT, count=3):
    if rng is None:
        return torch.rand(count).tolist()
    with rng.fork(stream):
        return torch.rand(count).tolist()


def uninterrupted(stream, count, **place):
    """The first `count` numbers of a stream, drawn at once in a fresh set of streams."""
    return draw(streams(**place), stream, count)


def test_a_stream_entered_again_below_another_one_goes_on():
    expected_tp, expected_default = uninterrupted(TENSOR_PARALLEL, 9), uninterrupted(DEFAULT, 6)
    rng = streams()
    tensor_parallel, default = [], []
    with rng.fork(TENSOR_PARALLEL):
        tensor_parallel += draw()
        with rng.fork(DEFAULT):
            default += draw()
            tensor_parallel += draw(rng, TENSOR_PARALLEL)
            assert rng.current == DEFAULT
            default += draw()
        assert rng.current == TENSOR_PARALLEL
        tensor_parallel += draw()
    assert rng.current == DEFAULT
    assert tensor_parallel == expected_tp and default == expected_default


def test_every_stream_differs_over_data_parallel_ranks_and_seeds_and_one_over_tp_ranks():
    for stream in (DEFAULT, TENSOR_PARALLEL):
        places = ({}, {"dp_rank": 1}, {"dp_rank": 2}, {"seed": 2}, {"seed": 2, "dp_rank": 1})
        assert len({tuple(uninterrupted(stream, 4, **place)) for place in places}) == 5
        differs = uninterrupted(stream, 4) != uninterrupted(stream, 4, tp_rank=1)
        assert differs == (stream == TENSOR_PARALLEL)


def test_a_seed_is_the_same_on_every_machine():
    """Written down once: a change here changes every run's initial weights and dropout."""
    assert derive_seed("init", 1234, "decoder.final_layernorm.weight", 0) == 751531128718052507
