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
    measured = [rank.measured for rank in ranks]
    peaks = [one.peak for one in measured]

    def amounts(label: str, numbers: Sequence[int]) -> tuple[str, ...]:
        return label, *map(unit.number, numbers)

    def in_bytes(label: str, numbers: Sequence[int]) -> tuple[str, ...]:
        return label, *(f"{number:,}" for number in numbers)

    empty = [""] * len(ranks)
    rows: list[Sequence[str]] = [
        (f"in {unit.name}", *(f"rank {rank.rank}" for rank in ranks)),
        ("pipeline rank", *(str(rank.pp_rank) for rank in ranks)),
        ("held between steps", *empty),
    ]
    for kind in HELD:
        rows.append(amounts(f"  {LABELS.get(kind, kind)}", [one.held[kind] for one in measured]))
    differences = [rank.held_bytes - rank.states.total for rank in ranks]
    rows += [
        in_bytes("  without other, bytes", [rank.held_bytes for rank in ranks]),
        in_bytes("  closed form, bytes", [rank.states.total for rank in ranks]),
        ("  difference", *(f"{one:+,}" for one in differences)),
        ("alive at the peak", *empty),
    ]
    for kind in (*HELD, *PHASES, HOST):
        alive = [one.by_category.get(kind, 0) for one in peaks]
        if any(alive):
            rows.append(amounts(f"  {LABELS.get(kind, kind)}", alive))
    shares = [rank.peak_difference / rank.measured.peak.num_bytes for rank in ranks]
    rows += [
        amounts("  peak", [one.num_bytes for one in peaks]),
        in_bytes("  peak, bytes", [one.num_bytes for one in peaks]),
        in_bytes("  closed form, bytes", [rank.predicted_peak for rank in ranks]),
        ("  difference", *(f"{share:+.2%}" for share in shares)),
    ]
    for label, numbers in (
        ("  rounding and cuBLAS", [rank.beside_tensors for rank in ranks]),
        ("host memory, at most", [one.host_bytes for one in measured]),
    ):
        if any(numbers):
            rows.append(amounts(label, numbers))
    return table(rows, 100)


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
