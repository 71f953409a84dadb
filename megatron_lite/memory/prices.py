"""What a run's recompute flags cost, and what others would: kept bytes, the peak, FLOPs, of one micro-batch on one rank.

Of a pipeline it is the first stage, whose rank has most micro-batches in flight: the peak is of all of them.

Every figure comes from the plan that would be executed. Standard library only.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.recompute_modules import POINTWISE
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage, stages
from megatron_lite.memory.activations import activation_bytes, host_bytes
from megatron_lite.memory.flops import replay_flops, step_flops
from megatron_lite.memory.layer_tensors import Sizes
from megatron_lite.memory.peak import Moment, peak
from megatron_lite.memory.pipeline import rank_memory
from megatron_lite.recompute.plan import RecomputePlan
from megatron_lite.recompute.schedule import plan_stage

LONGEST_NAME = 45


class Priced(NamedTuple):
    """One setting of the recompute flags. model_flops: forward and backward; replay_flops: what comes on top.

    host_bytes: kept in host memory, beside the kept_bytes on the device.
    """

    recompute: RecomputeConfig
    plan: RecomputePlan
    kept_bytes: int
    peak: Moment
    model_flops: int
    replay_flops: int
    host_bytes: int = 0

    @property
    def extra_flops(self) -> float:
        """Share of forward and backward that is run again."""
        return self.replay_flops / self.model_flops


def price(config: RunConfig, device: str) -> Priced:
    """The figures of the run's own flags. device: "cpu" or "cuda". The vocabulary must be known."""
    stage = first_stage(config)
    sizes, plan = Sizes.of(config, device=device, stage=stage), plan_stage(config.recompute, stage.num_layers)
    shape = dict(batch=sizes.micro_batch_size, seq_length=sizes.seq_length)
    layers = replace(config.model, num_layers=stage.num_layers)
    model_flops = step_flops(layers, **shape, padded_vocab_size=sizes.padded_vocab_size if sizes.has_head else 0)
    again = replay_flops(config.model, plan, **shape, device=device, tp_size=sizes.tp_size, cp_size=sizes.cp_size)
    return Priced(config.recompute, plan, activation_bytes(config.model, plan, sizes), _peak(config, plan, sizes),
                  model_flops // sizes.num_ranks, again // sizes.num_ranks, host_bytes(config.model, plan, sizes))


def first_stage(config: RunConfig) -> Stage:
    """The stage that is described: the whole model where there is no pipeline."""
    return stages(config.parallel, config.model.num_layers)[0]


def _peak(config: RunConfig, plan: RecomputePlan, sizes: Sizes) -> Moment:
    alone = peak(config.model, plan, sizes)
    if config.parallel.pipeline_model_parallel_size == 1:
        return alone
    return alone._replace(held_bytes=rank_memory(config, sizes.device, 0).peak_bytes)


def with_flags(config: RunConfig, **flags: object) -> RunConfig:
    """The run with these fields of RecomputeConfig instead of its own. ValueError where they are illegal for it."""
    kept = {name: getattr(config.recompute, name) for name in ("recompute_tail_skip", "recompute_verify")}
    return replace(config, recompute=RecomputeConfig(**{**kept, **flags}))


def full(config: RunConfig, method: str, count: int, *, split: bool = False) -> RunConfig:
    """The run with whole layers recomputed."""
    return with_flags(config, recompute_granularity="full", recompute_method=method, recompute_num_layers=count,
                      distribute_saved_activations=split)


def selective(config: RunConfig, *modules: str) -> RunConfig:
    """The run with these regions recomputed."""
    return with_flags(config, recompute_granularity="selective", recompute_modules=modules)


def alternatives(config: RunConfig, device: str) -> tuple[Priced, ...]:
    """What the flags could do here: the run's own and the usual others, those that hold most at the peak first."""
    priced = {one.plan: one for one in (price(run, device) for run in (*_usual(config, device), config))}
    return tuple(sorted(priced.values(), key=lambda one: (-one.peak.held_bytes, one.replay_flops)))


def uniform_peaks(config: RunConfig, device: str, *, split: bool) -> dict[int, int]:
    """By unit size, 1 to all layers: bytes held at the peak. split: units keep 1/t of their input."""
    return {count: price(full(config, "uniform", count, split=split), device).peak.held_bytes
            for count in range(1, first_stage(config).num_layers + 1)}


def best_unit(peaks: dict[int, int]) -> int:
    """The unit size that holds least; the shortest of equals."""
    return min(peaks, key=lambda count: (peaks[count], count))


def _usual(config: RunConfig, device: str) -> Iterator[RunConfig]:
    yield with_flags(config)
    yield selective(config, "core_attn")
    yield selective(config, *POINTWISE)
    if config.model.builds_scores(device):
        yield selective(config, "core_attn", *POINTWISE)
    yield selective(config, "mlp")
    splits = (False, True) if _can_split(config) else (False,)
    for split in splits:
        best = best_unit(uniform_peaks(config, device, split=split))
        for count in {1, best}:
            yield full(config, "uniform", count, split=split)
        yield full(config, "block", (first_stage(config).num_layers + 1) // 2, split=split)


def _can_split(config: RunConfig) -> bool:
    try:
        full(config, "uniform", 1, split=True)
    except ValueError:
        return False
    return True


def flags_of(recompute: RecomputeConfig) -> str:
    """The flags that give it, spelled out."""
    words = []
    if recompute.recompute_granularity is not None:
        words += ["--recompute-granularity", recompute.recompute_granularity]
    if recompute.recompute_method is not None:
        words += ["--recompute-method", recompute.recompute_method, "--recompute-num-layers", str(recompute.recompute_num_layers)]
    if recompute.recompute_modules:
        words += ["--recompute-modules", *recompute.recompute_modules]
    if recompute.recompute_policy is not None:
        words += ["--recompute-policy", shlex.quote(recompute.recompute_policy)]
    if recompute.num_microbatches_with_partial_activation_checkpoints is not None:
        words += ["--num-microbatches-with-partial-activation-checkpoints",
                  str(recompute.num_microbatches_with_partial_activation_checkpoints)]
    switches = (("--distribute-saved-activations", recompute.distribute_saved_activations),
                ("--contiguous-saved-activations", recompute.contiguous_saved_activations),
                ("--no-recompute-tail-skip", not recompute.recompute_tail_skip),
                ("--recompute-verify", recompute.recompute_verify))
    return " ".join([*words, *(flag for flag, given in switches if given)])


def region_names(regions: Iterable[str]) -> list[str]:
    """In alphabetical order; the three cheap ones together are `pointwise`, as in --recompute-modules."""
    names = set(regions)
    return sorted(names - set(POINTWISE)) + ["pointwise"] if set(POINTWISE) <= names else sorted(names)


def short_name(recompute: RecomputeConfig) -> str:
    """Its values alone, such as "full uniform 2, distributed". At most LONGEST_NAME characters."""
    if recompute.recompute_policy is not None:
        return textwrap.shorten(f"policy {recompute.recompute_policy}", LONGEST_NAME, placeholder=" ...")
    if recompute.recompute_granularity is None:
        return "none"
    if recompute.recompute_granularity == "selective":
        return " ".join(["selective", *region_names(recompute.recompute_modules)])
    split = ", distributed" if recompute.distribute_saved_activations else ""
    return f"full {recompute.recompute_method} {recompute.recompute_num_layers}{split}"
