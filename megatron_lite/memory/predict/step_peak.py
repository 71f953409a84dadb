"""The most bytes that one rank holds at any moment of a training step. Standard library only.

    peak = states + activations of all micro-batches in flight + workspace of the fullest operation

The states are exact and so are the activations. The workspace is a bound: it is added to the
fullest moment of the activations, although the two need not occur together.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import stages_of_rank
from megatron_lite.description.model_ends import embedding_operations, head_operations
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.transformer_layer import describe_kinds
from megatron_lite.memory.predict.pipeline_memory import rank_memory
from megatron_lite.memory.predict.states import rank_states


class PeakTerm(NamedTuple):
    """A part of the peak. tag: "exact", "bound" or "estimate"."""

    name: str
    num_bytes: int
    tag: str


class StepPeak(NamedTuple):
    """The peak of one pipeline rank, as a sum of terms. moment: when it is reached, in words."""

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
    """Returns the peak of one pipeline rank. The vocabulary size must be known.

    dp_cp_size, dp_cp_rank: the number of ranks that share the states, over data and context
        parallelism together, and the number of this rank among them.
    num_microbatches: the micro-batches of a step on this rank; None: those of the configuration.
    """
    states = rank_states(config, pp_rank, dp_cp_size=dp_cp_size, dp_cp_rank=dp_cp_rank)
    memory = rank_memory(config, device, pp_rank)
    terms = (
        PeakTerm("weights", states.weights, "exact"),
        PeakTerm("master weights", states.masters, "exact"),
        PeakTerm("gradients", states.gradients, "exact"),
        PeakTerm("optimizer states", states.optimizer, "exact"),
        PeakTerm("activations", memory.peak_bytes, "exact"),
        PeakTerm("workspace", _workspace(config, pp_rank, device), "bound"),
    )
    return StepPeak(pp_rank, "a backward", terms)


def fullest_step_peak(
    config: RunConfig, *, device: str, dp_cp_size: int, num_microbatches: int | None = None
) -> StepPeak:
    """Returns the peak of the pipeline rank that holds the most bytes."""
    return max(
        (
            step_peak(
                config,
                rank,
                device=device,
                dp_cp_size=dp_cp_size,
                num_microbatches=num_microbatches,
            )
            for rank in range(config.parallel.pipeline_model_parallel_size)
        ),
        key=lambda peak: peak.num_bytes,
    )


def _workspace(config: RunConfig, pp_rank: int, device: str) -> int:
    """Returns the largest workspace of an operation of the rank."""
    found = [0]
    for stage in stages_of_rank(config.parallel, config.model.num_layers, pp_rank):
        sizes = Sizes.of(config, device=device, stage=stage)
        operations = [
            *(embedding_operations(config.model, sizes) if stage.is_first else ()),
            *(head_operations(config.model, sizes) if stage.is_last else ()),
        ]
        for layer, _ in describe_kinds(config.model, sizes, stage.num_layers):
            operations += layer.operations
        found += [
            course.most
            for operation in operations
            for course in (operation.workspace.forward, operation.workspace.backward)
        ]
    return max(found)
