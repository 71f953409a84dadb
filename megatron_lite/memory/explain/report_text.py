"""The report of `--explain-recompute` as text of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from megatron_lite.config.host_parts import parts_of
from megatron_lite.description.operations import Collective, KeptTensor
from megatron_lite.memory.explain.prices import Priced, flags_of, region_names
from megatron_lite.memory.explain.report import LayerRun, Report, ReportPart
from megatron_lite.memory.explain.units import GIB, ByteUnit, count, flops, percent, size
from megatron_lite.memory.predict.parameters import parameter_count, rank_parameter_count
from megatron_lite.memory.predict.traffic import Traffic
from megatron_lite.recompute.plan import Segment
from megatron_lite.recompute.schedule import policy_by_stage

WIDTH = 100
NAMED_TENSORS = 4
MOST_RANKS = 8
NAME_COLUMNS = 45  # of a row of the alternatives
LOGGED = "logged as activation_bytes_predicted"
NO_RECOMPUTATION = "without recomputation"


def report_text(report: Report) -> str:
    """Returns all sections of the report, with an empty line between two of them."""
    sections = (
        _head(report),
        _layers(report),
        _totals(report),
        _pipeline(report),
        _paper(report),
        _policies(report),
        _notes(report),
    )
    return "\n\n".join("\n".join(lines) for lines in map(list, sections) if lines)


def _head(report: Report) -> Iterator[str]:
    config, sizes = report.config, report.sizes
    model = config.model
    groups = f" (g {model.query_groups})" if model.group_query_attention else ""
    unseen = sizes.device == "cpu" and config.parallel.distributed_backend == "auto"
    where = (
        f"pipeline rank {report.rank}, which holds most of {len(report.ranks)}"
        if report.ranks
        else "one rank"
    )
    yield f"Activation recomputation, of one micro-batch on {where}"
    yield ""
    yield from _field(
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
    yield from _field(
        "ranks",
        f"tensor-parallel {sizes.tp_size}{sequence}{context}{pipeline}; on "
        f"{'CUDA' if sizes.device == 'cuda' else 'the CPU'}, with "
        f"{'unfused' if model.builds_scores(sizes.device) else 'flash'} attention"
        f"{' (GPU figures: --distributed-backend nccl)' if unseen else ''}",
    )
    holder = f"pipeline rank {report.rank}" if report.ranks else "each rank"
    on_rank = f"; {count(rank_parameter_count(config, report.rank))} on {holder}"
    yield from _field(
        "parameters",
        count(parameter_count(model, config.tokenizer.true_vocab_size))
        + (on_rank if sizes.tp_size * max(1, len(report.ranks)) > 1 else ""),
    )
    yield from _field("flags", flags_of(config.recompute) or "none that recompute")
    yield from _field("plan", policy_by_stage(config))


def _layers(report: Report) -> Iterator[str]:
    yield "Layer by layer" + (" (numbers count from 0 within a stage)" if report.ranks else "")
    if report.sizes.has_embedding:
        yield from _part("embedding", report.embedding)
    if report.rotary_tables.kept:
        names = " and ".join(_shared(report))
        yield from _part(f"{names}, which all layers share", report.rotary_tables)
    for run in report.runs:
        yield from _run(run, report)
    if report.sizes.has_head:
        yield from _part("head: final norm, logits, loss", report.head)


def _shared(report: Report) -> dict[str, int]:
    """Returns the bytes of the tensors that all layers share, by name.

    Each virtual stage of a rank has tensors of its own.
    """
    found: Counter[str] = Counter()
    for one in report.rotary_tables.kept:
        found[one.name] += one.num_bytes
    return dict(sorted(found.items(), reverse=True))


def _part(name: str, part: ReportPart) -> Iterator[str]:
    yield f"  {name}"
    yield from _field("keeps", _kept(part.kept))
    yield from _traffic(part.traffic)


def _run(run: LayerRun, report: Report) -> Iterator[str]:
    split = f", 1/{report.sizes.tp_size} of it on each rank" if run.segment.split else ""
    each = "unit" if run.segment.num_layers > 1 else "layer"
    peculiarity = f" ({run.peculiarity})" if run.peculiarity else ""
    yield from textwrap.wrap(
        f"{_run_name(run)}{peculiarity}: {_treatment(run)}{split}",
        WIDTH,
        initial_indent="  ",
        subsequent_indent="    ",
        break_on_hyphens=False,
    )
    yield from _field(
        "keeps", _kept(run.kept, each=f" a {each}: ") if run.kept else "nothing on the device"
    )
    if run.moved:
        yield from _field("on the host", _kept(run.moved, each=f" a {each}: "))
    if run.rebuilt:
        names = "all of it" if run.segment.unit else ", ".join(run.rebuilt)
        left_out = f"; {run.left_out} left out" if run.left_out else ""
        share = percent(run.count * run.replay_flops / report.own.model_flops)
        yield from _field(
            "runs again",
            f"{flops(run.replay_flops)} a {each}: {names}{left_out}"
            if run.replay_flops
            else f"no matmul: {names}",
        )
        if run.replay_flops:
            together = f", all such {each}s together" if run.count > 1 else ""
            of_all = " of all pipeline ranks" if report.ranks else ""
            yield from _field("", f"{share} of forward and backward{of_all}{together}")
    yield from _traffic(run.traffic)


def _traffic(traffic: Traffic) -> Iterator[str]:
    phases = (
        ("forward", traffic.forward),
        ("backward", traffic.backward),
        ("replay", traffic.replay),
    )
    sent = [f"{phase:10}{_sent(collectives)}" for phase, collectives in phases if collectives]
    for number, text in enumerate(sent):
        yield from _field("" if number else "sends", text)


def _treatment(run: LayerRun) -> str:
    segment = run.segment
    if segment.unit:
        units = (
            f"{run.count} unit{'s' * (run.count > 1)} of {segment.num_layers} "
            f"layer{'s' * (segment.num_layers > 1)}"
        )
        return f"{units}; only the input of {'each' if run.count > 1 else 'it'} is kept"
    if segment.ops:
        named = textwrap.shorten(", ".join(segment.ops), 45, placeholder=" ...")
        return f"results of {named} kept, all else rebuilt in backward"
    if segment.regions:
        return f"{', '.join(region_names(segment.regions))} rebuilt in backward"
    return "everything is kept"


def _totals(report: Report) -> Iterator[str]:
    own, without = report.own, report.without
    logits = [
        f"logits: {tensor.num_bytes:,}" for tensor in report.head.kept if tensor.name == "logits"
    ]
    rows = [("embedding", report.embedding.kept_bytes, "")] if report.sizes.has_embedding else []
    rows += [(name, num_bytes, "") for name, num_bytes in _shared(report).items()]
    for run in report.runs:
        rows.append(
            (
                _run_name(run),
                run.count * run.kept_bytes,
                f"{run.count} x {run.kept_bytes:,}" if run.count > 1 else "",
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
    unit = _column_unit(number for _, number, _ in rows)
    yield f"{'Kept for backward':26}{unit.name:>14}{'bytes':>20}"
    for name, number, comment in rows:
        yield (
            f"  {name:24}{unit.number(number):>14}{number:20,}   {comment}".rstrip() if name else ""
        )
    yield ""
    yield from _text(
        "Held at the peak is what is kept and what is rebuilt when backward is at its fullest. "
        "Gradients and short-lived buffers come on top: see the whole peak."
    )
    yield ""
    yield from _whole_rank(report)


def _whole_rank(report: Report) -> Iterator[str]:
    """Yields the lines of the whole peak of a step: everything that the rank holds then."""
    step = report.step
    total = step.num_bytes
    unit = _column_unit(term.num_bytes for term in step.terms)
    yield f"{'The whole peak of a step':50}{unit.name:>12}{'bytes':>20}{'':8}how sure"
    for term in step.terms:
        yield (
            f"  {textwrap.shorten(term.name, 47, placeholder=' ..'):48}"
            f"{unit.number(term.num_bytes):>12}{term.num_bytes:20,}   "
            f"{term.num_bytes / total:5.1%}  {term.tag}"
        )
    ranks = report.dp_cp_size
    where = f", on the first of {ranks} data-parallel ranks" if ranks > 1 else ""
    yield ""
    yield f"  {'together':48}{unit.number(total):>12}{total:20,}"
    yield from _text(
        f"Reached in the {step.moment}{where}. exact: to the byte. bound: it may be less. "
        "estimate: it depends on kernels or on how fast the ranks are. What the allocator holds "
        "beside tensors comes on top."
    )
    sharding = report.config.data_parallel
    if ranks == 1 and (sharding.use_torch_fsdp2 or sharding.use_distributed_optimizer):
        yield ""
        yield from _text(
            "There is one data-parallel rank here, so nothing is sharded. With WORLD_SIZE=N and "
            "RANK=0 in the environment the figures are those of N ranks."
        )


def _pipeline(report: Report) -> Iterator[str]:
    if not report.ranks:
        return
    unit = _column_unit(rank.peak_bytes for rank in report.ranks)
    yield (
        f"{'Pipeline rank':16}{'layers':26}{'kept ' + unit.name:>14}"
        f"{'in flight':>12}{'they keep':>14}{'at the peak':>16}"
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
            f"{name:16}{textwrap.shorten(layers, 25, placeholder=' ..'):26}"
            f"{unit.number(rank.kept_bytes):>14}{rank.in_flight:>12}"
            f"{unit.number(rank.held_bytes):>14}{unit.number(rank.peak_bytes):>16}"
        )
    number, given = report.num_microbatches, report.config.training.global_batch_size is not None
    steps = f"of the {number} micro-batch{'es' * (number > 1)} of a step"
    if not given and number > 1:
        steps = (
            f"with {number} micro-batches in a step, which fill the pipeline "
            "(--global-batch-size is not given)"
        )
    yield from _text(
        "> is the rank that holds most. kept: of a step's first micro-batch, in all stages of the "
        f"rank; the most of any rank is {LOGGED}. in flight: forwards that wait for their backward "
        f"at once, each of one stage, {steps}."
    )


def _paper(report: Report) -> Iterator[str]:
    unit = _column_unit(row.in_paper_bytes for row in report.comparisons)
    yield "A layer or unit, beside the formulas of arXiv 2205.05198"
    yield f"  {'':31}{'its formula':>24}{unit.name:>12}{'here, its terms':>17}{'others':>11}"
    for row in report.comparisons:
        formula, value = (
            (row.paper.formula, unit.number(row.paper.num_bytes))
            if row.paper
            else ("no formula", "")
        )
        others = unit.number(sum(tensor.num_bytes for tensor in row.others))
        yield (
            f"  {_segment_name(row.segment):31}{formula:>24}{value:>12}"
            f"{unit.number(row.in_paper_bytes):>17}{others:>11}"
        )
    named = {
        tensor.name: f"{tensor.name} {unit.number(tensor.num_bytes)}"
        for row in report.comparisons
        for tensor in row.others
    }
    if named:
        yield from _text(f"Others: {', '.join(named.values())}.")
    if report.unlike_the_paper:
        yield from _text(f"Not as in the paper: {'; '.join(report.unlike_the_paper)}.")


def _policies(report: Report) -> Iterator[str]:
    unit = _column_unit(policy.whole_bytes for policy in report.policies)
    on_rank = f"{'on rank':>10}" if report.ranks else ""
    yield (
        f"{'What the flags could do here':48}{'kept ' + unit.name:>14}"
        f"{'whole peak':>14}{'FLOPs':>10}{on_rank}"
    )
    for policy in report.policies:
        mark = ">" if policy.execution == report.own.execution else " "
        name = policy.name
        host = f", {size(policy.host_bytes)} to host" if policy.host_bytes else ""
        if len(name + host) <= NAME_COLUMNS:
            name += host
        rank = f"{policy.rank:>10}" if report.ranks else ""
        yield (
            f"{mark} {name:{NAME_COLUMNS + 1}}{unit.number(policy.kept_bytes):>14}"
            f"{unit.number(policy.whole_bytes):>14}{percent(policy.added_flops):>10}{rank}"
        )
    tail = "" if report.own.plan.skip_tail else ", without the tail skip"
    holder = " on rank: the pipeline rank that would hold most, of which the bytes are."
    yield from _text(
        "> is this run. whole peak: all that the fullest rank holds at once in a step. "
        f"FLOPs: on top of forward and backward{tail}. full METHOD N: "
        "--recompute-granularity full --recompute-method METHOD --recompute-num-layers N; "
        "distributed: --distribute-saved-activations. selective MODULES: --recompute-granularity "
        "selective --recompute-modules MODULES. policy TEXT: --recompute-policy TEXT; with @host a "
        "micro-batch's kept tensors wait in host memory. auto SIZE: --recompute-policy auto "
        "--memory-budget SIZE, which may choose a policy for each stage."
        f"{holder if report.ranks else ''}"
    )


def _notes(report: Report) -> Iterator[str]:
    if report.notes:
        yield f"Notes, on pipeline rank {report.rank}" if report.ranks else "Notes"
    for note in report.notes:
        yield from textwrap.wrap(
            note.text, WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False
        )


def _column_unit(numbers: Iterable[int]) -> ByteUnit:
    """Returns one unit for all numbers of a column, so that they can be compared."""
    return ByteUnit.of(max(numbers), gib_from=10 * GIB)


def _field(name: str, text: str) -> Iterator[str]:
    indent = "    "
    yield from textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"{indent}{name:12}",
        subsequent_indent=indent + 12 * " ",
        break_on_hyphens=False,
    )


def _text(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def _kept(tensors: Sequence[KeptTensor], each: str = ": ") -> str:
    """Returns the total, and the largest tensors by name."""
    named, rest = tensors[:NAMED_TENSORS], tensors[NAMED_TENSORS:]
    total = sum(tensor.num_bytes for tensor in tensors)
    unit = ByteUnit.of(total)
    parts = [f"{tensor.name} {unit.number(tensor.num_bytes)}" for tensor in named]
    if rest:
        parts.append(
            f"+ {len(rest)} smaller {unit.number(sum(tensor.num_bytes for tensor in rest))}"
        )
    return f"{unit.number(total)} {unit.name}{each}{', '.join(parts)}"


def _sent(collectives: Sequence[Collective]) -> str:
    counts = Counter(collectives)
    return ", ".join(
        f"{number} {kind} of {size(num_bytes)}" for (kind, num_bytes), number in counts.items()
    )


def _when(priced: Priced) -> str:
    first, last, _ = priced.peak
    if first is None or last is None:
        return "when the forward ends"
    segment = next(segment for segment in priced.plan.segments if segment.first_layer == first)
    if not (segment.unit or segment.regions or segment.ops):
        return f"when {_layers_name(first, last)} has come back"
    return f"when {_layers_name(first, last)} {'is' if first == last else 'are'} rebuilt"


def _run_name(run: LayerRun) -> str:
    stage = "" if run.stage is None else f"stage {run.stage} "
    return stage + _layers_name(run.segment.first_layer, run.last_layer)


def _layers_name(first: int, last: int) -> str:
    return f"layer {first}" if first == last else f"layers {first}-{last}"


def _segment_name(segment: Segment) -> str:
    if segment.host_modules:
        return f"{', '.join(parts_of(segment.store))} on host"
    if segment.on_host:
        return (
            f"{_segment_name(replace(segment, store='split' if segment.split else 'device'))}, host"
        )
    if segment.unit:
        return "unit, split" if segment.split else "unit"
    if segment.ops:
        return textwrap.shorten(str(segment.action).replace(",", ", "), 31, placeholder=" ...")
    return "+".join(region_names(segment.regions)) or "everything kept"
