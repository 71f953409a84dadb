"""The report of `--explain-recompute` as text of at most 100 columns, or of 80."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from megatron_lite.config.units import count, percent, size
from megatron_lite.memory.explain.layer_text import layer_lines, shared_tensors
from megatron_lite.memory.explain.prices import Priced, flags_of
from megatron_lite.memory.explain.recompute_report import Report
from megatron_lite.memory.explain.report_lines import (
    WIDTH,
    Lines,
    column_unit,
    group_name,
    layers_name,
    segment_name,
)
from megatron_lite.memory.predict.parameter_counts import parameter_count, rank_parameter_count
from megatron_lite.memory.predict.step_peak import band
from megatron_lite.recompute.schedule import policy_by_stage

MOST_RANKS = 8
NAME_COLUMNS = 45  # of a row of the alternatives
LOGGED = "logged as activation_bytes_predicted"
NO_RECOMPUTATION = "without recomputation"


def report_text(report: Report, width: int = WIDTH) -> str:
    """Returns all sections of the report, with an empty line between two of them.

    width: the most columns of a line, at least 80. Tables have fewer columns below 100.
    """
    lines = Lines(width)
    sections = (
        _head(report, lines),
        layer_lines(report, lines),
        _totals(report, lines),
        _pipeline(report, lines),
        _paper(report, lines),
        _policies(report, lines),
        _notes(report, lines),
    )
    return "\n\n".join("\n".join(part) for part in map(list, sections) if part)


def _head(report: Report, lines: Lines) -> Iterator[str]:
    config, sizes = report.config, report.sizes
    model = config.model
    groups = f" (g {model.query_groups})" if model.group_query_attention else ""
    unseen = sizes.device == "cpu" and config.parallel.distributed_backend == "auto"
    where = (
        f"pipeline rank {report.rank}, which holds most of {len(report.ranks)}"
        if report.ranks
        else "one rank"
    )
    yield from lines.wrapped(f"Activation recomputation, of one micro-batch on {where}", indent="")
    yield ""
    yield from lines.field(
        "model",
        f"GPT of {model.num_layers} layers: h {model.hidden_size}, f {model.ffn_size}, "
        f"a {model.num_attention_heads}{groups}, s {sizes.seq_length}, b {sizes.micro_batch_size}, "
        f"V {sizes.padded_vocab_size}, {config.training.precision}",
    )
    sequence = ", sequence-parallel" if sizes.sequence_parallel else ""
    context = (
        f", context-parallel {sizes.cp_size} ({sizes.cp_comm_type})" if sizes.cp_size > 1 else ""
    )
    pipeline = f", pipeline-parallel {len(report.ranks)}" if report.ranks else ""
    yield from lines.field(
        "ranks",
        f"tensor-parallel {sizes.tp_size}{sequence}{context}{pipeline}; on "
        f"{'CUDA' if sizes.device == 'cuda' else 'the CPU'}, with "
        f"{'unfused' if model.builds_scores(sizes.device) else 'flash'} attention"
        f"{' (GPU figures: --distributed-backend nccl)' if unseen else ''}",
    )
    holder = f"pipeline rank {report.rank}" if report.ranks else "each rank"
    on_rank = f"; {count(rank_parameter_count(config, report.rank))} on {holder}"
    yield from lines.field(
        "parameters",
        count(parameter_count(model, config.tokenizer.true_vocab_size))
        + (on_rank if sizes.tp_size * max(1, len(report.ranks)) > 1 else ""),
    )
    yield from lines.field("flags", flags_of(config.recompute) or "none that recompute")
    yield from lines.field("plan", policy_by_stage(config))


def _totals(report: Report, lines: Lines) -> Iterator[str]:
    own, without = report.own, report.without
    logits = [
        f"logits: {tensor.num_bytes:,}" for tensor in report.head.kept if tensor.name == "logits"
    ]
    rows = [("embedding", report.embedding.kept_bytes, "")] if report.sizes.has_embedding else []
    rows += [(name, num_bytes, "") for name, num_bytes in shared_tensors(report).items()]
    for group in report.layer_groups:
        rows.append(
            (
                textwrap.shorten(group_name(group), 24, placeholder=" .."),
                group.count * group.kept_bytes,
                f"{group.count} x {group.kept_bytes:,}" if group.count > 1 else "",
            )
        )
    rows += [("head", report.head.kept_bytes, "".join(logits))] if report.sizes.has_head else []
    rows += [("", 0, ""), ("kept in all", own.kept_bytes, "" if report.ranks else LOGGED)]
    if own.host_bytes:
        rows.append(("kept in host memory", own.host_bytes, "as activation_host_bytes_predicted"))
    if own.plan.segments != without.plan.segments:
        here = report.without_here.kept_bytes
        rows.append((NO_RECOMPUTATION, here, f"this run keeps {own.kept_bytes / here:.1%} of it"))
    when = _when(own)
    if report.ranks:
        in_flight = report.ranks[report.rank].in_flight
        when = f"with {in_flight} forward{'s' * (in_flight > 1)} in flight"
    rows += [("", 0, ""), ("held at the peak", own.peak.held_bytes, when)]
    if own.plan.segments != without.plan.segments:
        share = own.peak.held_bytes / without.peak.held_bytes
        on_other = f", on pipeline rank {without.rank}" if without.rank != own.rank else ""
        rows.append(
            (
                NO_RECOMPUTATION,
                without.peak.held_bytes,
                f"this run holds {share:.1%} of it{on_other}",
            )
        )
    unit = column_unit(number for _, number, _ in rows)
    yield f"{'Kept for backward':26}{unit.name:>14}{'bytes':>20}"
    for name, number, comment in rows:
        row = f"  {name:24}{unit.number(number):>14}{number:20,}" if name else ""
        yield from lines.with_comment(row, comment)
    yield ""
    yield from lines.wrapped(
        "Held at the peak is what is kept and what is rebuilt when backward is at its fullest. "
        "Gradients and short-lived buffers come on top: see the whole peak."
    )
    yield ""
    yield from _whole_rank(report, lines)


def _whole_rank(report: Report, lines: Lines) -> Iterator[str]:
    """Yields the lines of the whole peak of a step: everything that the rank holds then."""
    step = report.step
    total = step.num_bytes
    unit = column_unit(term.num_bytes for term in step.terms)
    # A narrow table leaves out the bytes: the names of the terms need their columns.
    name, own, exact = lines.either(48, 46), lines.either(12, 11), not lines.are_narrow
    yield (
        f"{'The whole peak of a step':{name + 2}}{unit.name:>{own}}"
        f"{'bytes' if exact else '':>{lines.either(20, 0)}}{'':8}how sure"
    )
    for term in step.terms:
        yield (
            f"  {textwrap.shorten(term.name, name - 1, placeholder=' ..'):{name}}"
            f"{unit.number(term.num_bytes):>{own}}{f'{term.num_bytes:20,}' if exact else ''}   "
            f"{term.num_bytes / total:5.1%}  {term.tag}"
        )
    ranks = report.dp_cp_size
    where = f" of pipeline rank {step.rank}" if report.ranks else ""
    where += f", on the first of {ranks} data-parallel ranks" if ranks > 1 else ""
    yield ""
    yield f"  {'together':{name}}{unit.number(total):>{own}}{f'{total:20,}' if exact else ''}"
    yield from lines.wrapped(
        f"Reached in the {step.moment}{where}. exact: to the byte. bound: it may be less. "
        f"estimate: the whole peak is {band(report.config, report.sizes.device)} that of a real "
        "step. The allocator's fragmentation comes on top."
    )
    sharding = report.config.data_parallel
    if ranks == 1 and (sharding.use_torch_fsdp2 or sharding.use_distributed_optimizer):
        yield ""
        yield from lines.wrapped(
            "There is one data-parallel rank here, so nothing is sharded. With WORLD_SIZE=N and "
            "RANK=0 in the environment the figures are those of N ranks."
        )


def _pipeline(report: Report, lines: Lines) -> Iterator[str]:
    if not report.ranks:
        return
    unit = column_unit(rank.peak_bytes for rank in report.ranks)
    rank_, layers_, each, flight, held, peak = (
        (14, 17, 12, 11, 12, 13) if lines.are_narrow else (16, 26, 14, 12, 14, 16)
    )
    yield (
        f"{'Pipeline rank':{rank_}}{'layers':{layers_}}{'kept ' + unit.name:>{each}}"
        f"{'in flight':>{flight}}{'they keep':>{held}}{'at the peak':>{peak}}"
    )
    shown = {
        rank
        for rank in range(len(report.ranks))
        if len(report.ranks) <= MOST_RANKS
        or rank == report.rank
        or min(rank, len(report.ranks) - 1 - rank) < MOST_RANKS // 2
    }
    for rank in report.ranks:
        if rank.rank not in shown:
            if rank.rank - 1 in shown:
                yield "  .."
            continue
        layers = ", ".join(
            f"{stage.first_layer}-{stage.first_layer + stage.num_layers - 1}"
            if stage.num_layers > 1
            else str(stage.first_layer)
            for stage in rank.stages
        )
        name = f"{'>' if rank.rank == report.rank else ' '} {rank.rank}"
        yield (
            f"{name:{rank_}}{textwrap.shorten(layers, layers_ - 1, placeholder=' ..'):{layers_}}"
            f"{unit.number(rank.kept_bytes):>{each}}{rank.in_flight:>{flight}}"
            f"{unit.number(rank.held_bytes):>{held}}{unit.number(rank.peak_bytes):>{peak}}"
        )
    number, given = report.num_microbatches, report.config.training.global_batch_size is not None
    steps = f"of the {number} micro-batch{'es' * (number > 1)} of a step"
    if not given and number > 1:
        steps = (
            f"with {number} micro-batches in a step, which fill the pipeline "
            "(--global-batch-size is not given)"
        )
    yield from lines.wrapped(
        "> is the rank that holds most. kept: of a step's first micro-batch, in all stages of the "
        f"rank; the most of any rank is {LOGGED}. in flight: forwards that wait for their backward "
        f"at once, each of one stage, {steps}."
    )


def _paper(report: Report, lines: Lines) -> Iterator[str]:
    unit = column_unit(row.in_paper_bytes for row in report.comparisons)
    yield "A layer or unit, beside the formulas of arXiv 2205.05198"
    name_, its, here, rest = (20, 10, 16, 8) if lines.are_narrow else (31, 12, 17, 11)
    yield (
        f"  {'':{name_}}{'its formula':>24}{unit.name:>{its}}{'here, its terms':>{here}}"
        f"{'others':>{rest}}"
    )
    for row in report.comparisons:
        formula, value = (
            (row.paper.formula, unit.number(row.paper.num_bytes))
            if row.paper
            else ("no formula", "")
        )
        others = unit.number(sum(tensor.num_bytes for tensor in row.others))
        yield (
            f"  {_cut(segment_name(row.segment), name_):{name_}}{formula:>24}{value:>{its}}"
            f"{unit.number(row.in_paper_bytes):>{here}}{others:>{rest}}"
        )
    named = {
        tensor.name: f"{tensor.name} {unit.number(tensor.num_bytes)}"
        for row in report.comparisons
        for tensor in row.others
    }
    if named:
        yield from lines.wrapped(f"Others: {', '.join(named.values())}.")
    if report.unlike_the_paper:
        yield from lines.wrapped(f"Not as in the paper: {'; '.join(report.unlike_the_paper)}.")


def _policies(report: Report, lines: Lines) -> Iterator[str]:
    unit = column_unit(policy.whole_bytes for policy in report.policies)
    name_ = lines.either(NAME_COLUMNS, 37 if report.ranks else 44)
    each, whole, share, rank_ = (10, 12, 9, 9) if lines.are_narrow else (14, 14, 10, 10)
    on_rank = f"{'on rank':>{rank_}}" if report.ranks else ""
    yield (
        f"{'What the flags could do here':{name_ + 3}}{'kept ' + unit.name:>{each}}"
        f"{'whole peak':>{whole}}{'FLOPs':>{share}}{on_rank}"
    )
    for policy in report.policies:
        mark = ">" if policy.execution == report.own.execution else " "
        name = policy.name
        host = f", {size(policy.host_bytes)} to host" if policy.host_bytes else ""
        name = _cut(name + host if len(name + host) <= name_ else name, name_)
        rank = f"{policy.rank:>{rank_}}" if report.ranks else ""
        yield (
            f"{mark} {name:{name_ + 1}}{unit.number(policy.kept_bytes):>{each}}"
            f"{unit.number(policy.whole_bytes):>{whole}}"
            f"{percent(policy.added_flops):>{share}}{rank}"
        )
    tail = "" if report.own.plan.skip_tail else ", without the tail skip"
    holder = " on rank: the pipeline rank that would hold most; the bytes are its own."
    yield from lines.wrapped(
        "> is this run. whole peak: all that the fullest rank holds at once in a step. "
        f"FLOPs: on top of forward and backward{tail}. full METHOD N: "
        "--recompute-granularity full --recompute-method METHOD --recompute-num-layers N; "
        "distributed: --distribute-saved-activations. selective MODULES: --recompute-granularity "
        "selective --recompute-modules MODULES. policy TEXT: --recompute-policy TEXT; with @host a "
        "micro-batch's kept tensors wait in host memory. auto SIZE: --recompute-policy auto "
        "--memory-budget SIZE, which may choose a policy for each stage."
        f"{holder if report.ranks else ''}"
    )


def _notes(report: Report, lines: Lines) -> Iterator[str]:
    if report.notes:
        yield f"Notes, on pipeline rank {report.rank}" if report.ranks else "Notes"
    for note in report.notes:
        yield from lines.wrapped(note.text, first="- ")


def _cut(text: str, width: int) -> str:
    """Returns the text, or its beginning if it is longer than `width` characters."""
    return text if len(text) <= width else f"{text[: width - 2]}.."


def _when(priced: Priced) -> str:
    first, last, _ = priced.peak
    if first is None or last is None:
        return "when the forward ends"
    segment = next(segment for segment in priced.plan.segments if segment.first_layer == first)
    name = layers_name(range(first, last + 1))
    if not (segment.unit or segment.regions or segment.ops):
        return f"when {name} has come back"
    return f"when {name} {'is' if first == last else 'are'} rebuilt"
