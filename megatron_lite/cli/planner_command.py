"""The planner's answer to a run that `--explain-recompute` explains.

It is one policy beside those of the report, and the command line that searches all layouts.
"""

from __future__ import annotations

import dataclasses
import textwrap

from megatron_lite.config.checks import InputError
from megatron_lite.config.invocation import SCRIPT, filled_lines, subcommand
from megatron_lite.config.parallel import DataParallelConfig
from megatron_lite.config.policy import LayerAction
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.config.run_flags import flags_of
from megatron_lite.config.units import ByteUnit, parse_bytes
from megatron_lite.memory.explain.prices import ComparedRun, full, with_flags
from megatron_lite.memory.explain.recompute_report import of_one_replica
from megatron_lite.memory.predict.step_peak import fullest_step_peak
from megatron_lite.plan.auto_policy import choose_policy
from megatron_lite.plan.hardware import CPU_MACHINE, Hardware, load_hardware, machine_for_policy
from megatron_lite.plan.problem import KEPT_RECOMPUTE, SEARCHED

WIDTH = 100
KEPT_SHARDING = ("grad_reduce_in_bf16",)
USUAL_GPU = "h100-80gb"  # stands for a GPU that is not here


def auto_settings(config: RunConfig, device: str, num_ranks: int) -> list[ComparedRun]:
    """Returns the run with the policy that `--recompute-policy auto` would choose.

    The budget is the run's own peak. If the run recomputes nothing, it is halfway between its peak
    and the one with every layer recomputed. The list is empty if no policy fits. Raises ValueError
    if the ranks or the batch do not divide.
    """
    dp_size = config.parallel.data_parallel_size(num_ranks)
    one_replica = of_one_replica(config, dp_size)
    dp_cp_size = dp_size * config.parallel.context_parallel_size
    budget = fullest_step_peak(one_replica, device=device, dp_cp_size=dp_cp_size).num_bytes
    if all(rule.action == LayerAction() for rule in config.recompute.policy.rules):
        least = full(one_replica, "uniform", 1)
        lowest = fullest_step_peak(least, device=device, dp_cp_size=dp_cp_size).num_bytes
        budget = (budget + lowest) // 2
    words = _rounded_up(budget)
    budget = parse_bytes("--memory-budget", words)
    plain = with_flags(config)
    try:
        text = choose_policy(plain, _machine(config, device), budget, num_ranks)
    except InputError:
        return []
    return [ComparedRun(f"auto {words}", with_flags(config, recompute_policy=text))]


def _rounded_up(num_bytes: int) -> str:
    """Returns an amount such as 62.639GiB, which is at least so many bytes."""
    unit = ByteUnit.of(num_bytes)
    return f"{-(-num_bytes * 1000 // unit.num_bytes) / 1000:.3f}{unit.name}"


def planner_command(config: RunConfig, num_ranks: int, program: str = SCRIPT) -> list[str]:
    """Returns the words of the command that plans a run: its own flags without layout and policy.

    The dimensions that the planner searches are left out, so it searches all of them. The
    vocabulary size must be known.
    program: the name of the program that the user started.
    """
    training = config.training
    batch = training.global_batch_size
    if batch is None:
        batch = training.micro_batch_size * config.parallel.data_parallel_size(num_ranks)
    words = [*subcommand(program, "plan"), "--gpus", str(num_ranks)]
    words += _machine_words(config)
    if training.memory_limit is not None:
        words += ["--memory-budget", training.memory_limit, "--reserve", "0"]
    words += [*flags_of(config, without=_left_out()), "--global-batch-size", str(batch)]
    if not (training.bf16 or training.fp16):
        words += ["--fix", "bf16=false"]
    return words


def planner_lines(
    config: RunConfig, device: str, num_ranks: int, width: int = WIDTH, program: str = SCRIPT
) -> list[str]:
    """Returns the last lines of the report: the planner's command, as lines of a shell."""
    stand_in = ""
    if USUAL_GPU in _machine_words(config) and config.logging.machine is None:
        stand_in = f" Replace {USUAL_GPU} by your GPU, or by {CPU_MACHINE}."
        if device == "cpu":
            stand_in += (
                " No GPU is here, so the figures above are a CPU's: --machine NAME gives a GPU's."
            )
    intro = (
        "The fastest layout, micro-batch and policy of this run that fit into memory are printed "
        f"by this command.{stand_in}"
    )
    words = planner_command(config, num_ranks, program)
    return ["", *textwrap.wrap(intro, width), filled_lines(words)]


def _left_out() -> set[str]:
    """Returns the fields that the planner searches, or that it takes in another form."""
    fields = {"global_batch_size", "memory_limit", "machine", *SEARCHED}
    for topic, kept in ((DataParallelConfig, KEPT_SHARDING), (RecomputeConfig, KEPT_RECOMPUTE)):
        fields.update(one.name for one in dataclasses.fields(topic) if one.name not in kept)
    return fields


def _machine(config: RunConfig, device: str) -> Hardware:
    if device == "cuda" and config.logging.machine is None:
        return load_hardware(USUAL_GPU)
    return machine_for_policy(config.logging.machine, device=device, gpu_name=None)


def _machine_words(config: RunConfig) -> list[str]:
    machine = config.logging.machine
    if machine is None:
        # A machine without a GPU may be where its owner plans, so only a flag chooses the CPU.
        on_cpu = config.parallel.distributed_backend == "gloo"
        return ["--gpu", CPU_MACHINE if on_cpu else USUAL_GPU]
    return ["--machine" if machine.endswith(".json") else "--gpu", machine]
