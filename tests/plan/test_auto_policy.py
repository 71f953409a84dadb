"""The recompute policy of a layout: it fits, it is the fastest, and it follows the budget."""

import itertools
from dataclasses import replace

import pytest

from megatron_lite.cli.flags import parse_args
from megatron_lite.config.checks import InputError
from megatron_lite.config.parallel import DataParallelConfig
from megatron_lite.memory.predict.step_peak import fullest_step_peak
from megatron_lite.plan.auto_policy import choose_policy, fitted
from megatron_lite.plan.rank_mixes import Run, with_policy
from megatron_lite.plan.step_time import step_time
from tests.plan.runs import H100, preset_run, small_run

LLAMA = preset_run("llama3-8b", seq_length=8192, batch=64)
GIB = 2**30


def peak_of(config, num_ranks):
    parallel = config.parallel
    size = parallel.data_parallel_size(num_ranks) * parallel.context_parallel_size
    microbatches = config.training.num_microbatches(parallel.data_parallel_size(num_ranks))
    return fullest_step_peak(
        config, device="cuda", dp_cp_size=size, num_microbatches=microbatches
    ).num_bytes


def budgets(config, num_ranks, count):
    """Budgets between the peak of full recomputation and that of none."""
    low = peak_of(with_policy(config, "*:full"), num_ranks)
    high = peak_of(config, num_ranks)
    return [low + (high - low) * number // count for number in range(1, count + 1)]


PP2 = {"pipeline_model_parallel_size": 2}
REGION_ACTIONS = ("none", "layernorm+activation", "mlp+layernorm", "full")
TILE_ACTIONS = ("none", "mlp/4", "full+mlp/4", "full")


@pytest.mark.runs(daily=2, ci=3)
@pytest.mark.parametrize(
    ("parallel", "micro", "actions"),
    [({}, 8, REGION_ACTIONS), ({}, 16, TILE_ACTIONS), (PP2, 8, REGION_ACTIONS)],
    ids=["p1", "tiles", "p2"],
)
def test_no_policy_of_regions_or_units_by_layer_is_faster(parallel, micro, actions):
    """Every assignment of four actions to the layers is tried, in any order and on both ranks."""
    config = small_run(layers=4 if parallel else 3, parallel=parallel, micro=micro)
    num_ranks = parallel.get("pipeline_model_parallel_size", 1)
    layers = config.model.num_layers // num_ranks
    tried = []
    for stage_actions in itertools.product(
        itertools.product(actions, repeat=layers), repeat=num_ranks
    ):
        text = "; ".join(
            f"stage{stage}/{layer}:{action}"
            for stage, own in enumerate(stage_actions)
            for layer, action in enumerate(own)
        )
        policy = with_policy(config, text)
        tried.append(policy)
    measured = [
        (peak_of(policy, num_ranks), step_time(policy, H100, num_ranks).seconds) for policy in tried
    ]
    for budget in budgets(config, num_ranks, 4):
        chosen = with_policy(config, choose_policy(config, H100, budget, num_ranks))
        assert peak_of(chosen, num_ranks) <= budget
        fastest = min(seconds for held, seconds in measured if held <= budget)
        # The space beside the activations is an estimate, so the choice may miss a mix by a hair.
        assert step_time(chosen, H100, num_ranks).seconds <= fastest * 1.05


def test_a_larger_budget_is_never_slower():
    config = small_run(layers=8, micro=8)
    seconds = [
        step_time(with_policy(config, choose_policy(config, H100, budget, 1)), H100, 1).seconds
        for budget in budgets(config, 1, 8)
    ]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]


def test_host_memory_is_used_only_where_it_is_allowed():
    config = replace(LLAMA, data_parallel=DataParallelConfig(use_torch_fsdp2=True))
    budget = 24 * GIB
    on_device = choose_policy(config, H100, budget, 16)
    hosted = str(fitted(Run(config, H100, 16, 64 * GIB), budget).config.recompute.policy)
    times = [step_time(with_policy(config, one), H100, 16).seconds for one in (hosted, on_device)]
    assert "@host" not in on_device and "@host" in hosted and times[0] < times[1]
    assert peak_of(with_policy(config, hosted), 16) <= budget


@pytest.mark.parametrize(
    "flags, num_ranks",
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel", 2),
        ("--tensor-model-parallel-size 2", 2),
        ("--bf16 --parallel-residual", 1),
        ("--bf16 --squared-relu --hidden-dropout 0", 1),
    ],
)
@pytest.mark.parametrize("seq_length", [2, 16])
def test_layers_too_small_to_be_worth_a_replay_get_a_policy_or_a_refusal(
    flags, num_ranks, seq_length
):
    """Where another choice keeps no more than a whole layer's input, it replaces that of units."""
    config = parse_args(
        f"--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length {seq_length} "
        f"--max-position-embeddings {seq_length} --micro-batch-size 1 --vocab-size 18 {flags} "
        "--make-vocab-size-divisible-by 2 --mock-data".split()
    ).config
    whole = peak_of(config, num_ranks)
    assert choose_policy(config, H100, whole, num_ranks) == "*:none"
    with pytest.raises(InputError, match="no recompute policy fits in 1.000 KiB"):
        choose_policy(config, H100, 1024, num_ranks)
    for budget in (whole - 1, whole * 4 // 5):
        found = fitted(Run(config, H100, num_ranks), budget)
        assert found.peak.num_bytes == peak_of(found.config, num_ranks)
