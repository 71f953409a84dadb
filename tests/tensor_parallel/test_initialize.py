"""Initial weights are a function of the seed, the parameter's name and its global shape: not of the
number of ranks."""

import math

import pytest
import torch

from megatron_lite.parallel.parameter_spec import ParameterSpec
from megatron_lite.parallel.rng import RngStreams
from megatron_lite.parallel.state import ParallelState
from megatron_lite.tensor_parallel import initialize
from megatron_lite.tensor_parallel.initialize import initial_values, initialize_parameters_
from tests.support.equality import VARIANTS, variant_config
from tests.support.models import build_tiny_model, on_ranks, whole_tensor
from tests.support.saves import same

SPECS = {
    "rows": ParameterSpec(global_shape=(24, 7), tp_dim=0, init_std=0.5),
    "padded": ParameterSpec(global_shape=(17, 3), tp_dim=0, padded_length=24, init_std=0.5),
    # blocks of 3 rows: shards cut them
    "more rows than blocks": ParameterSpec(global_shape=(156, 2), tp_dim=0, init_std=0.5),
}


CPU = torch.device("cpu")
ALONE = ParallelState(device=CPU, rng=RngStreams(CPU, seed=0))


def shard(name, *, seed=1, parameter="layer.weight"):
    return initial_values(SPECS[name], ALONE, seed=seed, name=parameter)


def test_padding_rows_are_zero_and_no_other_row_is():
    assert shard("padded").any(dim=1).tolist() == [True] * 17 + [False] * 7


def test_values_depend_on_the_seed_and_on_the_name():
    first = shard("rows")
    assert torch.equal(first, shard("rows"))
    assert not torch.equal(first, shard("rows", seed=2))
    assert not torch.equal(first, shard("rows", parameter="other.weight"))


def test_threads_draw_the_same_values(monkeypatch):
    alone = {name: shard(name) for name in SPECS}
    monkeypatch.setattr(initialize, "LARGE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert same({name: shard(name) for name in SPECS}, alone)


def test_values_are_normal_with_the_asked_deviation():
    """Over 64,000 draws the deviation is known to 0.3% and the mean to 0.4% of it (one sigma);
    allowed: 4 sigma."""
    values = (
        initial_values(
            ParameterSpec(global_shape=(640, 100), tp_dim=0, init_std=0.02), ALONE, seed=3, name="w"
        )
        / 0.02
    )
    assert abs(values.mean()) < 4 / math.sqrt(64_000)
    assert abs(values.std() - 1.0) < 4 / math.sqrt(2 * 64_000)
    assert abs((values.abs() < 1.0).float().mean() - 0.6827) < 0.01 and values.abs().max() < 5.5


@pytest.mark.runs
@pytest.mark.parametrize("tp_size", [2, 4])
def test_whole_models_start_from_the_same_bits_at_every_tp_size(tp_size):
    def work(parallel):
        whole = {}
        for name in VARIANTS:
            model = build_tiny_model(variant_config(name), parallel, dtype=torch.float32)
            initialize_parameters_(model, parallel, seed=5)
            whole[name] = {
                key: whole_tensor(value, value, parallel) for key, value in model.named_parameters()
            }
        return whole

    expected, *others = *on_ranks(work, 1), *on_ranks(work, tp_size, tp_size=tp_size)
    for of_rank in others:
        for name in VARIANTS:
            assert same(expected[name], of_rank[name]), name
