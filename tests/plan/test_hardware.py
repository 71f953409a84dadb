"""The machines, the errors of a file that describes one, and the time of one matmul, one pass
through memory and one collective."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.config.checks import InputError
from megatron_lite.description.operations import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    Collective,
    Matmul,
)
from megatron_lite.plan.hardware import MACHINES, Group, load_hardware, machine_names
from megatron_lite.plan.problem import Problem
from megatron_lite.plan.search import Search
from tests.plan.machines import ideal
from tests.plan.runs import small_run
from tests.support.changes import with_fields

A100 = load_hardware("a100-80gb")
DIMENSIONS = st.integers(1, 20_000)
NOT_OF_A_CARD = {"name", "like", "device", "sources", "ranks_per_node", "shares_cores"} | {
    *("bf16", "fp32", "captured")  # their parts are named
}


def text_of(**changes):
    values = {**json.loads((MACHINES / "a100-80gb.json").read_text()), **changes}
    return json.dumps({name: value for name, value in values.items() if value != "-"})


def test_a_path_of_a_file_is_a_machine(tmp_path):
    """Of its own figures, and those of the machine that it is like."""
    path = tmp_path / "here.json"
    path.write_text(text_of(name="here"))
    assert load_hardware(str(path)) == replace(A100, name="here")
    own = dict(name="here", like="a100-80gb", bf16=dict(peak_flops=1e15), sources={"band": "me"})
    path.write_text(json.dumps(own))
    bf16, sources = replace(A100.bf16, peak_flops=1e15), {**A100.sources, "band": "me"}
    assert load_hardware(str(path)) == replace(A100, name="here", bf16=bf16, sources=sources)
    with pytest.raises(InputError, match="cannot be read"):
        load_hardware(str(tmp_path / "elsewhere.json"))


@pytest.mark.parametrize("name", machine_names())
def test_each_machine_plans_and_says_where_its_figures_are_from(name):
    machine = load_hardware(name)
    assert machine.name == name
    said = {word for key in machine.sources for word in re.split(r", |\.", key)}
    figures = json.loads((MACHINES / f"{name}.json").read_text()).keys() | {"peak_flops"}
    assert machine.device == "cpu" or figures - NOT_OF_A_CARD <= said
    found = Search(Problem(small_run(), machine, num_ranks=2)).find(machine.memory_bytes)
    assert found.plans[0].peak.num_bytes < machine.memory_bytes


@pytest.mark.parametrize(
    "changes, fault",
    [
        (dict(name="\x1b[31m"), "name must be of printable"),
        (dict(device="tpu"), "device must be one of cpu, cuda"),
        (dict(memory_bandwidth="-"), "missing field memory_bandwidth"),
        (dict(memory_bandwidth="fast"), "memory_bandwidth: expected .*float"),
        (dict(memory_bandwidth=1e99), "memory_bandwidth must be in"),
        (dict(inside=dict(latency_s=0.0, bandwidth=0.0)), "inside.bandwidth must be in"),
        (dict(inside=7), "inside must be an object"),
        (dict(like="h900"), "like must be one of a100-80gb, .* .got 'h900'."),
        ("[" * 100_000, "wrong.json"),
        ('{"a": 1, "a": 2}', "is given twice"),
    ],
)
def test_a_wrong_file_is_one_error(changes, fault, tmp_path):
    path = tmp_path / "wrong.json"
    path.write_text(changes if isinstance(changes, str) else text_of(**changes))
    with pytest.raises(InputError, match=fault):
        load_hardware(str(path))


def test_one_tile_more_than_a_round_costs_a_second_round():
    full = Matmul("x", A100.tile_m * A100.multiprocessors, A100.tile_n, 8192)
    more = with_fields(full, m=full.m + 1)
    kernel = A100.kernel_s
    ratio = (A100.matmul_seconds(more, 2) - kernel) / (A100.matmul_seconds(full, 2) - kernel)
    # Tiles that lie the other way waste a little less.
    assert 1.8 < ratio <= 2.0


@given(m=DIMENSIONS, n=DIMENSIONS, k=DIMENSIONS)
def test_a_larger_matmul_never_takes_less_time(m, n, k):
    for machine in (A100, replace(ideal(), bf16=replace(A100.bf16, half_dimension=64.0))):
        one = Matmul("x", m, n, k)
        for dim in "mnk":
            larger = with_fields(one, **{dim: getattr(one, dim) + 7})
            assert machine.matmul_seconds(larger, 2) >= machine.matmul_seconds(one, 2) * (1 - 1e-9)


def test_a_grouped_product_takes_the_time_of_its_experts_products():
    """Also the one of the weights' gradients, whose rows are the inner dimension."""
    for shape, grouped in (
        ((300, 512, 768), Matmul("x", 9600, 512, 768, groups=32)),
        ((512, 768, 300), Matmul("x", 512, 768, 9600, k_groups=32)),
    ):
        alone = Matmul("x", *shape, batch=32)
        assert grouped.flops == alone.flops
        assert A100.matmul_seconds(grouped, 2) == A100.matmul_seconds(alone, 2)


def test_a_causal_flash_kernel_takes_half_the_time_and_a_deterministic_one_more():
    whole = Matmul("x", 4096, 4096, 128, 64, fused=True)

    def seconds(matmul, *, deterministic=False):
        return A100.flash_seconds(matmul, 2, backward=True, deterministic=deterministic)

    assert seconds(with_fields(whole, causal=True)) == pytest.approx(seconds(whole) / 2)
    assert seconds(whole, deterministic=True) > seconds(whole)


# github.com/openxla/xla, xla/service/gpu/model/collective_interpolator_data.h: collectives of 2, 4
# and 8 of 8 H100: ranks, MiB of the whole tensor, and GB/s of it
MEASURED = (
    (ALL_GATHER, 8, 1024, 393.3),
    (ALL_GATHER, 4, 32, 296.1),
    (ALL_GATHER, 2, 512, 511.6),
    (REDUCE_SCATTER, 8, 32, 251.3),
    (REDUCE_SCATTER, 4, 256, 346.8),
    (REDUCE_SCATTER, 2, 128, 330.3),
    (ALL_REDUCE, 8, 256, 212.7),
    (ALL_REDUCE, 4, 32, 153.8),
    (ALL_REDUCE, 2, 32, 178.7),
    (ALL_TO_ALL, 8, 64, 306.8),
    (ALL_TO_ALL, 2, 64, 395.8),
)


@pytest.mark.parametrize("kind, size, mib, rate", MEASURED)
def test_collectives_of_a_part_of_a_node_take_the_time_that_others_measured(kind, size, mib, rate):
    seconds = load_hardware("h100").collective_seconds(Collective(kind, mib << 20), Group(size))
    assert (mib << 20) / (rate * 1e9) == pytest.approx(seconds, rel=0.25)


def test_a_group_across_nodes_is_slower_and_uses_the_cards_of_its_ranks_in_a_node():
    gather = Collective(ALL_GATHER, 1 << 34)
    inside = A100.collective_seconds(gather, Group(8))
    # 16 ranks on two nodes, and 16 ranks on 16 nodes
    two, sixteen = (A100.collective_seconds(gather, Group(16, stride)) for stride in (1, 8))
    assert inside < two < sixteen
    latency = 4 * A100.between.latency_s
    assert (sixteen - latency) / (two - latency) == pytest.approx(8.0)
