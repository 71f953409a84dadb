"""The predicted time of a training step of a RunConfig on a machine, term by term.

    time = max over pipeline ranks (computation + waits + reduction) + optimizer + gathers

docs/planning.md has the formulas and how well they predict measured and published runs. The rows
of work.py say what an operation computes, moves and launches, stage_time.py adds them up for a
stage, and pipeline_time.py runs the order of micro-batches. Standard library only.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from megatron_lite.config.optimizer_settings import FLOAT32, FORMATS, MUON, OptimizerConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage
from megatron_lite.description.operations import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    Collective,
    Matmul,
)
from megatron_lite.description.sizes import Sizes, first_like_stage
from megatron_lite.description.transformer_layer import describe_kinds
from megatron_lite.memory.predict.flops import step_flops
from megatron_lite.memory.predict.states import stage_parameters
from megatron_lite.recompute.schedule import stage_plan

from .hardware import Group, Hardware
from .pipeline_time import Durations, run_pipeline, shortest_pipeline
from .stage_time import HOST_PACE, StageTime, TimedRun, stage_time
from .work import Clock, sum_of

PIPELINE_WAITS = "waits of the pipeline"
REDUCTION = "reduction of gradients"
OPTIMIZER = "optimizer"
HOST_UPDATE = "optimizer on the host"
WEIGHT_GATHERS = "gathers of weights"
# The bytes that a step moves for each parameter, besides the states, and the weight that it writes:
# the gradient is read for its norm, scaled in place and read again; the master weight is read and
# written, and read again for the weight.
UPDATE_BYTES = 4 + 8 + 4 + 8 + 4
# Muon moves for each parameter of its matrices: momentum and direction in float32, the direction
# in 16 bits, its norm, its division and the update of the weight.
MUON_BYTES = 12 + 12 + 6 + 2 + 4 + 10
ROW_PARALLEL = ("linear_proj", "linear_fc2")


class StepTime(NamedTuple):
    """The predicted time of a step.

    terms: the seconds of each term, on the pipeline rank that ends last. They add up to `seconds`.
    rank: that pipeline rank.
    ideal_seconds: those of its model FLOPs, as the logs count them, at the peak of all ranks.
    band: the relative error of the seconds that is expected, in both directions.
    busy: the seconds in which each pipeline rank runs its micro-batches.
    """

    terms: Mapping[str, float]
    busy: tuple[float, ...]
    rank: int
    tokens: int
    ideal_seconds: float
    band: float

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return sum(self.terms.values())

    @property
    def tokens_per_second(self) -> float:
        """The tokens of all ranks per second."""
        return self.tokens / self.seconds


def step_time(
    config: RunConfig,
    hardware: Hardware,
    num_ranks: int,
    *,
    transfer_bytes: int | None = None,
    bound: bool = False,
    sends: bool = True,
    replays: Sequence[float] = (),
) -> StepTime:
    """Returns the time of one step of the full batch.

    transfer_bytes: the bytes that a rank sends to the next stage, if they are not its hidden
        states.
    bound: whether to return a lower bound, in less time: the pipeline's longest simple path instead
        of a simulation.
    sends: whether what context- and expert-parallel ranks exchange takes time.
    replays: seconds that the backward of a micro-batch takes longer at least, by pipeline rank,
        apart from what it hides. They count among the waits.
    Raises ValueError if the ranks or the batch do not divide, or if the vocabulary is not known.
    """
    parallel = config.parallel
    p, dp_size = parallel.pipeline_model_parallel_size, parallel.data_parallel_size(num_ranks)
    num_microbatches = config.training.num_microbatches(dp_size)
    # Ranks are numbered tensor-parallel first, then context-, data- and pipeline-parallel.
    t = parallel.tensor_model_parallel_size
    clock = Clock.of(config, hardware)
    if not sends:
        clock = clock._replace(cp=Group(1), ep=Group(1))
    run = TimedRun(config, clock, Group(dp_size * parallel.context_parallel_size, t))
    pipeline = Group(p, run.data_parallel.size * t)
    # A tied embedding is on the first and the last pipeline rank, which are p - 1 strides apart.
    embeddings = Group(min(p, 2), (p - 1) * pipeline.stride or 1)
    ranks = _rank_times(run, embeddings, num_microbatches)
    sizes = Sizes.of(config, hardware.device)
    sent = transfer_bytes or sizes.residual
    link = hardware.inside if pipeline.per_node(hardware) == p else hardware.between
    transfer = link.latency_s + sent / link.bandwidth
    durations = Durations(
        [
            [
                (stage.forward.seconds, stage.longer(replay / len(one.stages)))
                for stage in one.stages
            ]
            for replay, one in zip(replays or [0.0] * p, ranks, strict=True)
        ],
        transfer,
        parallel.overlap_p2p_comm,
    )
    ends = (shortest_pipeline if bound else run_pipeline)(durations, num_microbatches)
    busy = [num_microbatches * sum(half.seconds for half in one.whole) for one in ranks]
    batch, length = config.training.batch_size(dp_size), config.data.seq_length
    flops = step_flops(replace(sizes, micro_batch_size=batch))
    last = max(range(p), key=lambda rank: ends[rank] + ranks[rank].update[REDUCTION])
    update = ranks[last].update
    terms = {
        **sum_of((half, num_microbatches) for half in ranks[last].whole).terms,
        PIPELINE_WAITS: ends[last] - busy[last],
        # The norm of all gradients makes every rank wait before its update.
        **{term: max(one.update[term] for one in ranks) for term in update},
        REDUCTION: update[REDUCTION],
    }
    # Less than a nanosecond is a rounding error.
    terms = {term: hardware.pace * seconds for term, seconds in terms.items() if seconds > 1e-9}
    band = hardware.band if num_ranks == 1 else hardware.band_of_several
    return StepTime(
        busy=tuple(hardware.pace * one for one in busy),
        terms=terms,
        rank=last,
        tokens=batch * length,
        ideal_seconds=flops / (num_ranks * hardware.matmuls(clock.element_bytes).peak_flops),
        # The time of a launch is that of one machine. Another host may need twice as long, so what
        # the device waits for the host counts again.
        band=band + terms.get(HOST_PACE, 0.0) / sum(terms.values()),
    )


class _RankTime(NamedTuple):
    """The time of a pipeline rank.

    stages, whole: the mean time of a micro-batch in each of its stages, and in all of them.
    update: the seconds after the last backward, by term.
    """

    stages: Sequence[StageTime]
    whole: StageTime
    update: Mapping[str, float]


def _rank_times(run: TimedRun, embeddings: Group, num_microbatches: int) -> list[_RankTime]:
    """Returns the times of all pipeline ranks.

    The first forwards of each window of those in flight may keep everything.
    embeddings: the ranks that share a tied embedding.
    """
    config = run.config
    p = config.parallel.pipeline_model_parallel_size
    num_kept = config.recompute.num_microbatches_with_partial_activation_checkpoints or 0

    @cache
    def passage(stage: Stage, kept: float) -> StageTime:
        """Returns the mean time of a micro-batch. kept: the share that keeps everything."""
        return StageTime.of(
            (stage_time(run, stage, stage_plan(config, stage, keeps_all)), share)
            for keeps_all, share in ((False, 1.0 - kept), (True, kept))
            if share
        )

    @cache
    def of_rank(stages: tuple[Stage, ...], kept: float) -> _RankTime:
        passages = [passage(stage, kept) for stage in stages]
        whole = StageTime.of((one, 1.0) for one in passages)
        return _RankTime(passages, whole, _update(run, stages, embeddings, whole))

    # Of alike stages the first one stands for all.
    first: dict[tuple[int, ...], Stage] = {}
    named = any(rule.stage is not None for rule in config.recompute.policy.rules)
    stages = tuple(
        first.setdefault(
            (
                *(one.is_first, one.is_last, one.num_layers, one.number * named),
                first_like_stage(config, one),
            ),
            one,
        )
        for one in config.stages()
    )
    return [
        of_rank(stages[rank::p], min(1.0, num_kept / config.most_in_flight(num_microbatches, rank)))
        for rank in range(p)
    ]


def _update(
    run: TimedRun, stages: tuple[Stage, ...], embeddings: Group, microbatch: StageTime
) -> dict[str, float]:
    """Returns the seconds of a pipeline rank after its last backward, by term, and of what delays
    its next forward.

    The terms are the part of the reduction of gradients that backward does not hide, the optimizer
    on the device, the optimizer on the host with the copies that nothing hides, and the part of the
    gathers of updated weights that the next forward does not hide.
    stages: the stages of the rank.
    embeddings: the ranks that share a tied embedding.
    microbatch: the time of one micro-batch in all of them.
    """
    forward, backward = (half.seconds for half in microbatch)
    config, clock, settings = run.config, run.clock, run.config.optimizer
    options, element, hardware = config.data_parallel, clock.element_bytes, clock.hardware
    bucket = options.bucket_size(run.data_parallel.size) or math.inf
    narrow = options.grad_reduce_in_bf16 or settings.main_grads_dtype == "bf16"
    sent = 2 if narrow else FLOAT32
    reduction = hardware.collective_seconds(_tied_gradient(config, stages), embeddings)
    gather, own = 0.0, 0.0
    for parameters, ranks in _parameters_by_group(run, stages):
        shares, replicas = run.shares(ranks)
        own += parameters / shares.size
        if options.use_torch_fsdp2 and shares.size > 1:
            continue
        buckets = max(1, math.ceil(parameters / bucket))
        summed = Collective(ALL_REDUCE, sent * parameters // shares.size)
        reduce = hardware.collective_seconds(Collective(REDUCE_SCATTER, sent * parameters), shares)
        reduce += hardware.collective_seconds(summed, replicas)
        reduction += clock.exposed(reduce, backward, buckets)
        parts = buckets if options.overlap_param_gather else 1
        seconds = hardware.collective_seconds(Collective(ALL_GATHER, element * parameters), shares)
        gather += clock.exposed(seconds, forward, parts)
    written = element if element < FLOAT32 else 0
    moved = UPDATE_BYTES + 2 * sum(settings.state_bytes(of_matrix=False)) + written
    hosted = settings.optimizer_offload_fraction * settings.optimizer_cpu_offload * own
    update = hardware.memory_seconds(moved * (own - hosted))
    parts = sum(stage.num_layers for stage in stages)
    if run.data_parallel.size > 1:
        parts = math.ceil(own / bucket)
    on_host = _on_host(settings, clock, hosted, max(1, parts), backward)
    if settings.optimizer == MUON:
        update += _muon(run, stages)
    return {REDUCTION: reduction, OPTIMIZER: update, HOST_UPDATE: on_host, WEIGHT_GATHERS: gather}


def _on_host(
    settings: OptimizerConfig, clock: Clock, hosted: float, parts: int, backward: float
) -> float:
    """Returns the time of the update of `hosted` parameters on the host, with the copies that
    nothing hides.

    parts: those in which gradients become final during the last backward.
    """
    grad, element = FORMATS[settings.main_grads_dtype], clock.element_bytes
    hardware = clock.hardware
    # Read the gradient, read and write main weight and states, write the weight.
    moved = grad + 2 * (FLOAT32 + sum(settings.state_bytes(of_matrix=False))) + element
    out, back = (num_bytes * hosted / hardware.host_bandwidth for num_bytes in (grad, element))
    if not settings.overlap_cpu_optimizer_d2h_h2d:
        return out + moved * hosted / hardware.host_memory_bandwidth + back
    moved += 2 * grad  # clip it there
    update = moved * hosted / hardware.host_memory_bandwidth
    return clock.exposed(out, backward, parts) + max(update, back)


def _parameters_by_group(run: TimedRun, stages: Sequence[Stage]) -> list[tuple[int, Group]]:
    """Returns how many parameters of a rank each group of ranks has the same of."""
    parallel = run.config.parallel
    groups: dict[bool | None, Group] = {None: run.data_parallel}
    if parallel.spreads_experts:
        unit = parallel.expert_model_parallel_size * parallel.expert_tensor_parallel
        copies = run.data_parallel.size * parallel.tensor_model_parallel_size // unit
        groups = {False: run.data_parallel, True: Group(copies, unit)}
    return [
        (sum(stage_parameters(run.config, stage, of_experts) for stage in stages), ranks)
        for of_experts, ranks in groups.items()
    ]


def _tied_gradient(config: RunConfig, stages: Sequence[Stage]) -> Collective:
    """Returns the all-reduce of a tied embedding's gradient, empty on ranks without one."""
    model, tp_size = config.model, config.parallel.tensor_model_parallel_size
    tied = not model.untie_embeddings_and_output_weights
    holds = any(stage.is_first or stage.is_last for stage in stages)
    rows = config.tokenizer.rows(tp_size) // tp_size
    return Collective(ALL_REDUCE, FLOAT32 * rows * model.hidden_size * (tied and holds))


def _muon(run: TimedRun, stages: Sequence[Stage]) -> float:
    """Returns the seconds that Muon adds to the update of a rank.

    Ranks that share out the parameters gather every matrix and share out the work, and in the mode
    "duplicated" each tensor-parallel rank works on whole matrices. The three parts of linear_qkv
    count as one.
    """
    clock, options = run.clock, run.config.optimizer
    element = FLOAT32 if options.muon_fp32_matmul_prec == "high" else 2
    t = clock.tp.size if options.muon_tp_mode == "duplicated" else 1
    seconds, elements, number = 0.0, 0, 0
    for stage in stages:
        sizes = Sizes.of(run.config, clock.hardware.device, stage)
        for layer, count in describe_kinds(sizes, stage.num_layers):
            for operation in layer.operations:
                for parameter in operation.parameters:
                    if parameter.is_matrix:
                        rows, columns = parameter.shape
                        if operation.name in ROW_PARALLEL:
                            columns *= t
                        else:
                            rows *= t
                        seconds += count * _newton_schulz_step(clock, rows, columns, element)
                        elements += count * rows * columns
                        number += count
    # A rank also works on the matrices in which its share begins and ends.
    shares, _ = run.shares(run.data_parallel)
    share = min(1.0, 1 / shares.size + 1 / max(number, 1))
    beside = clock.hardware.memory_seconds(MUON_BYTES * elements)
    return (options.muon_num_ns_steps * seconds + beside) * share + sum(
        clock.hardware.collective_seconds(Collective(ALL_GATHER, num_bytes), group)
        for num_bytes, group in ((FLOAT32 * elements, shares), (element * elements, Group(t)))
        if num_bytes
    )


def _newton_schulz_step(clock: Clock, rows: int, columns: int, element_bytes: int) -> float:
    """Returns the seconds of X X^T, its square, and the product with X (optim/muon_update.py).

    The square and the product are added to a matrix of their size.
    """
    short, long = sorted((rows, columns))
    products = ((short, short, long), (short, short, short), (short, long, short))
    return clock.hardware.memory_seconds(element_bytes * short * (short + long)) + sum(
        clock.hardware.matmul_seconds(Matmul("", *shape), element_bytes) for shape in products
    )
