"""`--recompute-policy auto`: the flags, and the policy that takes its place."""

from dataclasses import replace

import pytest

from arguments import parse_args
from megatron_lite.config.checks import InputError
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.memory.predict.step_peak import fullest_step_peak
from megatron_lite.plan.auto_policy import with_chosen_policy
from megatron_lite.plan.hardware import load_hardware, machine_for_policy, machine_of_gpu

RUN = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 256 "
    "--max-position-embeddings 256 --micro-batch-size 4 --global-batch-size 8 --mock-data "
    "--vocab-size 4096 --lr 1e-3 --train-iters 3 --distributed-backend gloo"
)
MIB = 2**20


def config_of(flags=""):
    return parse_args(f"{RUN} {flags}".split()).config


def peak_of(config):
    return fullest_step_peak(config, device="cpu", dp_cp_size=1, num_microbatches=2).num_bytes


@pytest.mark.parametrize("share", [1.0, 0.8, 0.6])
def test_the_chosen_policy_fits_the_budget(share):
    budget = int(share * peak_of(config_of()) / MIB) + 1
    config = config_of(f"--recompute-policy auto --memory-budget {budget}MiB")
    chosen, notice = with_chosen_policy(config, load_hardware("cpu"), 1, device_bytes=None)
    assert not chosen.recompute.is_to_be_chosen
    assert peak_of(chosen) <= budget * MIB
    assert repr(chosen.recompute.recompute_policy) in notice
    assert chosen == replace(config, recompute=chosen.recompute)


def test_without_a_budget_the_memory_of_the_device_counts_less_a_reserve():
    config = config_of("--recompute-policy auto")
    least = peak_of(config_of()) + 2**30
    chosen, _ = with_chosen_policy(config, load_hardware("cpu"), 1, device_bytes=least)
    assert peak_of(chosen) <= least - 2**30 - 0.03 * least
    named = config_of(f"--recompute-policy auto --memory-budget {least}B")
    _, notice = with_chosen_policy(named, load_hardware("h100-80gb"), 1, device_bytes=least)
    assert "a reserve of the GPU stays free" in notice
    with pytest.raises(InputError, match="give --memory-budget"):
        with_chosen_policy(config, load_hardware("cpu"), 1, device_bytes=None)


def test_a_flag_replaces_the_auto_policy_of_a_file_and_its_budget(tmp_path):
    file = tmp_path / "run.json"
    stored = config_of("--recompute-policy auto --memory-budget 1GiB")
    file.write_text(stored.to_json())
    assert RunConfig.from_json(stored.to_json()) == stored
    for flags, policy in (
        ("--recompute-policy *:full", "*:full"),
        ("--recompute-granularity selective", None),
    ):
        config = parse_args(f"--config-json {file} {flags}".split()).config
        assert config.recompute.recompute_policy == policy
        assert config.recompute.memory_budget is None
    again = parse_args(f"--config-json {file} --recompute-policy auto".split()).config
    assert again.recompute == RecomputeConfig(recompute_policy="auto", memory_budget="1GiB")


@pytest.mark.parametrize(
    ("gpu", "machine"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA H100 PCIe", "h100-80gb"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_a_gpus_name_leads_to_its_machine(gpu, machine):
    assert machine_for_policy(None, device="cuda", gpu_name=gpu).name == machine
    assert machine_for_policy("h200", device="cuda", gpu_name=gpu).name == "h200"


def test_an_unknown_gpu_is_an_error_that_lists_the_machines():
    assert machine_of_gpu("Tesla T4") is None
    with pytest.raises(InputError, match="no machine is known for Tesla T4.*a100-80gb"):
        machine_for_policy(None, device="cuda", gpu_name="Tesla T4")
