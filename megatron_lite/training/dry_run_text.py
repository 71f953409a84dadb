"""The report of `--dry-run-memory` as text of at most 100 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from megatron_lite.config.parser import paragraph
from megatron_lite.config.run import RunConfig
from megatron_lite.config.units import ByteUnit, plural, size
from megatron_lite.memory.measure.step_meter import (
    BACKWARD,
    FORWARD,
    GRADIENTS,
    HOST,
    MASTERS,
    OPTIMIZER,
    OTHER,
    REPLAY,
    UPDATE,
    WEIGHTS,
)
from megatron_lite.training.dry_run import DryRank

LABEL_WIDTH, WIDTH, RANKS_ABREAST = 28, 18, 4
LABELS = {
    WEIGHTS: "weights",
    MASTERS: "main weights",
    GRADIENTS: "gradients",
    OPTIMIZER: "optimizer",
    OTHER: "other",
    FORWARD: "made in forward",
    REPLAY: "made in replays",
    BACKWARD: "made in backward",
    UPDATE: "made in the update",
    HOST: "offloaded, host memory",
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
        lines += ["", *_table(ranks[first : first + RANKS_ABREAST])]
    lines += ["", "The moment of the peak:"]
    for rank in ranks:
        lines += _moment(rank)
    return "\n".join(lines)


def _table(ranks: Sequence[DryRank]) -> Iterator[str]:
    unit = ByteUnit.of(max(rank.measured.peak.num_bytes for rank in ranks))

    def row(label: str, cell: Callable[[DryRank], str]) -> str:
        return label.ljust(LABEL_WIDTH) + "".join(cell(rank).rjust(WIDTH) for rank in ranks)

    def amounts(label: str, figure: Callable[[DryRank], int]) -> str:
        return row(label, lambda rank: unit.number(figure(rank)))

    def in_bytes(label: str, figure: Callable[[DryRank], int]) -> str:
        return row(label, lambda rank: f"{figure(rank):,}")

    yield row(f"in {unit.name}", lambda rank: f"rank {rank.rank}")
    yield row("pipeline rank", lambda rank: str(rank.pp_rank))
    yield "held between steps"
    for kind in (WEIGHTS, MASTERS, GRADIENTS, OPTIMIZER, OTHER):
        yield amounts(f"  {LABELS[kind]}", partial(_held, kind))
    yield in_bytes("  without other, bytes", lambda rank: rank.held_bytes)
    yield in_bytes("  closed form, bytes", lambda rank: rank.states.total)
    yield row("  difference", lambda rank: f"{rank.held_bytes - rank.states.total:+,}")
    yield "alive at the peak"
    for kind, label in LABELS.items():
        if any(_alive(kind, rank) for rank in ranks):
            yield amounts(f"  {label}", partial(_alive, kind))
    yield amounts("  peak", lambda rank: rank.measured.peak.num_bytes)
    yield in_bytes("  peak, bytes", lambda rank: rank.measured.peak.num_bytes)
    yield in_bytes("  closed form, bytes", lambda rank: rank.predicted_peak)
    yield row(
        "  difference", lambda rank: f"{rank.peak_difference / rank.measured.peak.num_bytes:+.2%}"
    )
    if any(rank.beside_tensors for rank in ranks):
        yield amounts("  rounding and cuBLAS", lambda rank: rank.beside_tensors)
    if any(rank.measured.host_bytes for rank in ranks):
        yield amounts("host memory, at most", lambda rank: rank.measured.host_bytes)


def _held(kind: str, rank: DryRank) -> int:
    return rank.measured.held[kind]


def _alive(kind: str, rank: DryRank) -> int:
    return rank.measured.peak.by_category.get(kind, 0)


def _moment(rank: DryRank) -> Iterator[str]:
    peak, moment = rank.measured.peak, rank.measured.peak.moment
    where = f" of {moment.module}" if moment.module else ""
    yield f"  rank {rank.rank}, {size(peak.num_bytes)}: {moment.phase}{where}, {moment.operator}"
    run, all_of_them = rank.measured.num_microbatches, rank.num_microbatches
    more = ""
    if rank.is_derived:
        more = f" of {all_of_them}, at most 4 layers of a kind; the rest by its exact bytes"
    elif run < all_of_them:
        more = f" of {all_of_them} (each of the others adds at most its loss, 4 bytes)"
    batches = plural(run, "micro-batch", "micro-batches")
    yield f"    {batches}{more}, in {rank.seconds:.0f} s"
