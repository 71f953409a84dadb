"""The search over layouts: against every layout, within the card, and along its sliders."""

import itertools
from dataclasses import replace

import pytest

from megatron_lite.plan.auto_policy import Budget
from megatron_lite.plan.layouts import _possible, layouts, savers, variants
from megatron_lite.plan.problem import (
    ENDS,
    EXPERTS,
    INSTANCES,
    MICRO_BATCH,
    PIPELINE,
    TENSOR,
    VIRTUAL,
    Problem,
    usual_batch,
)
from megatron_lite.plan.search import Search
from megatron_lite.plan.verdict import (
    DOES_NOT_FIT,
    FITS,
    TIGHT,
    largest_micro_batch,
    smallest_machine,
    verdict,
)
from tests.plan.runs import H100, small_run
from tests.support.changes import with_fields, with_settings

SMALL = Problem(small_run(layers=6, batch=128, hidden_size=2048), H100)
GIB = 2**30

WIDE = small_run(layers=6, batch=32, hidden_size=2048, vocab_size=63999)
LONG = small_run(seq_length=65536)
GATED = dict(swiglu=True, add_bias_linear=False)
NARROW = small_run(layers=3, batch=1, hidden_size=2048, vocab_size=50257, seq_length=512, **GATED)
SPREAD = small_run(
    layers=2, batch=4, **GATED, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=512
)
DEEP = small_run(layers=10, batch=30, hidden_size=2048, vocab_size=50257, seq_length=2048, **GATED)


def with_every_cut(problem, config):
    """Returns the run with every cut of its layers into stages, once for each."""
    ends = [None, *range(1, config.model.num_layers)]
    return {
        tuple(one.stage_lengths()): one
        for cut in itertools.product(range(1, 9), ends, ends)
        for one in _possible(problem, config, dict(zip((VIRTUAL[0], *ENDS), cut, strict=True)))
    }.values()


@pytest.mark.parametrize(
    "run, num_ranks, fixed, limit",
    [
        (DEEP, 5, {PIPELINE: 5, MICRO_BATCH: 2}, 12),  # 3, 2, 2, 2 and 1 layers
        (WIDE, 3, {PIPELINE: 3}, 4),  # which the even cut does not fit
        (WIDE, 2, {PIPELINE: 2, MICRO_BATCH: 2}, 6),
        (LONG, 2, {TENSOR: 1, MICRO_BATCH: 1}, 4),
        (SPREAD, 4, {MICRO_BATCH: 1, PIPELINE: 1}, 1),
        (SMALL.base, 4, {MICRO_BATCH: 4}, 3),
        (NARROW, 4, {}, 60),
        (small_run(batch=8), 4, {PIPELINE: 1, MICRO_BATCH: 1}, 0.4662),  # one layer decides
    ],
)
def test_nothing_that_is_searched_is_faster_than_the_first_plan(run, num_ranks, fixed, limit):
    """Every cut of every layout, with every loss chunk and both wrappings, is fitted in full,
    without bounds or an order."""
    problem = Problem(run, H100, fixed, num_ranks=num_ranks)
    search, times, limit = Search(problem), [], limit * GIB
    left = [
        cut
        for layout in layouts(problem)
        for variant in variants(problem, layout)
        for cut in with_every_cut(problem, variant)
    ]
    for config in left:
        left += savers(config)
        chosen = search.fit(config, limit)
        if chosen.peak.fits(limit):
            times.append(search.time(chosen.config).seconds)
    assert len({*left}) == len(left) >= len(times) >= 4
    ways = {(one.parallel.cp_comm_type, one.parallel.spreads_experts) for one in left}
    assert len(ways) == 1 + (run is SPREAD) + 2 * (run in (LONG, NARROW))
    best = search.find(limit).plans[0]
    assert best.peak.num_bytes <= limit
    # A simpler layout wins if it is less than a handicap slower.
    assert best.time.seconds <= min(times) * 1.005


def values_of(name, run, num_ranks, **fixed):
    problem = Problem(run, H100, fixed, num_ranks=num_ranks)
    return {getattr(one.parallel, name) for one in layouts(problem)}


def test_every_spread_of_experts_suits_the_instances_of_states():
    fixed = {"use_distributed_optimizer": True, PIPELINE: 1, INSTANCES: 2}
    assert values_of(EXPERTS[0], SPREAD, 4, **fixed) == {1, 2}


def test_states_are_shared_out_in_each_of_several_nodes_where_that_is_faster():
    fixed = {TENSOR: 1, PIPELINE: 1, MICRO_BATCH: 1, "use_torch_fsdp2": True}
    slow = replace(H100, between=replace(H100.between, bandwidth=5e9))
    for nodes in (1, 2, 4):
        problem = Problem(SMALL.base, slow, fixed, num_ranks=8 * nodes)
        found = [*layouts(problem)]
        assert {one.parallel.num_distributed_optimizer_instances for one in found} == {1, nodes}
        assert len({one.data_parallel.torch_fsdp2_reshard_after_forward for one in found}) == 2
        best = Search(problem).find(80 * GIB).plans[0].config
        assert best.parallel.num_distributed_optimizer_instances == nodes


@pytest.mark.parametrize("layers", [2, 5, 9, 16])
def test_a_pipeline_may_have_any_number_of_stages(layers):
    """In 16 layers over 7 ranks the two ends have more layers than the ranks between."""
    problem = Problem(small_run(layers=layers), H100)
    for size in range(2, layers + 1):
        one = problem._replace(fixed={PIPELINE: size}, num_ranks=size)
        assert len(next(layouts(one)).stage_lengths()) == size


@pytest.mark.parametrize(
    "run, fixed, names",
    [
        (DEEP, {PIPELINE: 5}, ENDS),
        (DEEP, {PIPELINE: 3}, VIRTUAL[:1]),  # 4, 4 and 2 layers
        (with_settings(SPREAD, moe_ffn_hidden_size=32768), {PIPELINE: 1, TENSOR: 2}, EXPERTS),
    ],
)
def test_a_flag_leaves_the_others_of_its_dimension_open(run, fixed, names):
    def best(**more):
        ranks = 4 if TENSOR in fixed else fixed[PIPELINE]
        problem = Problem(run, H100, {MICRO_BATCH: 2, **fixed, **more}, num_ranks=ranks)
        return Search(problem).find(12 * GIB).plans[0].config

    config = best()
    for name in names:
        assert (value := getattr(config.parallel, name)) is not None
        assert best(**{name: value}) == config


def test_short_sequences_are_split_where_the_batch_does_not_divide():
    assert values_of("context_parallel_size", small_run(batch=40), 24) == {1, 2, 4}
    assert values_of("context_parallel_size", small_run(batch=48), 24) == {1}


def test_tensor_parallel_ranks_share_a_node():
    run = small_run(hidden_size=768, num_attention_heads=12)
    assert values_of(TENSOR, run, 12) == {1, 2, 4}  # of 4 ranks on each of 3 nodes


def test_ranks_that_do_not_divide_the_sequence_share_heads_alone():
    assert values_of(
        "sequence_parallel", small_run(seq_length=777), 2, tensor_model_parallel_size=2
    ) == {False}


def test_fsdp2_is_tried_in_pipelines_where_nothing_else_fits():
    run = small_run(batch=2, num_attention_heads=1, vocab_size=63999)
    whole = dict(context_parallel_size=1)
    problem = Problem(run, H100, whole, num_ranks=8)  # 8 ranks are a pipeline of at least 4
    sizes = [
        Search(problem._replace(fixed=whole | fixed)).find(0).plan.peak.num_bytes
        for fixed in ({}, {PIPELINE: 4, "use_torch_fsdp2": True})
    ]
    assert sizes[0] > sizes[1]
    found = verdict(problem, 8, Budget(sum(sizes) // 2, 0))
    assert found.word == FITS and found.plan.config.data_parallel.use_torch_fsdp2


def test_host_memory_serves_ranks_with_several_instances_of_the_states():
    fixed = {PIPELINE: 1, MICRO_BATCH: 1, INSTANCES: 2, "use_distributed_optimizer": True}
    search = Search(Problem(small_run(), H100, fixed, host_bytes=GIB, num_ranks=16))
    best = search.find(search.find(0).plan.peak.num_bytes).plans[0]
    assert "@host" in best.config.recompute.recompute_policy


def test_the_verdict_is_tight_where_only_the_reserve_helps():
    problem = with_fields(SMALL, fixed={TENSOR: 1}, states_on_host=0)
    peak = verdict(problem, 1, Budget(GIB, 0)).plan.peak.num_bytes
    words = [
        verdict(problem, 1, Budget(peak + free, reserve)).word
        for free, reserve in ((GIB, 0), (GIB // 2, GIB), (-peak // 20, 0))
    ]
    assert words == [FITS, TIGHT, DOES_NOT_FIT]


def test_the_largest_micro_batch_fits_and_twice_as_much_does_not():
    problem = with_fields(SMALL, base=with_settings(SMALL.base, global_batch_size=4096))
    search, limit = Search(problem), 12 * GIB
    best = search.find(limit).plans[0]
    largest = largest_micro_batch(search, best, limit)
    size = largest.config.training.micro_batch_size
    assert largest.peak.num_bytes <= limit and size >= best.config.training.micro_batch_size
    assert not search.fit(
        with_settings(largest.config, micro_batch_size=2 * size), limit
    ).peak.fits(limit)


def test_the_smallest_machine_is_the_first_power_of_two_that_fits():
    budget = Budget(GIB, GIB // 8)
    problem = with_fields(SMALL, fixed={MICRO_BATCH: 1, PIPELINE: 1})
    answer = smallest_machine(problem, budget)
    assert answer.word != DOES_NOT_FIT and answer.num_ranks > 1
    assert verdict(problem, answer.num_ranks // 2, budget).word == DOES_NOT_FIT


def test_a_plan_that_fits_changes_results_as_little_as_it_can():
    """Of 5.5 GiB of states nothing fits but with states on the host, with sums of gradients in
    bfloat16 too, or without host memory with moments in bfloat16 too."""

    def formats(free, fixed=(), **place):
        problem = with_fields(SMALL, fixed={"micro_batch_size": 1, **dict(fixed)}, **place)
        plans = verdict(problem, 1, Budget(int(free * GIB), 0)).found.plans
        options = plans and plans[0].config.optimizer
        return options and (
            options.optimizer_cpu_offload and options.optimizer_offload_fraction,
            options.main_grads_dtype,
            options.exp_avg_sq_dtype,
        )

    assert formats(5.6) == (False, "fp32", "fp32")
    assert formats(4.0, states_on_host=3 * GIB) == (0.5, "fp32", "fp32")
    assert formats(2.0) == (1.0, "fp32", "fp32")
    assert formats(1.6) == (1.0, "bf16", "fp32")
    on_device = dict(states_on_host=0)
    assert formats(5.2, **on_device) == (False, "bf16", "fp32")
    assert formats(4.0, **on_device) == (False, "bf16", "fp16")
    assert not formats(4.0, {"main_grads_dtype": "fp32"}, **on_device)


@pytest.mark.parametrize(
    "samples, micro_batch_size, num_ranks",
    [(512, 1, (8,)), (5398, 1, (8,)), (512, 3, (6, 12)), (512, 1, (3, 5, 7, 12))],
)
def test_a_batch_that_nobody_gave_decides_no_layout(samples, micro_batch_size, num_ranks):
    batch = usual_batch(samples, micro_batch_size, num_ranks)
    assert samples / 2 < batch <= samples
    assert all(batch % (micro_batch_size * count) == 0 for count in num_ranks)


def test_a_micro_batch_may_be_any_share_of_a_batch_that_is_given():
    problem = Problem(small_run(layers=2, batch=15), H100, {PIPELINE: 1}, num_ranks=5)
    assert Search(problem).find(80 * GIB).plans[0].config.training.micro_batch_size == 3
