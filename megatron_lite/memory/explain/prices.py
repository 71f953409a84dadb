"""The cost of a run's recompute flags, and of other settings: kept bytes, peaks and FLOPs.

Bytes are those of one rank: of a pipeline, the one with the highest peak of a step. Other flags may
have another such rank. FLOPs are those of one micro-batch through the whole model, on one of the
ranks that split a layer. Every figure comes from the plan that would be executed. Standard library
only.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from megatron_lite.config import run_flags
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.regions import ALIAS, CORE_ATTENTION, MLP_REGION, POINTWISE
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage, stages, stages_of_rank
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.predict.flops import logits_flops, replay_flops, step_flops
from megatron_lite.memory.predict.kept_tensors import host_bytes
from megatron_lite.memory.predict.pipeline_memory import (
    RankMemory,
    rank_memory,
    spared_flops,
    step_microbatches,
)
from megatron_lite.memory.predict.step_peak import StepPeak, fullest_step_peak
from megatron_lite.recompute.recompute_plan import RecomputePlan
from megatron_lite.recompute.schedule import plan_model, plan_stage

LONGEST_NAME = 45
LOSS_CHUNK = 1024  # tokens; the value of --loss-chunk-size that the report compares


class ComparedRun(NamedTuple):
    """A run that the report compares with the user's. name: its name in the table."""

    name: str
    config: RunConfig


@dataclass(frozen=True, kw_only=True)
class Priced:
    """The cost of a run.

    name: the name of its setting in the table.
    plan: the plan of the whole model.
    memory: the bytes kept for backward on the rank. host_bytes: those in host memory, of one
        micro-batch.
    step: the peak of a step on the rank.
    model_flops: forward and backward. replay_flops: what replays add.
    chunk_flops: the logits that a loss in chunks computes a second time.
    """

    name: str
    config: RunConfig
    plan: RecomputePlan
    memory: RankMemory
    host_bytes: int
    step: StepPeak
    model_flops: int
    replay_flops: int
    chunk_flops: int

    @property
    def added_flops(self) -> float:
        """The FLOPs that run a second time, as a share of those of forward and backward."""
        return (self.replay_flops + self.chunk_flops) / self.model_flops

    @property
    def execution(self) -> tuple[RecomputePlan, int | None]:
        """The plan and the loss chunks, by which two settings are told apart."""
        return self.plan, self.config.loss_chunk_size


def price(config: RunConfig, device: str, *, dp_cp_size: int = 1, name: str = "") -> Priced:
    """Returns the cost of a run. The vocabulary size must be known.

    device: "cpu" or "cuda". dp_cp_size: the number of ranks that share the states.
    """
    plan, sizes = plan_model(config), Sizes.of(config, device=device)
    step = fullest_step_peak(config, device=device, dp_cp_size=dp_cp_size)
    batch, length, vocabulary = sizes.micro_batch_size, sizes.seq_length, sizes.padded_vocab_size
    again = replay_flops(
        config.model,
        plan,
        batch=batch,
        seq_length=length,
        device=device,
        tp_size=sizes.tp_size,
        cp_size=sizes.cp_size,
    )
    # Some micro-batches of a step may keep everything. The figure is the mean.
    number = step_microbatches(config)
    again -= spared_flops(config, number, samples_per_microbatch=batch, device=device) // number
    shape = dict(batch=batch, seq_length=length, padded_vocab_size=vocabulary)
    in_two_passes = config.loss_chunk_size is not None and not config.loss_in_one_pass
    chunks = logits_flops(config.model, **shape) if in_two_passes else 0
    return Priced(
        name=name or short_name(config.recompute),
        config=config,
        plan=plan,
        memory=rank_memory(config, device, step.rank),
        host_bytes=sum(
            host_bytes(config.model, own, Sizes.of(config, device=device, stage=stage))
            for stage, own in rank_plans(config, step.rank)
        ),
        step=step,
        model_flops=step_flops(config.model, **shape) // sizes.num_ranks,
        replay_flops=again // sizes.num_ranks,
        chunk_flops=chunks // sizes.num_ranks,
    )


def rank_plans(config: RunConfig, rank: int) -> list[tuple[Stage, RecomputePlan]]:
    """Returns the stages of a pipeline rank and their plans."""
    return [
        (stage, plan_stage(config.recompute, stage.num_layers, stage.number))
        for stage in stages_of_rank(config.parallel, config.model.num_layers, rank)
    ]


def with_flags(config: RunConfig, **flags: object) -> RunConfig:
    """Returns the run with these fields of RecomputeConfig instead of its own.

    --no-recompute-tail-skip and --recompute-verify stay as they are in the run.
    ValueError: the fields are illegal for the run.
    """
    own = config.recompute
    kept = dict(recompute_tail_skip=own.recompute_tail_skip, recompute_verify=own.recompute_verify)
    return replace(config, recompute=RecomputeConfig(**{**kept, **flags}))  # type: ignore[arg-type]


def full(config: RunConfig, method: str, count: int, *, split: bool = False) -> RunConfig:
    """Returns the run with whole layers recomputed. split: units keep 1/t of their input."""
    return with_flags(
        config,
        recompute_granularity="full",
        recompute_method=method,
        recompute_num_layers=count,
        distribute_saved_activations=split,
    )


def alternatives(
    config: RunConfig, device: str, *, dp_cp_size: int = 1, others: Sequence[ComparedRun] = ()
) -> tuple[Priced, ...]:
    """Returns the costs of the run's own flags and of usual settings, the highest peak first.

    others: further settings to compare, such as one that a planner has found.
    """
    usual = (ComparedRun("", run) for run in _usual(config, device, dp_cp_size))
    priced = {
        one.execution: one
        for name, run in (*others, *usual, *_in_chunks(config), ComparedRun("", config))
        for one in [price(run, device, dp_cp_size=dp_cp_size, name=name)]
    }
    return tuple(sorted(priced.values(), key=lambda one: (-one.step.num_bytes, one.replay_flops)))


def best_unit(config: RunConfig, device: str, *, split: bool, dp_cp_size: int = 1) -> int:
    """Returns the unit size with the lowest peak; of several equal ones the smallest."""

    def peak(count: int) -> int:
        run = full(config, "uniform", count, split=split)
        return fullest_step_peak(run, device=device, dp_cp_size=dp_cp_size).num_bytes

    return min(range(1, _longest_stage(config) + 1), key=peak)


def _longest_stage(config: RunConfig) -> int:
    return max(stage.num_layers for stage in stages(config.parallel, config.model.num_layers))


def _usual(config: RunConfig, device: str, dp_cp_size: int) -> Iterator[RunConfig]:
    modules = [(CORE_ATTENTION,), POINTWISE, (MLP_REGION,)]
    if config.model.builds_scores(device):
        modules.append((CORE_ATTENTION, *POINTWISE))
    yield with_flags(config)
    for names in modules:
        yield with_flags(config, recompute_granularity="selective", recompute_modules=names)
    for split in (False, True):
        try:
            full(config, "uniform", 1, split=split)
        except ValueError:  # this layout cannot split the inputs of units
            continue
        for count in {1, best_unit(config, device, split=split, dp_cp_size=dp_cp_size)}:
            yield full(config, "uniform", count, split=split)
        yield full(config, "block", (_longest_stage(config) + 1) // 2, split=split)
    policies = ["every-2:full"]
    if device == "cuda":  # on a CPU @host frees nothing
        policies += ["*:full@host", "*:none@host"]
    for policy in policies:
        yield with_flags(config, recompute_policy=policy)


def _in_chunks(config: RunConfig) -> Iterator[ComparedRun]:
    """Yields the run with its loss in chunks, if it has more tokens than one chunk."""
    tokens = config.data.seq_length * config.training.micro_batch_size
    if config.loss_chunk_size is None and tokens > LOSS_CHUNK:
        chunked = replace(config.training, loss_chunk_size=LOSS_CHUNK)
        name = f"this run with --loss-chunk-size {LOSS_CHUNK}"
        yield ComparedRun(name, replace(config, training=chunked))


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
