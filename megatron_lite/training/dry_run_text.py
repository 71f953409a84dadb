"""The report of `--dry-run-memory` as text of at most 100 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_lite.config.parser import paragraph
from megatron_lite.config.run import RunConfig
from megatron_lite.config.units import ByteUnit, plural, size
from megatron_lite.memory.explain.report_text import table
from megatron_lite.memory.measure.step_meter import HELD, HOST, MASTERS, PHASES
from megatron_lite.training.dry_run import DryRank

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
        lines += ["", *_table(ranks[first : first + RANKS_ABREAST])]
    lines += ["", "The moment of the peak:"]
    for rank in ranks:
        lines += _moment(rank)
    return "\n".join(lines)


def _table(ranks: Sequence[DryRank]) -> list[str]:
    unit = ByteUnit.of(max(rank.measured.peak.num_bytes for rank in ranks))
    columns = [[*_column(rank, unit)] for rank in ranks]
    rows: list[Sequence[str]] = [
        (cells[0][0], *(value for _, value in cells)) for cells in zip(*columns, strict=True)
    ]
    return table(rows, 100)


def _column(rank: DryRank, unit: ByteUnit) -> Iterator[tuple[str, str]]:
    """Yields the names and the figures of one rank."""
    measured, peak, states = rank.measured, rank.measured.peak, rank.states.total
    yield f"in {unit.name}", f"rank {rank.rank}"
    yield "pipeline rank", str(rank.pp_rank)
    yield "held between steps", ""
    for kind in HELD:
        yield f"  {LABELS.get(kind, kind)}", unit.number(measured.held[kind])
    yield "  without other, bytes", f"{rank.held_bytes:,}"
    yield "  closed form, bytes", f"{states:,}"
    yield "  difference", f"{rank.held_bytes - states:+,}"
    yield "alive at the peak", ""
    for kind in (*HELD, *PHASES, HOST):
        yield f"  {LABELS.get(kind, kind)}", unit.number(peak.by_category.get(kind, 0))
    yield "  peak", unit.number(peak.num_bytes)
    yield "  peak, bytes", f"{peak.num_bytes:,}"
    yield "  closed form, bytes", f"{rank.predicted_peak:,}"
    yield "  difference", f"{rank.peak_difference / peak.num_bytes:+.2%}"
    yield "  rounding and cuBLAS", unit.number(rank.beside_tensors)
    yield "host memory, at most", unit.number(measured.host_bytes)


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
