"""The whole peak of an optimizer step of one rank, term by term, in closed form.

    peak = what the rank holds from step to step + the fullest moment of its forwards and backwards

The first part is that of states.py, and the rotary tables. The second part follows the rank's
actions in the order of the pipeline (pipeline_walk.py). Each forward or backward of a stage is a
passage (stage_passages.py): what is kept, what a replay rebuilds, and one number for each operation
(description/temporaries.py). On CUDA the allocator's rounding and two workspaces of cuBLAS count.

After the last backward the update can hold more if the batch is small (update_memory.py). An
evaluation keeps nothing for backward, and a save gathers one tensor at a time: they hold less.

A prediction costs about a millisecond: layers of one kind are described once, equal stages of
several calls are taken from a cache, and the actions after the schedule repeats are left out.
Standard library only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

from megatron_lite.config.row_blocks import hashed_at_a_time
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage, stages_of_rank
from megatron_lite.description.sizes import Sizes, residual_bytes
from megatron_lite.memory.predict.passages import Moment, Passage
from megatron_lite.memory.predict.pipeline_memory import (
    distinct_ranks,
    enough_microbatches,
    step_microbatches,
)
from megatron_lite.memory.predict.pipeline_walk import Fullest, fullest
from megatron_lite.memory.predict.stage_memory import PlacedRun, StageMemory, stage_memory
from megatron_lite.memory.predict.states import StateTensors, state_tensors
from megatron_lite.memory.predict.update_memory import update_memory
from megatron_lite.pipeline.order import Action, in_flight, keeping_all, order

Tag = Literal["exact", "bound", "estimate"]
EXACT: Tag = "exact"
BOUND: Tag = "bound"
ESTIMATE: Tag = "estimate"
ROUNDING, CUBLAS = "rounding of the allocator", "two workspaces of cuBLAS"
CUBLAS_BYTES = 2 * 2**25  # of the streams of forward and backward, on Hopper


class PeakTerm(NamedTuple):
    """A part of the peak.

    tag: "exact"; "bound" if it is the most that the part can be; or "estimate".
    """

    name: str
    num_bytes: int
    tag: Tag


@dataclass(frozen=True)
class StepPeak:
    """The peak of a step on one rank.

    rank: the pipeline rank.
    moment: when the peak is reached, in words.
    terms: its parts, without those of no bytes.
    """

    rank: int
    moment: str
    terms: tuple[PeakTerm, ...]

    @property
    def num_bytes(self) -> int:
        """The sum of the terms."""
        return sum(term.num_bytes for term in self.terms)

    @property
    def beside_tensors(self) -> int:
        """The bytes that a GPU holds beside tensors: the rounding of states, and cuBLAS."""
        return sum(term.num_bytes for term in self.terms if term.name in (ROUNDING, CUBLAS))


def band(config: RunConfig, device: str) -> str:
    """Returns in words how far a prediction may be from the peak of a real step.

    Tests hold the bounds: tests/memory/test_step_peak.py and test_peaks_on_a_gpu.py.
    """
    if device == "cpu" or config.data_parallel.use_torch_fsdp2:
        return "within 5% of"
    return "at most 1% below and 3% above"


@dataclass(frozen=True)
class _StateSettings:
    """A run, of which only the settings that decide the states count in comparisons."""

    key: tuple[Hashable, ...]
    config: RunConfig = field(compare=False)

    @classmethod
    def of(cls, config: RunConfig) -> _StateSettings:
        training = config.training
        return cls(
            (
                config.model,
                config.parallel,
                config.data_parallel,
                config.optimizer.optimizer,
                config.tokenizer,
                training.precision,
            ),
            config,
        )


def step_peak(
    config: RunConfig,
    pp_rank: int,
    *,
    device: str,
    dp_cp_size: int,
    dp_cp_rank: int = 0,
    num_microbatches: int | None = None,
) -> StepPeak:
    """Returns the peak of a step on one rank. The vocabulary size must be known.

    pp_rank: the pipeline rank.
    device: "cpu" or "cuda". On a CPU tensors in host memory count too.
    dp_cp_size, dp_cp_rank: the number of ranks that share the states, over data and context
        parallelism together, and the number of this rank among them.
    num_microbatches: those of one data-parallel rank in a step. None: those of a rank that runs
        --global-batch-size alone.
    """
    stages = stages_of_rank(config.parallel, config.model.num_layers, pp_rank)
    tensors = _states(_StateSettings.of(config), pp_rank, dp_cp_size, dp_cp_rank)
    states = tensors.sums
    number = step_microbatches(config) if num_microbatches is None else num_microbatches
    sharded = config.data_parallel.use_torch_fsdp2 and dp_cp_size > 1
    run = PlacedRun(config, device, dp_cp_size if sharded else 1, accumulates=number > 1)
    memories = [stage_memory(run, stage, False) for stage in stages]
    held = _fullest(run, pp_rank, stages, number)
    waiting = [0] * len(stages)
    if any(memory.arena or memory.on_host for memory in memories):
        waiting = _waiting(run, pp_rank, len(stages), number)
    arena = sum(n * memory.arena for n, memory in zip(waiting, memories, strict=True))
    on_host = sum(n * memory.on_host for n, memory in zip(waiting, memories, strict=True))
    update = update_memory(config, stages[0], states, dp_cp_size=dp_cp_size, device=device)
    sure: Tag = ESTIMATE
    if update.num_bytes > held.num_bytes:  # a small batch: the update holds more than any backward
        held = Fullest(held.action, Moment(update.where), update.num_bytes, 0)
        sure = EXACT if update.is_exact else ESTIMATE
    hashes = 16 * hashed_at_a_time(device) if config.recompute.recompute_verify else 0
    rest = held.num_bytes - held.kept - held.rebuilt - held.arrived - held.sent
    terms = (
        PeakTerm("weights", states.weights, EXACT),
        PeakTerm("main weights", states.masters, EXACT),
        PeakTerm("gradients", 0 if sharded and number == 1 else states.gradients, EXACT),
        PeakTerm("optimizer states", states.optimizer, EXACT),
        PeakTerm(ROUNDING, tensors.rounding(device), ESTIMATE),
        PeakTerm(CUBLAS, 0 if device == "cpu" else CUBLAS_BYTES, ESTIMATE),
        PeakTerm("rotary tables", sum(memory.tables for memory in memories), EXACT),
        PeakTerm("states of generators", max(memory.generators for memory in memories), EXACT),
        PeakTerm("gathered weights", sum(memory.gathered for memory in memories), ESTIMATE),
        PeakTerm("activations kept for backward", held.kept, EXACT),
        PeakTerm("activations rebuilt by a replay", held.rebuilt, EXACT),
        PeakTerm(f"workspace of the {held.moment.where}", rest, sure),
        PeakTerm("hidden states received early", held.arrived, EXACT),
        PeakTerm("hidden states being sent", held.sent, ESTIMATE),
        PeakTerm("arena of saved inputs", arena, EXACT),
        PeakTerm("hashes of replays", hashes, ESTIMATE),
        PeakTerm("copies in host memory", on_host if device == "cpu" else 0, BOUND),
    )
    at_update = held.moment.where == update.where
    return StepPeak(
        pp_rank,
        f"{update.where} after the last backward" if at_update else _moment(config, held, stages),
        tuple(term for term in terms if term.num_bytes),
    )


def fullest_step_peak(
    config: RunConfig, *, device: str, dp_cp_size: int, num_microbatches: int | None = None
) -> StepPeak:
    """Returns the highest peak of all pipeline ranks; of several equal ones the first."""
    return max(
        (
            step_peak(
                config,
                rank,
                device=device,
                dp_cp_size=dp_cp_size,
                num_microbatches=num_microbatches,
            )
            for rank in distinct_ranks(config)
        ),
        key=lambda one: one.num_bytes,
    )


def _fullest(run: PlacedRun, rank: int, stages: Sequence[Stage], num_microbatches: int) -> Fullest:
    """Returns the fullest moment of a rank's forwards and backwards."""
    config = run.config
    parallel = config.parallel
    size, num_chunks = parallel.pipeline_model_parallel_size, len(stages)
    num_kept = config.recompute.num_microbatches_with_partial_activation_checkpoints or 0
    shape = dict(
        size=size,
        rank=rank,
        num_microbatches=enough_microbatches(config, rank, num_chunks, most=num_microbatches),
        num_chunks=num_chunks,
    )
    whole = keeping_all(**shape, num_kept=num_kept) if num_kept else frozenset()

    memories: dict[tuple[int, bool], StageMemory] = {}

    def passage_of(action: Action) -> Passage:
        key = action.chunk, action._replace(kind="forward") in whole
        if key not in memories:
            memories[key] = stage_memory(run, stages[action.chunk], key[1])
        course = memories[key].course
        return course.forward if action.kind == "forward" else course.backward

    sizes = Sizes.of(config, device=run.device)
    return fullest(
        order(**shape),
        passage_of,
        stages,
        hidden_bytes=residual_bytes(config.model, sizes),
        overlap=parallel.overlap_p2p_comm,
    )


def _waiting(run: PlacedRun, rank: int, num_chunks: int, num_microbatches: int) -> list[int]:
    """Returns, for each of the rank's stages, how many micro-batches await backward at most."""
    size = run.config.parallel.pipeline_model_parallel_size
    actions = order(
        size=size,
        rank=rank,
        num_microbatches=min(num_microbatches, 2 * size),
        num_chunks=num_chunks,
    )
    held = [Counter(action.chunk for action in waiting) for _, waiting in in_flight(actions)]
    return [max(counts[chunk] for counts in held) for chunk in range(num_chunks)]


def _moment(config: RunConfig, held: Fullest, stages: Sequence[Stage]) -> str:
    stage, layer = stages[held.action.chunk], held.moment.layer
    place = "" if layer is None else f" of layer {stage.first_layer + layer}"
    where = f"{held.moment.where}{place}, micro-batch {held.action.microbatch + 1}"
    if config.parallel.pipeline_model_parallel_size == 1:
        return where
    return f"{where} of stage {stage.number}"


@lru_cache(maxsize=1024)
def _states(layout: _StateSettings, pp_rank: int, dp_cp_size: int, dp_cp_rank: int) -> StateTensors:
    return state_tensors(layout.config, pp_rank, dp_cp_size=dp_cp_size, dp_cp_rank=dp_cp_rank)
