"""Measures the memory of a step of any rank of any run, without its machine: `--dry-run-memory`.

The real model, recompute engine, schedule and optimizer run one step. Under torch's FakeTensorMode
every tensor has a shape and a storage of some size, but no memory, and no operator computes. The
rank's collectives are simulated (memory/measure/step_meter.py). The step meter counts the storages.

The closed form (memory/predict/) adds up what the description of the operations says. This way
shares nothing with it but the configuration, so each is a check of the other.

Its report is a text of at most 100 columns.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.config.checks import InputError
from megatron_lite.config.policy import Layers, Policy
from megatron_lite.config.run import RunConfig
from megatron_lite.config.run_flags import paragraph
from megatron_lite.config.stages import most_in_flight
from megatron_lite.config.units import ByteUnit, plural, size
from megatron_lite.description.sizes import Sizes, layers_of
from megatron_lite.memory.explain.report_text import table
from megatron_lite.memory.measure.step_meter import (
    FORWARD,
    HELD,
    HOST,
    MASTERS,
    OTHER,
    PHASES,
    STATES,
    SimulatedTensors,
    StepMeter,
    StepPeakMeasured,
    simulated_rank,
)
from megatron_lite.memory.predict.kept_tensors import activation_terms
from megatron_lite.memory.predict.pipeline_memory import enough_microbatches, step_microbatches
from megatron_lite.memory.predict.states import RankStates, update_memory
from megatron_lite.memory.predict.step_peak import StepPeak
from megatron_lite.parallel.state import ParallelState
from megatron_lite.recompute.schedule import stage_plan

from .batches import Batches, DocumentRules, MicroBatch, cut, document_rules, masked_mean
from .build_trainer import build_runner
from .observe import held_tensors, own_states, own_step_peak
from .step import train_step


class MeasuredStep(NamedTuple):
    """The memory of one optimizer step of one rank, in bytes.

    held: the bytes between two steps, by category (memory/measure/step_meter.py). Under FSDP2 the
        gradients are those at the end of the step.
    host_bytes: the most bytes in host memory.
    num_microbatches: the micro-batches of the step.
    """

    held: dict[str, int]
    peak: StepPeakMeasured
    host_bytes: int
    num_microbatches: int


class StepSize(NamedTuple):
    """A step to measure.

    config: the run, with the step's layers and policy.
    num_microbatches: its micro-batches.
    pipeline_size: the length of the pipeline in whose order they run.
    """

    config: RunConfig
    num_microbatches: int
    pipeline_size: int


class DryRank(NamedTuple):
    """The dry run of one rank.

    pp_rank: its pipeline rank.
    num_microbatches: the micro-batches of a step of the run. The dry run may have had fewer, since
        from some number on more of them do not change the peak.
    is_derived: whether the figures come from smaller steps.
    states: the closed form of the bytes between two steps.
    predicted: the closed form of the peak. Besides tensors it counts the memory that torch
        allocates inside its operators.
    seconds: how long the dry run took.
    """

    rank: int
    world_size: int
    pp_rank: int
    num_microbatches: int
    measured: MeasuredStep
    is_derived: bool
    states: RankStates
    predicted: StepPeak
    seconds: float


def dry_run(
    config: RunConfig,
    rank: int,
    *,
    world_size: int,
    device: str = "cpu",
    num_microbatches: int | None = None,
    in_full: bool = False,
    told: Callable[[str], None] = lambda line: None,
) -> DryRank:
    """Returns the memory of a step of global rank `rank` of `world_size` ranks.

    The vocabulary size must be known. The process must not be in any process group.
    device: "cpu" or "cuda". The operators are those of a CPU on both. Host memory counts in the
        peak on a CPU only.
    num_microbatches: the micro-batches to run; None: as many as reach the peak of a step.
    in_full: whether to run all of its layers and micro-batches. Otherwise the peak comes from
        smaller steps where it can.
    told: called with a line before each step that runs.
    Raises InputError for a setting that a run without values cannot follow.
    """
    reason = None
    if config.compiles_layers:
        reason = "--activation-memory-budget: what a compiled layer keeps is not known"
    elif config.recompute.recompute_verify:
        reason = "--recompute-verify: a dry run has no values"
    if reason:
        raise InputError(f"--dry-run-memory cannot follow {reason}. Leave it out")
    compiles = config.uses_compiler(device)  # that of the run, not of this machine
    config = config.with_fields({"torch_compile": compiles})
    began, fake = time.perf_counter(), SimulatedTensors()
    # The samples are made outside of the mode. The meter does not count them, nor does it count
    # those that a real run reads from its data.
    samples = fake.from_tensor(torch.zeros(sample_shape(config), dtype=torch.int64))
    with simulated_rank(config.parallel, fake, rank=rank, world_size=world_size) as parallel:
        place = replace(parallel, device=torch.device(device))  # that of the run
        most = step_microbatches(config, parallel.dp_size)

        def measure(step: StepSize) -> MeasuredStep:
            told(
                f"dry run of rank {rank}: a step of a model of {step.config.model.num_layers} "
                f"layers with {step.num_microbatches} micro-batches"
            )
            batches = SameTokens(samples, step.num_microbatches, parallel, document_rules(config))
            ordered = replace(parallel, pp_size=step.pipeline_size)
            try:
                with fake:
                    return measure_step(step.config, ordered, batches, host_apart=device != "cpu")
            except RuntimeError as error:
                if "overflow" not in str(error):
                    raise
                raise InputError(  # a size beyond 64 bits
                    f"no tensor can have these sizes ({str(error).splitlines()[0]}): give smaller "
                    "sizes, or more ranks"
                ) from error

        number = num_microbatches or enough_microbatches(config, place.pp_rank, most)
        whole, measured = StepSize(config, number, parallel.pp_size), None
        if num_microbatches is None and not in_full:
            measured = measured_from_smaller(whole, place, measure)
        is_derived = measured is not None
        measured = measured or measure(whole)
    return DryRank(
        rank=rank,
        world_size=world_size,
        pp_rank=place.pp_rank,
        num_microbatches=most,
        measured=measured,
        is_derived=is_derived,
        states=own_states(config, place),
        predicted=own_step_peak(config, place),
        seconds=time.perf_counter() - began,
    )


def sample_shape(config: RunConfig) -> tuple[int, int]:
    """Returns the shape of a micro-batch's samples: [b, s + 1] token ids."""
    return config.training.micro_batch_size, config.data.seq_length + 1


@dataclass(frozen=True)
class SameTokens:
    """The micro-batches of a step that all have the same samples.

    samples: [b, s + 1] token ids. rules: what the ends of documents mean; None: nothing.
    """

    samples: Tensor
    num_microbatches: int
    parallel: ParallelState
    rules: DocumentRules | None = None

    def __len__(self) -> int:
        return self.num_microbatches

    def __getitem__(self, number: int, /) -> MicroBatch:
        size, length = self.samples.shape[0], self.samples.shape[1] - 1
        one_each = range(0, size * length + 1, length)  # the documents that need the most memory
        return cut(
            self.samples,
            cp_rank=self.parallel.cp_rank,
            cp_size=self.parallel.cp_size,
            rules=self.rules,
            bounds=one_each,
        )


def measure_step(
    config: RunConfig, parallel: ParallelState, batches: Batches, *, host_apart: bool
) -> MeasuredStep:
    """Builds the rank's model and optimizer, runs one step and returns its memory.

    It is for real and simulated ranks. A real rank issues the collectives of a step.
    host_apart: whether host memory for offloaded tensors is no part of the peak.
    """
    with StepMeter(host_apart=host_apart) as meter:
        runner, optimizer, _ = build_runner(config, parallel)
        runner.timed = meter.part
        for category, tensors in held_tensors(runner.model, optimizer):
            meter.assign(category, tensors)
        with meter.step(runner.model):
            masked = None
            if config.data.eod_mask_loss:  # the counts do not change the memory
                masked = masked_mean([1] * len(batches), parallel, per_token=False)
            train_step(runner, optimizer, batches, learning_rate=1e-6, masked=masked)
        optimizer.finish()
        # The gradients of FSDP2 and the rotary tables are made in the step, and outlive it.
        for category, tensors in held_tensors(runner.model, optimizer):
            meter.assign(category, tensors)
        return MeasuredStep(
            held=meter.held(),
            peak=meter.peak,
            host_bytes=meter.host_peak_bytes,
            num_microbatches=len(batches),
        )


# The memory of a step, derived from one with fewer alike layers and fewer micro-batches in flight.
#
#     base         at most three repetitions of a row of alike segments, and two micro-batches
#     neighbours   one repetition more of each row, and one micro-batch more
#
# One repetition or micro-batch more adds at least nothing and at most its states and the tensors
# that it keeps, which the closed form knows to the byte. If each neighbour holds exactly this much
# more than the base, the fullest moment is one that holds all of it. It then stays the fullest for
# every larger size, and the peak of the whole step is that of the base plus the closed form of the
# rest. Otherwise the step runs in full. So do steps whose update may hold more than that, and steps
# with virtual stages or with an arena of saved inputs.

REPEATS, IN_FLIGHT = 3, 2


def measured_from_smaller(
    whole: StepSize, place: ParallelState, measure: Callable[[StepSize], MeasuredStep]
) -> MeasuredStep | None:
    """Returns the memory of a step, measured on smaller ones, or None if it must run in full.

    place: the place of the rank, on the device of the run. measure: measures a step.
    """
    base, neighbours = _smaller(whole, place.pp_rank)
    if not neighbours:
        return None
    small, (known, _) = measure(base), _exact(base, place)
    on_host = 0 if place.device.type == "cpu" else 1

    def in_peak(more: Counter[str]) -> int:
        return more.total() - on_host * more[HOST]

    counters = 0  # of AdamW's steps, one number for each parameter
    for other, times in neighbours:
        found, (more, _) = measure(other), _exact(other, place)
        more.subtract(known)
        more[OTHER] = found.held[OTHER] - small.held[OTHER]
        counters += times * more[OTHER]
        is_linear = found.peak.num_bytes - small.peak.num_bytes == in_peak(more)
        if not is_linear or found.host_bytes - small.host_bytes != more[HOST]:
            return None
    rest, update_bytes = _exact(whole, place)
    rest.subtract(known)
    # The update's temporaries can grow faster with the number of layers than what a backward holds.
    if update_bytes > small.peak.num_bytes + in_peak(rest) - rest[HOST]:
        return None
    rest[OTHER] = counters
    categories = {kind: size + rest[kind] for kind, size in small.peak.by_category.items()}
    return MeasuredStep(
        held={kind: size + rest[kind] for kind, size in small.held.items()},
        peak=small.peak._replace(num_bytes=sum(categories.values()), by_category=categories),
        host_bytes=small.host_bytes + rest[HOST],
        num_microbatches=small.num_microbatches,
    )


def _exact(step: StepSize, place: ParallelState) -> tuple[Counter[str], int]:
    """Returns what the closed form knows of a step.

    They are the bytes of the states, the kept tensors and those in host memory, by category; and
    the most bytes that the rank holds after the last backward.
    """
    config, states = step.config, own_states(step.config, place)
    (stage,) = stages = config.stages_of_rank(place.pp_rank)
    update = update_memory(config, stages, states, dp_cp_size=place.dp_cp_size, device="cpu")
    found = Counter({**dict(zip(STATES, states[:4], strict=True)), HOST: states.on_host})
    waiting = most_in_flight(
        size=step.pipeline_size, rank=place.pp_rank, num_microbatches=step.num_microbatches
    )
    plan = stage_plan(config, stage)
    for term in activation_terms(plan, Sizes.of(config, device="cpu", stage=stage)):
        if not term.tensor.shared:
            found[HOST if term.on_host else FORWARD] += waiting * term.num_bytes
    return found, states.total + states.on_host + update.num_bytes


def _smaller(whole: StepSize, rank: int) -> tuple[StepSize, list[tuple[StepSize, int]]]:
    """Returns the base and its neighbours; no neighbour if nothing can be left out.

    rank: the pipeline rank.
    The number beside a neighbour tells how many times what it adds lies between the base and the
    whole.
    """
    config = whole.config
    recompute, all_stages = config.recompute, config.stages()
    stage, *others = config.stages_of_rank(rank)
    partial = recompute.num_microbatches_with_partial_activation_checkpoints is not None
    if others or partial or recompute.contiguous_saved_activations:
        return whole, []
    segments = stage_plan(config, stage).segments
    rows = [list(row) for _, row in groupby(segments, lambda one: replace(one, first_layer=0))]
    # Layers can be left out if all are alike, and all stages equally long.
    alike = len({*layers_of(config)}) == len({one.num_layers for one in all_stages}) == 1
    long_rows = [number for number, row in enumerate(rows) if alike and len(row) > REPEATS]
    in_flight = most_in_flight(
        size=whole.pipeline_size, rank=rank, num_microbatches=whole.num_microbatches
    )
    steady = min(whole.num_microbatches - in_flight, 2)

    def step(longer: int | None = None, waiting: int = IN_FLIGHT) -> StepSize:
        """Returns the step with REPEATS segments of each row, and `waiting` forwards in flight.

        longer: the number of the row of which it has one segment more.
        """
        found, rules, layers = whole, [], 0
        for number, row in enumerate(rows):
            for one in row[: REPEATS + (number == longer)]:
                rule = recompute.policy.rule_of(one.first_layer, stage.number)
                own = Layers(layers, layers + one.num_layers - 1)
                rules.append(replace(rule, layers=(own,), stage=None))
                layers += one.num_layers
        if long_rows:
            smaller = replace(
                config,
                model=replace(config.model, num_layers=layers * len(all_stages)),
                recompute=recompute.instead(recompute_policy=str(Policy(tuple(rules)))),
            )
            found = found._replace(config=smaller)
        if in_flight > IN_FLIGHT + 1:
            found = found._replace(num_microbatches=waiting + steady, pipeline_size=rank + waiting)
        return found

    neighbours = [(step(longer=number), len(rows[number]) - REPEATS) for number in long_rows]
    if in_flight > IN_FLIGHT + 1:
        neighbours.append((step(waiting=IN_FLIGHT + 1), in_flight - IN_FLIGHT))
    return step(), neighbours


RANKS_ABREAST = 4
LABELS = {MASTERS: "main weights", HOST: "offloaded, host memory"} | {
    phase: f"made in {phase}" for phase in PHASES
}


def dry_run_text(config: RunConfig, ranks: Sequence[DryRank], *, device: str) -> str:
    """Returns the report on some ranks of one world.

    device: the device on which the run would train.
    """
    parallel, world_size = config.parallel, ranks[0].world_size
    lines = [
        "Dry run of one optimizer step: the memory of a rank, counted on tensors without values",
        f"{plural(world_size, 'rank')}: tensor-parallel {parallel.tensor_model_parallel_size}, "
        f"context-parallel {parallel.context_parallel_size}, pipeline-parallel "
        f"{parallel.pipeline_model_parallel_size}, data-parallel "
        f"{parallel.data_parallel_size(world_size)}; on cpu",
    ]
    if device != "cpu":
        lines += [
            f"The run would use {device}. This torch cannot run kernels of {device} on tensors "
            "without values, so the operators are those of a CPU. The kernels of the run may keep "
            "or allocate other tensors."
        ]
        if config.model.builds_scores("cpu") and not config.model.builds_scores(device):
            dropout = config.model.attention_dropout
            lines += [
                f"WARNING: with --attention-dropout {dropout} a CPU builds and keeps the scores of "
                f"attention, and {device} does not: these figures are too high. Add "
                "--attention-dropout 0 here."
            ]
    lines = [paragraph(line) for line in lines]
    for first in range(0, len(ranks), RANKS_ABREAST):
        abreast = ranks[first : first + RANKS_ABREAST]
        unit = ByteUnit.of(max(rank.measured.peak.num_bytes for rank in abreast))
        rows = zip(*(_column(rank, unit) for rank in abreast), strict=True)
        lines += ["", *table([(row[0][0], *(value for _, value in row)) for row in rows], 100)]
    lines += ["", "The moment of the peak:"]
    for rank in ranks:
        peak, moment = rank.measured.peak, rank.measured.peak.moment
        where = f" of {moment.module}" if moment.module else ""
        run, all_of_them, more = rank.measured.num_microbatches, rank.num_microbatches, ""
        if rank.is_derived:
            more = f" of {all_of_them}, at most 4 layers of a kind; the rest by its exact bytes"
        elif run < all_of_them:
            more = f" of {all_of_them} (each of the others adds at most its loss, 4 bytes)"
        lines += [
            f"  rank {rank.rank}, {size(peak.num_bytes)}: {moment.phase}{where}, {moment.operator}",
            f"    {plural(run, 'micro-batch', 'micro-batches')}{more}, in {rank.seconds:.0f} s",
        ]
    return "\n".join(lines)


def _column(rank: DryRank, unit: ByteUnit) -> Iterator[tuple[str, str]]:
    """Yields the names and the figures of one rank."""
    measured, peak, states = rank.measured, rank.measured.peak, rank.states.total
    yield f"in {unit.name}", f"rank {rank.rank}"
    yield "pipeline rank", str(rank.pp_rank)
    yield "held between steps", ""
    for kind in HELD:
        yield f"  {LABELS.get(kind, kind)}", unit.number(measured.held[kind])
    held_bytes = sum(measured.held[kind] for kind in STATES)  # the four kinds that `states` has
    yield "  without other, bytes", f"{held_bytes:,}"
    yield "  closed form, bytes", f"{states:,}"
    yield "  difference", f"{held_bytes - states:+,}"
    yield "alive at the peak", ""
    for kind in (*HELD, *PHASES, HOST):
        yield f"  {LABELS.get(kind, kind)}", unit.number(peak.by_category.get(kind, 0))
    yield "  peak", unit.number(peak.num_bytes)
    yield "  peak, bytes", f"{peak.num_bytes:,}"
    yield "  closed form, bytes", f"{rank.predicted.num_bytes:,}"
    yield "  difference", f"{1 - rank.predicted.num_bytes / peak.num_bytes:+.2%}"
    yield "  rounding and cuBLAS", unit.number(rank.predicted.beside_tensors)
    yield "host memory, at most", unit.number(measured.host_bytes)
