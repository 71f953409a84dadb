"""The whole peak of an optimizer step of one rank, term by term, in closed form.

    peak = what the rank holds from step to step + the fullest moment of its forwards and backwards

The first part is that of states.py, and the rotary tables. The second part follows the rank's
actions in the order of the pipeline. Each forward or backward of a stage is a passage
(stage_course.py): what is kept, what a replay rebuilds, and one number for each operation
(description/sizes.py). On CUDA the allocator's rounding and the workspaces of cuBLAS count.

    held when an action begins    what earlier actions have left, the tensors that have arrived for
                                  this action and for the next one, and tensors that are being sent
    held at the fullest moment    that, and the most of the action's passage

How long a send takes depends on the other rank. Here the tensor of the action before is still being
sent. With virtual stages those of three actions are, except on the last rank, for which the others
wait.

After the last backward the update can hold more if the batch is small (states.py). An
evaluation keeps nothing for backward, and a save gathers one tensor at a time: they hold less.

Alike stages of several calls are taken from a cache, and the actions after the schedule repeats are
left out. Standard library only.
"""

from collections import Counter, deque
from collections.abc import Callable
from functools import cache
from itertools import zip_longest
from typing import Any, NamedTuple

from megatron_lite.config.row_blocks import hashed_at_a_time
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage
from megatron_lite.description.sizes import Sizes
from megatron_lite.pipeline.order import Action
from megatron_lite.recompute.schedule import stage_plan

from .pipeline_memory import RankSchedule, alike_ranks, enough_microbatches, step_microbatches
from .stage_course import StageCourse, stage_course
from .states import rank_states, update_memory
from .walk import GatheredWeights, Moment

EXACT, BOUND, ESTIMATE = "exact", "bound", "estimate"
ROUNDING, CUBLAS = "rounding of the allocator", "workspaces of cuBLAS"
KEPT, REBUILT = "activations kept for backward", "activations rebuilt by a replay"
WORKSPACE = 2**25  # of cuBLAS on Hopper


class PeakTerm(NamedTuple):
    """A part of the peak.

    tag: "exact", with what CUDA's allocator rounds of activations; "bound" if it is the most that
        the part can be; or "estimate".
    """

    name: str
    num_bytes: int
    tag: str = EXACT


class StepPeak(NamedTuple):
    """The peak of a step on one rank.

    rank: the pipeline rank.
    moment: when the peak is reached, in words.
    terms: its parts, without those of no bytes.
    on_host: the most bytes that policies keep in host memory, wherever the peak is.
    """

    rank: int
    moment: str
    terms: tuple[PeakTerm, ...]
    on_host: int = 0

    @property
    def num_bytes(self) -> int:
        """The sum of the terms."""
        return sum(term.num_bytes for term in self.terms)

    def fits(self, num_bytes: float) -> bool:
        """Returns whether these bytes are enough for the step.

        Whoever needs to know asks here: the planner, `--recompute-policy auto`, and the message of
        a run out of memory. The start of a run refuses only what surely does not fit.
        """
        return self.num_bytes <= num_bytes

    @property
    def certain_bytes(self) -> int:
        """The certain part of the sum. A run that needs more than there is cannot fit.

        A rank may hold less than a bound, and an estimate of a workspace may be off: half of these
        counts.
        """
        shares = ((1.0 if one.tag == EXACT else 0.5) * one.num_bytes for one in self.terms)
        return round(sum(shares))

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


def step_peak(
    config: RunConfig, pp_rank: int, *, device: str, dp_size: int = 1, dp_cp_rank: int = 0
) -> StepPeak:
    """Returns the peak of a step on one rank, with the most micro-batches that the run has.

    The vocabulary size must be known.

    pp_rank: the pipeline rank.
    device: "cpu" or "cuda". On a CPU tensors in host memory count too.
    dp_size: the number of data-parallel ranks.
    dp_cp_rank: the number of this rank among those that share the states, over data and context
        parallelism together.
    """
    dp_cp_size = dp_size * config.parallel.context_parallel_size
    states = rank_states(config, pp_rank, dp_cp_size=dp_cp_size, dp_cp_rank=dp_cp_rank)
    number = step_microbatches(config, dp_size)
    shards = config.shards(dp_cp_size) if config.data_parallel.use_torch_fsdp2 else 1
    schedule = RankSchedule.of(config, pp_rank, enough_microbatches(config, pp_rank, number))
    stages = schedule.stages

    @cache
    def course(chunk: int, keeps_all: bool, accumulates: bool) -> StageCourse:
        stage = stages[chunk]
        sizes = Sizes.in_training(
            config, device=device, stage=stage, accumulates=accumulates, sharded=shards > 1
        )
        weights = GatheredWeights.of(config, sizes, stage, shards)
        return stage_course(stage_plan(config, stage, keeps_all), sizes, weights)

    action, held, waiting = _fullest(config, device, schedule, course)
    each = [course(chunk, False, False) for chunk in range(len(stages))]
    update = update_memory(config, stages, states, dp_cp_size=dp_cp_size, device=device)
    sure = ESTIMATE
    where = _when(config, action, held, stages)
    staying = sum(one.staying for one in each)
    # With a small batch the update holds more than any backward.
    gradients = states.gradients * (shards > 1)  # which exist after the first backward
    if update.num_bytes + gradients > held.num_bytes + staying:
        held = Moment(update.where, other=update.num_bytes, gradients=gradients)
        staying = 0
        sure = EXACT if update.is_exact else ESTIMATE
        where = f"{update.where} after the last backward"
    verifies = config.recompute.recompute_verify
    # forward's and backward's threads have one each, and a captured step has a stream of its own
    workspaces = 2 + (config.training.cuda_graph_impl != "none")
    on_cpu, on_gpu = device == "cpu", device != "cpu"
    on_host = sum(waiting[chunk] * one.on_host for chunk, one in enumerate(each))
    arena = sum(waiting[chunk] * one.arena for chunk, one in enumerate(each))
    rows = (
        ("weights", states.weights, EXACT),
        ("main weights", states.masters, EXACT),
        ("gradients", held.gradients if shards > 1 else states.gradients, EXACT),
        ("optimizer states", states.optimizer, EXACT),
        ("optimizer in host memory", on_cpu * states.on_host, EXACT),
        (ROUNDING, on_gpu * states.rounding, ESTIMATE),
        (CUBLAS, on_gpu * workspaces * WORKSPACE, ESTIMATE),
        ("rotary tables", sum(one.tables for one in each), EXACT),
        ("gathered weights", staying, ESTIMATE),
        (KEPT, held.kept, EXACT),
        (REBUILT, held.rebuilt, EXACT),
        (f"workspace of the {held.where}", held.other, sure),
        ("hidden states received early", held.arrived, EXACT),
        ("hidden states being sent", held.sent, ESTIMATE),
        ("arena of saved inputs", arena, EXACT),
        ("hashes of replays", 16 * hashed_at_a_time(device) * verifies, ESTIMATE),
        ("copies in host memory", on_cpu * on_host, BOUND),
    )
    return StepPeak(pp_rank, where, tuple(PeakTerm(*row) for row in rows if row[1]), on_host)


def fullest_step_peak(config: RunConfig, **facts: Any) -> StepPeak:
    """Returns the highest peak of all pipeline ranks; of several equal ones the first.

    facts: see `step_peak`.
    """
    peaks = (step_peak(config, rank, **facts) for rank in sorted({*alike_ranks(config)}))
    return max(peaks, key=lambda one: one.num_bytes)


def _fullest(
    config: RunConfig,
    device: str,
    schedule: RankSchedule,
    course_of: Callable[[int, bool, bool], StageCourse],
) -> tuple[Action, Moment, Counter[int]]:
    """Returns the fullest of a rank's actions and the moment in it, with the bytes beyond those
    that are held between steps, and for each chunk how many micro-batches await backward at most.
    """
    stages, actions = schedule.stages, schedule.actions
    hidden = Sizes.of(config, device).residual

    def crosses(action: Action) -> tuple[bool, bool]:
        """Returns whether the action receives from another stage, and whether it sends."""
        stage = stages[action.chunk]
        ends = not stage.is_first, not stage.is_last
        return ends if action.kind == "forward" else ends[::-1]

    found, at, kept, other, gradients = Moment(), actions[0], 0, 0, 0
    waiting, most = Counter[int](), Counter[int]()
    under_way = deque([0], maxlen=1 if len(stages) == 1 or stages[-1].is_last else 3)
    for action, following in zip_longest(actions, actions[1:]):
        course = course_of(action.chunk, schedule.keeps_all(action), action.microbatch > 0)
        is_forward = action.kind == "forward"
        passage = course.forward if is_forward else course.backward
        waiting[action.chunk] += 1 if is_forward else -1
        most |= waiting
        early = config.parallel.overlap_p2p_comm and following and crosses(following)[0]
        receives, sends = crosses(action)
        # The action's own input arrived before, and belongs to its passage from now on.
        other += hidden * receives
        fullest = passage.fullest
        here = fullest._replace(
            kept=kept + fullest.kept,
            other=other + fullest.other,
            arrived=hidden if early else 0,
            sent=sum(under_way),
            gradients=gradients + fullest.gradients,
        )
        if here.num_bytes > found.num_bytes:
            found, at = here, action
        # A passage ends without the tensor that the action sends. The tensor is counted here as
        # long as it may be on its way.
        kept += passage.kept
        other += passage.other
        gradients += passage.gradients
        under_way.append(hidden * sends)
    return at, found, most


def _when(config: RunConfig, action: Action, held: Moment, stages: tuple[Stage, ...]) -> str:
    stage = stages[action.chunk]
    place = "" if held.layer is None else f" of layer {stage.first_layer + held.layer}"
    where = f"{held.where}{place}, micro-batch {action.microbatch + 1}"
    if config.parallel.pipeline_model_parallel_size == 1:
        return where
    return f"{where} of stage {stage.number}"
