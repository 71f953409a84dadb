"""Named RNG streams: which stream a draw belongs to, and that leaving and coming back never repeats
a number."""

from copy import deepcopy

import pytest
import torch

from megatron_lite.parallel.rng import DEFAULT, TENSOR_PARALLEL, RngStreams, derive_seed


@pytest.fixture(autouse=True)
def _generator_is_put_back():
    with torch.random.fork_rng(devices=[]):
        yield


def streams(seed=1, **place):
    return RngStreams(torch.device("cpu"), seed=seed, **place)


def draw(rng=None, stream=DEFAULT, count=3):
    if rng is None:
        return torch.rand(count).tolist()
    with rng.fork(stream):
        return torch.rand(count).tolist()


def uninterrupted(stream, count, **place):
    """The first `count` numbers of a stream, drawn at once in a fresh set of streams."""
    return draw(streams(**place), stream, count)


def test_a_stream_entered_again_below_another_one_goes_on():
    rng = streams()
    with rng.fork(TENSOR_PARALLEL):
        tensor_parallel = draw()
        with rng.fork(DEFAULT):
            default = draw()
            tensor_parallel += draw(rng, TENSOR_PARALLEL)
            assert rng.current == DEFAULT
            default += draw()
        assert rng.current == TENSOR_PARALLEL
        tensor_parallel += draw()
    assert rng.current == DEFAULT
    assert tensor_parallel == uninterrupted(TENSOR_PARALLEL, 9)
    assert default == uninterrupted(DEFAULT, 6)


def test_layers_draw_from_the_streams_of_a_copy():
    assert draw(deepcopy(streams()), TENSOR_PARALLEL) == uninterrupted(TENSOR_PARALLEL, 3)


def test_every_stream_differs_over_data_parallel_ranks_and_seeds_and_one_over_tp_ranks():
    for stream in (DEFAULT, TENSOR_PARALLEL):
        found = {
            tuple(uninterrupted(stream, 4, seed=seed, dp_rank=rank))
            for seed in (1, 2)
            for rank in range(3)
        }
        assert len(found) == 6
        differs = uninterrupted(stream, 4) != uninterrupted(stream, 4, tp_rank=1)
        assert differs == (stream == TENSOR_PARALLEL)


def test_a_seed_is_the_same_on_every_machine():
    """Written down once: a change here changes every run's initial weights and dropout."""
    assert derive_seed("init", 1234, "decoder.final_layernorm.weight", 0) == 751531128718052507
