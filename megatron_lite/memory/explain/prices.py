"""The cost of a run's recompute flags, and of other settings: kept bytes, peaks and FLOPs.

Bytes are those of one rank: of a pipeline, the one with the highest peak of a step. Other flags may
have another such rank. FLOPs are those of one micro-batch through the whole model, on one of the
ranks that split a layer. Every figure comes from the plan that would be executed. Standard library
only.
"""

import contextlib
import shlex
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any, NamedTuple

from megatron_lite.config import run_flags
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.regions import ALIAS, CORE_ATTENTION, MLP_REGION, MOE, POINTWISE
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.predict.flops import PolicyFlops
from megatron_lite.memory.predict.kept_tensors import activation_bytes
from megatron_lite.memory.predict.pipeline_memory import (
    RankMemory,
    rank_memory,
    spared_flops,
    stage_plan,
    step_microbatches,
)
from megatron_lite.memory.predict.step_peak import StepPeak, fullest_step_peak
from megatron_lite.recompute.recompute_plan import RecomputePlan
from megatron_lite.recompute.schedule import plan_model

LONGEST_NAME = 45
LOSS_CHUNK = 1024  # tokens; the value of --loss-chunk-size that the report compares


class Priced(NamedTuple):
    """The cost of a run.

    name: the name of its setting in the table.
    plan: the plan of the whole model.
    memory: the bytes kept for backward on the rank. host_bytes: those in host memory, of one
        micro-batch.
    step: the peak of a step on the rank.
    flops: those of one rank.
    """

    name: str
    config: RunConfig
    plan: RecomputePlan
    memory: RankMemory
    host_bytes: int
    step: StepPeak
    flops: PolicyFlops

    @property
    def execution(self) -> tuple[RecomputePlan, int | None]:
        """The plan and the loss chunks, by which two settings are told apart."""
        return self.plan, self.config.loss_chunk_size


def price(config: RunConfig, device: str, dp_cp_size: int, name: str = "") -> Priced:
    """Returns the cost of a run. The vocabulary size must be known.

    device: "cpu" or "cuda". dp_cp_size: the number of ranks that share the states.
    """
    flops, ranks = PolicyFlops.of(config, device), Sizes.of(config, device).num_ranks
    step = fullest_step_peak(config, device=device, dp_cp_size=dp_cp_size)
    # Some micro-batches of a step may keep everything. The figure is the mean.
    number = step_microbatches(config)
    spared = spared_flops(
        config, number, samples_per_microbatch=config.training.micro_batch_size, device=device
    )
    return Priced(
        name=name or short_name(config.recompute),
        config=config,
        plan=plan_model(config),
        memory=rank_memory(config, device, step.rank),
        host_bytes=sum(
            activation_bytes(own, Sizes.of(config, device, stage), on_host=True)
            for stage, own in rank_plans(config, step.rank)
        ),
        step=step,
        flops=PolicyFlops(
            flops.model // ranks, (flops.replays - spared // number) // ranks, flops.chunks // ranks
        ),
    )


def rank_plans(config: RunConfig, rank: int) -> list[tuple[Stage, RecomputePlan]]:
    """Returns the stages of a pipeline rank and their plans."""
    return [(stage, stage_plan(config, stage)) for stage in config.stages_of_rank(rank)]


def alternatives(config: RunConfig, device: str, dp_cp_size: int) -> tuple[Priced, ...]:
    """Returns the costs of the run's own flags and of usual settings, the highest peak first."""
    priced = {
        one.execution: one
        for name, run in (*_usual(config, device), ("", config))
        for one in [price(run, device, dp_cp_size, name)]
    }
    return tuple(sorted(priced.values(), key=lambda one: (-one.step.num_bytes, one.flops.replays)))


def _usual(config: RunConfig, device: str) -> Iterator[tuple[str, RunConfig]]:
    """Yields the run with usual settings instead of its own, as far as its layout allows them.

    --no-recompute-tail-skip and --recompute-verify stay as they are in the run.
    Before each stands its name; "": that of its setting.
    """
    largest = MLP_REGION if config.model.num_experts is None else MOE
    modules = [(CORE_ATTENTION,), POINTWISE, (largest,)]
    if config.model.builds_scores(device):
        modules.append((CORE_ATTENTION, *POINTWISE))
    longest = max(stage.num_layers for stage in config.stages())
    policies = ["every-2:full"]
    if device == "cuda":  # on a CPU @host frees nothing
        policies += ["*:full@host", "*:none@host"]
    settings: list[dict[str, Any]] = [
        {},
        *(dict(recompute_granularity="selective", recompute_modules=names) for names in modules),
        *(
            dict(
                recompute_granularity="full",
                recompute_method=method,
                recompute_num_layers=count,
                distribute_saved_activations=split,
            )
            for split in (False, True)
            for method, count in (("uniform", 1), ("block", (longest + 1) // 2))
        ),
        *(dict(recompute_policy=policy) for policy in policies),
    ]
    for flags in settings:
        with contextlib.suppress(ValueError):  # not every layout can split the inputs of units
            yield "", replace(config, recompute=config.recompute.instead(**flags))
    tokens = config.data.seq_length * config.training.micro_batch_size
    if config.loss_chunk_size is None and tokens > LOSS_CHUNK:
        chunked = replace(config.training, loss_chunk_size=LOSS_CHUNK)
        name = f"this run with --loss-chunk-size {LOSS_CHUNK}"
        yield name, replace(config, training=chunked)


def flags_of(config: RunConfig) -> str:
    """Returns the command-line flags that decide the recomputation of a run."""
    own = {field.name for field in fields(RecomputeConfig)}
    return shlex.join(run_flags.flags_of(config, without=run_flags.run_fields().keys() - own))


def region_names(regions: Iterable[str]) -> list[str]:
    """Returns the names of regions, in alphabetical order.

    The three cheap regions together become `pointwise`, as in --recompute-modules.
    """
    names = set(regions)
    return sorted(names - set(POINTWISE)) + [ALIAS] if set(POINTWISE) <= names else sorted(names)


def short_name(recompute: RecomputeConfig) -> str:
    """Returns the values without the flags' names, such as "full uniform 2, distributed"."""
    if recompute.recompute_policy is not None:
        text = f"policy {recompute.recompute_policy}"
        return textwrap.shorten(text, LONGEST_NAME, placeholder=" ...")
    if recompute.recompute_granularity is None:
        return "none"
    if recompute.recompute_granularity == "selective":
        return " ".join(["selective", *region_names(recompute.recompute_modules)])
    split = ", distributed" if recompute.distribute_saved_activations else ""
    return f"full {recompute.recompute_method} {recompute.recompute_num_layers}{split}"
