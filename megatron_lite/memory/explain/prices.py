"""The cost of a run's recompute flags, and of other settings: kept bytes, the peak and FLOPs.

Each figure is of one micro-batch on one rank. In a pipeline the bytes are those of the rank with
the highest peak. It need not be the first rank, and other flags may have another such rank. The
peak is that of all micro-batches in flight on the rank. FLOPs are those of the whole model.

Every figure comes from the plan that would be executed. Standard library only.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.regions import ALIAS, CORE_ATTENTION, MLP_REGION, POINTWISE
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage, stages, stages_of_rank
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.predict.flops import logits_flops, replay_flops, step_flops
from megatron_lite.memory.predict.kept_tensors import activation_bytes, host_bytes
from megatron_lite.memory.predict.peak import PeakMoment, peak
from megatron_lite.memory.predict.pipeline_memory import (
    fullest_rank,
    rank_memory,
    recomputing_microbatches,
    step_microbatches,
)
from megatron_lite.memory.predict.step_peak import fullest_step_peak
from megatron_lite.recompute.recompute_plan import RecomputePlan
from megatron_lite.recompute.schedule import plan_model, plan_stage

LONGEST_NAME = 45
LOSS_CHUNK = 1024  # tokens; the value of --loss-chunk-size that the report compares


class ComparedRun(NamedTuple):
    """A run that the report compares with the user's. name: its name in the table."""

    name: str
    config: RunConfig


class Priced(NamedTuple):
    """The cost of one setting of the recompute flags.

    plan: the plan of the whole model.
    kept_bytes: the kept bytes on the device. host_bytes: those in host memory.
    model_flops: the FLOPs of forward and backward of a micro-batch through all stages, on one of
        the ranks that split a layer.
    replay_flops: the FLOPs of the replays, which come on top of model_flops.
    rank: the pipeline rank that has these bytes.
    whole_bytes: the whole peak of a step, on the rank where it is highest; 0 if not computed.
    loss_chunk_size: the tokens whose logits exist at a time; None if the loss is not in chunks.
    chunk_flops: the FLOPs of the logits that a loss in chunks computes a second time.
    given_name: the name of a setting that its flags do not name; "" if they do.
    """

    recompute: RecomputeConfig
    plan: RecomputePlan
    kept_bytes: int
    peak: PeakMoment
    model_flops: int
    replay_flops: int
    host_bytes: int = 0
    rank: int = 0
    whole_bytes: int = 0
    loss_chunk_size: int | None = None
    chunk_flops: int = 0
    given_name: str = ""

    @property
    def extra_flops(self) -> float:
        """The share of forward and backward that runs again."""
        return self.replay_flops / self.model_flops

    @property
    def added_flops(self) -> float:
        """Returns extra_flops with the logits that a loss in chunks computes a second time."""
        return (self.replay_flops + self.chunk_flops) / self.model_flops

    @property
    def name(self) -> str:
        """The name of the setting in the table."""
        return self.given_name or short_name(self.recompute)

    @property
    def execution(self) -> tuple[RecomputePlan, int | None]:
        """The plan and the loss chunks, by which two settings are told apart."""
        return self.plan, self.loss_chunk_size


def price(config: RunConfig, device: str, *, rank: int | None = None) -> Priced:
    """Returns the cost of the run's own flags. The vocabulary size must be known.

    device: "cpu" or "cuda".
    rank: the pipeline rank whose bytes to return; None: the rank with the highest peak.
    """
    whole, sizes = plan_model(config), Sizes.of(config, device=device)
    shape: dict[str, int] = dict(batch=sizes.micro_batch_size, seq_length=sizes.seq_length)
    if config.parallel.pipeline_model_parallel_size == 1:
        rank, fullest = 0, peak(config.model, whole, sizes)
    else:
        memory = fullest_rank(config, device) if rank is None else rank_memory(config, device, rank)
        rank, fullest = memory.rank, PeakMoment(None, None, memory.peak_bytes)
    kept = moved = 0
    for stage, plan in rank_plans(config, rank):
        own_sizes = Sizes.of(config, device=device, stage=stage)
        kept += activation_bytes(config.model, plan, own_sizes)
        moved += host_bytes(config.model, plan, own_sizes)
    shape["padded_vocab_size"] = sizes.padded_vocab_size
    model_flops = step_flops(config.model, **shape)
    chunk = config.loss_chunk_size
    in_two_passes = chunk is not None and not config.loss_in_one_pass
    again = logits_flops(config.model, **shape) if in_two_passes else 0
    return Priced(
        config.recompute,
        whole,
        kept,
        fullest,
        model_flops // sizes.num_ranks,
        _replay_flops(config, sizes) // sizes.num_ranks,
        moved,
        rank,
        loss_chunk_size=chunk,
        chunk_flops=again // sizes.num_ranks,
    )


def rank_plans(config: RunConfig, rank: int) -> list[tuple[Stage, RecomputePlan]]:
    """Returns the stages of a pipeline rank and their plans.

    Without a pipeline the whole model is one stage.
    """
    return [
        (stage, plan_stage(config.recompute, stage.num_layers, stage.number))
        for stage in stages_of_rank(config.parallel, config.model.num_layers, rank)
    ]


def longest_stage(config: RunConfig) -> int:
    """Returns the number of layers of the longest stage: all layers without a pipeline."""
    return max(stage.num_layers for stage in stages(config.parallel, config.model.num_layers))


def _replay_flops(config: RunConfig, sizes: Sizes) -> int:
    """Returns the replay FLOPs of a micro-batch in all stages, on all ranks of each stage.

    The figure is the mean over a step, since some of its micro-batches may keep everything.
    """
    most = step_microbatches(config)
    counts = recomputing_microbatches(config, most)
    shape: dict[str, Any] = dict(
        batch=sizes.micro_batch_size,
        seq_length=sizes.seq_length,
        device=sizes.device,
        tp_size=sizes.tp_size,
        cp_size=sizes.cp_size,
    )
    if set(counts) == {most}:
        return replay_flops(config.model, plan_model(config), **shape)
    again = (
        count
        * replay_flops(
            config.model,
            plan_stage(config.recompute, stage.num_layers, stage.number),
            **shape,
            first_layer=stage.first_layer,
        )
        for stage, count in zip(
            stages(config.parallel, config.model.num_layers), counts, strict=True
        )
    )
    return sum(again) // most


def with_flags(config: RunConfig, **flags: object) -> RunConfig:
    """Returns the run with these fields of RecomputeConfig instead of its own.

    --no-recompute-tail-skip and --recompute-verify stay as they are in the run.
    ValueError: the fields are illegal for the run.
    """
    kept = {
        name: getattr(config.recompute, name)
        for name in ("recompute_tail_skip", "recompute_verify")
    }
    return replace(config, recompute=RecomputeConfig(**{**kept, **flags}))


def full(config: RunConfig, method: str, count: int, *, split: bool = False) -> RunConfig:
    """Returns the run with whole layers recomputed. split: units keep 1/t of their input."""
    return with_flags(
        config,
        recompute_granularity="full",
        recompute_method=method,
        recompute_num_layers=count,
        distribute_saved_activations=split,
    )


def selective(config: RunConfig, *modules: str) -> RunConfig:
    """Returns the run with these regions recomputed."""
    return with_flags(config, recompute_granularity="selective", recompute_modules=modules)


def alternatives(
    config: RunConfig, device: str, *, dp_cp_size: int = 1, others: Sequence[ComparedRun] = ()
) -> tuple[Priced, ...]:
    """Returns the costs of the run's own flags and of usual settings, the highest peak first.

    The peak is that of the whole step.
    dp_cp_size: the number of ranks that share the states.
    others: further settings to compare, such as one that a planner has found.
    """
    priced = {}
    usual = [ComparedRun("", run) for run in _usual(config, device)]
    for name, run in (*others, *usual, *_in_chunks(config), ComparedRun("", config)):
        whole = fullest_step_peak(run, device=device, dp_cp_size=dp_cp_size).num_bytes
        one = price(run, device)._replace(whole_bytes=whole, given_name=name)
        priced[one.execution] = one
    return tuple(sorted(priced.values(), key=lambda one: (-one.whole_bytes, one.replay_flops)))


def uniform_peaks(config: RunConfig, device: str, *, split: bool) -> dict[int, int]:
    """Returns the bytes held at the peak for each unit size, from 1 to the layers of a stage.

    split: units keep 1/t of their input.
    """
    return {
        count: price(full(config, "uniform", count, split=split), device).peak.held_bytes
        for count in range(1, longest_stage(config) + 1)
    }


def best_unit(peaks: dict[int, int]) -> int:
    """Returns the unit size with the lowest peak; of several equal ones the smallest."""
    return min(peaks, key=lambda count: (peaks[count], count))


def _usual(config: RunConfig, device: str) -> Iterator[RunConfig]:
    yield with_flags(config)
    yield selective(config, CORE_ATTENTION)
    yield selective(config, *POINTWISE)
    if config.model.builds_scores(device):
        yield selective(config, CORE_ATTENTION, *POINTWISE)
    yield selective(config, MLP_REGION)
    splits = (False, True) if _can_split(config) else (False,)
    for split in splits:
        best = best_unit(uniform_peaks(config, device, split=split))
        for count in {1, best}:
            yield full(config, "uniform", count, split=split)
        yield full(config, "block", (longest_stage(config) + 1) // 2, split=split)

    yield with_flags(config, recompute_policy="every-2:full")
    if device == "cuda":  # on a CPU @host frees nothing
        yield with_flags(config, recompute_policy="*:full@host")
        yield with_flags(config, recompute_policy="*:none@host")


def _in_chunks(config: RunConfig) -> Iterator[ComparedRun]:
    """Yields the run with its loss in chunks, if it has more tokens than one chunk."""
    training = config.training
    sequence = config.data.seq_length or 0
    if config.loss_chunk_size is None and sequence * training.micro_batch_size > LOSS_CHUNK:
        chunked = replace(training, loss_chunk_size=LOSS_CHUNK)
        yield ComparedRun(
            f"this run with --loss-chunk-size {LOSS_CHUNK}", replace(config, training=chunked)
        )


def _can_split(config: RunConfig) -> bool:
    try:
        full(config, "uniform", 1, split=True)
    except ValueError:
        return False
    return True


def flags_of(recompute: RecomputeConfig) -> str:
    """Returns the command-line flags of a recompute configuration."""
    words = []
    if recompute.recompute_granularity is not None:
        words += ["--recompute-granularity", recompute.recompute_granularity]
    if recompute.recompute_method is not None:
        words += [
            "--recompute-method",
            recompute.recompute_method,
            "--recompute-num-layers",
            str(recompute.recompute_num_layers),
        ]
    if recompute.recompute_modules:
        words += ["--recompute-modules", *recompute.recompute_modules]
    if recompute.recompute_policy is not None:
        words += ["--recompute-policy", shlex.quote(recompute.recompute_policy)]
    if recompute.num_microbatches_with_partial_activation_checkpoints is not None:
        words += [
            "--num-microbatches-with-partial-activation-checkpoints",
            str(recompute.num_microbatches_with_partial_activation_checkpoints),
        ]
    switches = (
        ("--distribute-saved-activations", recompute.distribute_saved_activations),
        ("--contiguous-saved-activations", recompute.contiguous_saved_activations),
        ("--no-recompute-tail-skip", not recompute.recompute_tail_skip),
        ("--recompute-verify", recompute.recompute_verify),
    )
    return " ".join([*words, *(flag for flag, given in switches if given)])


def region_names(regions: Iterable[str]) -> list[str]:
    """Returns the names of regions, in alphabetical order.

    The three cheap regions together become `pointwise`, as in --recompute-modules.
    """
    names = set(regions)
    return sorted(names - set(POINTWISE)) + [ALIAS] if set(POINTWISE) <= names else sorted(names)


def short_name(recompute: RecomputeConfig) -> str:
    """Returns the values without the flags' names, such as "full uniform 2, distributed".

    A policy is shortened to LONGEST_NAME characters.
    """
    if recompute.recompute_policy is not None:
        return textwrap.shorten(
            f"policy {recompute.recompute_policy}", LONGEST_NAME, placeholder=" ..."
        )
    if recompute.recompute_granularity is None:
        return "none"
    if recompute.recompute_granularity == "selective":
        return " ".join(["selective", *region_names(recompute.recompute_modules)])
    split = ", distributed" if recompute.distribute_saved_activations else ""
    return f"full {recompute.recompute_method} {recompute.recompute_num_layers}{split}"
