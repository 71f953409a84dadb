"""The policy that is found for a budget: against every other, and as --recompute-policy auto."""

import itertools
from dataclasses import replace

import pytest

from megatron_lite.config.checks import InputError
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.plan.auto_policy import Plan, choose_policy, fitted, with_chosen_policy
from megatron_lite.plan.hardware import load_hardware, machine_for_policy, machine_of_gpu
from tests.plan.runs import H100, preset_run, small_run
from tests.support.changes import with_settings
from tests.support.commands import parsed_line

GIB = 2**30


def peak_of(config, num_ranks):
    return Plan(config, H100, num_ranks).peak.num_bytes


def budgets(run):
    """Budgets between the peak of full recomputation and that of none."""
    low, high = run.with_policy("*:full").peak.num_bytes, run.peak.num_bytes
    return [low + (high - low) * number // 4 for number in range(1, 5)]


PP2 = {"pipeline_model_parallel_size": 2}
REGION_ACTIONS = ("none", "layernorm+activation", "mlp+layernorm", "full")
TILE_ACTIONS = ("none", "mlp/4", "full+mlp/4", "full")


EXPERT_ACTIONS = ("none", "layernorm+moe_act", "layernorm+moe", "full")
EXPERTS = dict(
    swiglu=True,
    add_bias_linear=False,
    num_experts=8,
    moe_router_topk=4,
    moe_ffn_hidden_size=1024,
    moe_layer_freq=(0, 1, 1, 1),
)


@pytest.mark.runs(daily=2, ci=4)
@pytest.mark.parametrize(
    "parallel, micro, actions, model",
    [
        ({}, 8, REGION_ACTIONS, {}),
        (PP2, 8, EXPERT_ACTIONS, EXPERTS),
        ({}, 16, TILE_ACTIONS, {}),
        (PP2, 8, REGION_ACTIONS, {}),
        ({}, 2, REGION_ACTIONS, dict(window_size=(255, 0), window_attn_skip_freq=3)),
    ],
)
def test_no_policy_of_regions_or_units_by_layer_is_faster(parallel, micro, actions, model):
    """Every assignment of four actions to the layers is tried, in any order and on both ranks."""
    config = small_run(layers=4 if parallel else 3, parallel=parallel, micro=micro, **model)
    num_ranks = parallel.get("pipeline_model_parallel_size", 1)
    run, layers = Plan(config, H100, num_ranks), config.model.num_layers // num_ranks
    measured = []
    for stage_actions in itertools.product(
        itertools.product(actions, repeat=layers), repeat=num_ranks
    ):
        text = "; ".join(
            f"stage{stage}/{layer}:{action}"
            for stage, own in enumerate(stage_actions)
            for layer, action in enumerate(own)
        )
        one = run.with_policy(text)
        measured.append((one.peak.num_bytes, one.time.seconds))
    for budget in budgets(run):
        chosen = run.with_policy(choose_policy(config, H100, budget, num_ranks))
        assert chosen.peak.num_bytes <= budget
        fastest = min(seconds for held, seconds in measured if held <= budget)
        assert chosen.time.seconds <= fastest * 1.005


def test_host_memory_is_used_only_where_it_is_allowed():
    config = preset_run("llama3-8b", seq_length=8192, batch=64)
    kinds = dict(window_size=(4095, 0), window_attn_skip_freq=2)
    config = with_settings(config, use_torch_fsdp2=True, **kinds)
    budget = 24 * GIB
    slow, fast, least = (
        fitted(Plan(config, H100, 16, host), held)
        for host, held in ((0, budget), (64 * GIB, budget), (1, 1))
    )
    found = ["@host" in str(one.config.recompute.policy) for one in (slow, fast, least)]
    assert found == [False, True, False] and fast.time.seconds < slow.time.seconds
    assert fast.peak.fits(budget)


def test_longer_units_are_tried_where_the_host_is_slow():
    run = Plan(preset_run("gpt2", seq_length=1024, batch=16), H100, 1)
    unit = run.with_policy("*:full/6")
    assert fitted(run, unit.peak.num_bytes).time.seconds <= unit.time.seconds


@pytest.mark.parametrize(
    "flags, num_ranks",
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel", 2),
        ("--tensor-model-parallel-size 2", 2),
        ("--bf16 --parallel-residual", 1),
        ("--bf16 --squared-relu --hidden-dropout 0", 1),
        (
            "--num-layers 6 --pipeline-model-parallel-size 2 "
            "--pipeline-model-parallel-layout Et*2|t*3|t|L --global-batch-size 2",
            2,
        ),
    ],
)
@pytest.mark.parametrize("seq_length", [2, 16])
def test_layers_too_small_to_be_worth_a_replay_get_a_policy_or_a_refusal(
    flags, num_ranks, seq_length
):
    """Where another choice keeps no more than a whole layer's input, it replaces that of units."""
    config = parsed_line(
        f"--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length {seq_length} "
        f"--max-position-embeddings {seq_length} --micro-batch-size 1 --vocab-size 18 {flags} "
        "--make-vocab-size-divisible-by 2 --mock-data"
    ).config
    whole = peak_of(config, num_ranks)
    assert choose_policy(config, H100, whole, num_ranks) == "*:none"
    with pytest.raises(InputError, match="no recompute policy fits in 1.000 KiB"):
        choose_policy(config, H100, 1024, num_ranks)
    for budget in (whole - 1, whole * 4 // 5):
        found = fitted(Plan(config, H100, num_ranks), budget)
        assert found.peak.num_bytes == peak_of(found.config, num_ranks)


RUN = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 256 "
    "--max-position-embeddings 256 --micro-batch-size 4 --global-batch-size 8 --mock-data "
    "--vocab-size 4096 --lr 1e-3 --train-iters 3 --distributed-backend gloo"
)
MIB, CPU = 2**20, load_hardware("cpu")


def config_of(flags=""):
    return parsed_line(f"{RUN} {flags}").config


def own_peak(config):
    return Plan(config, CPU, 1).peak.num_bytes


@pytest.mark.parametrize("share", [1.0, 0.8, 0.6])
def test_the_chosen_policy_fits_the_budget(share):
    budget = int(share * own_peak(config_of()) / MIB) + 1
    config = config_of(f"--recompute-policy auto --memory-budget {budget}MiB")
    chosen, notice = with_chosen_policy(config, CPU, 1, device_bytes=None)
    assert own_peak(chosen) <= budget * MIB
    assert repr(chosen.recompute.recompute_policy) in notice
    assert chosen == replace(config, recompute=chosen.recompute)


def test_without_a_budget_the_memory_of_the_device_counts_less_a_reserve():
    config = config_of("--recompute-policy auto")
    least = own_peak(config_of()) + GIB
    chosen, _ = with_chosen_policy(config, CPU, 1, device_bytes=least)
    assert own_peak(chosen) <= least - GIB - 0.03 * least
    named = config_of(f"--recompute-policy auto --memory-budget {least}B")
    _, notice = with_chosen_policy(named, H100, 1, device_bytes=least)
    assert "a reserve of the GPU stays free" in notice
    with pytest.raises(InputError, match="give --memory-budget"):
        with_chosen_policy(config, CPU, 1, device_bytes=None)


def test_a_flag_replaces_the_auto_policy_of_a_file_and_its_budget(tmp_path):
    file = tmp_path / "run.json"
    stored = config_of("--recompute-policy auto --memory-budget 1GiB")
    file.write_text(stored.to_json())
    assert RunConfig.from_json(stored.to_json()) == stored
    for flags, policy in (
        ("--recompute-policy *:full", "*:full"),
        ("--recompute-granularity selective", None),
    ):
        config = parsed_line(f"--config-json {file} {flags}").config
        assert config.recompute.recompute_policy == policy
        assert config.recompute.memory_budget is None
    again = parsed_line(f"--config-json {file} --recompute-policy auto").config
    assert again.recompute == RecomputeConfig(recompute_policy="auto", memory_budget="1GiB")


@pytest.mark.parametrize(
    "gpu, machine",
    [("NVIDIA B200", "b200"), ("NVIDIA GB200", "gb200"), ("AMD Instinct MI300X", "mi300x")],
)
def test_a_gpus_name_leads_to_its_machine(gpu, machine):
    assert machine_for_policy(None, device="cuda", gpu_name=gpu).name == machine
    assert machine_for_policy("h200", device="cuda", gpu_name=gpu).name == "h200"


def test_an_unknown_gpu_is_an_error_that_lists_the_machines():
    assert machine_of_gpu("Tesla T4") is None
    with pytest.raises(InputError, match="no machine is known for Tesla T4.*a100-80gb"):
        machine_for_policy(None, device="cuda", gpu_name="Tesla T4")
