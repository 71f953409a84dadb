"""The whole peak of an optimizer step of one rank, term by term, in closed form.

    peak = what a rank holds all the time + the fullest moment of its forwards and backwards

The first part is states.py's. The second follows the rank's actions in the order of the pipeline:
each forward and backward is a passage (stage_passages.py), which begins with what the actions
before it have left. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import stages_of_rank
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.predict.pipeline_memory import step_microbatches
from megatron_lite.memory.predict.stage_passages import stage_passages
from megatron_lite.memory.predict.states import rank_states
from megatron_lite.recompute.schedule import plan_stage

Tag = Literal["exact", "bound", "estimate"]


class PeakTerm(NamedTuple):
    """A part of the peak.

    tag: "exact", or "bound" if it may be less, or "estimate".
    """

    name: str
    num_bytes: int
    tag: Tag


@dataclass(frozen=True)
class StepPeak:
    """The peak of a step on one rank.

    rank: the pipeline rank.
    moment: when it is reached, in words.
    terms: its parts.
    """

    rank: int
    moment: str
    terms: tuple[PeakTerm, ...]

    @property
    def num_bytes(self) -> int:
        """The sum of the terms."""
        return sum(term.num_bytes for term in self.terms)


def step_peak(
    config: RunConfig,
    pp_rank: int,
    *,
    device: str,
    dp_cp_size: int,
    dp_cp_rank: int = 0,
    num_microbatches: int | None = None,
) -> StepPeak:
    number = num_microbatches or step_microbatches(config)
    states = rank_states(config, pp_rank, dp_cp_size=dp_cp_size, dp_cp_rank=dp_cp_rank)
    (stage,) = stages_of_rank(config.parallel, config.model.num_layers, pp_rank)
    sizes = Sizes.in_training(config, device=device, stage=stage)
    plan = plan_stage(config.recompute, stage.num_layers, stage.number)
    one = stage_passages(config.model, plan, sizes)
    both = one.forward.then(one.backward)
    rotary = (
        2 * sizes.own_seq_length * config.model.rotary_dim * sizes.element_bytes
        if config.model.positions.rotated
        else 0
    )
    terms = [
        PeakTerm("weights", states.weights, "exact"),
        PeakTerm("masters", states.masters, "exact"),
        PeakTerm("gradients", states.gradients, "exact"),
        PeakTerm("optimizer", states.optimizer, "exact"),
        PeakTerm("rotary tables", rotary, "exact"),
        PeakTerm("kept", both.fullest.kept, "exact"),
        PeakTerm("rebuilt", both.fullest.rebuilt, "exact"),
        PeakTerm("workspace", both.most - both.fullest.kept - both.fullest.rebuilt, "exact"),
    ]
    return StepPeak(pp_rank, both.fullest.where, tuple(terms))
