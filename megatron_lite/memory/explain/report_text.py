"""The report of `--explain-recompute` as text of at most 100 columns, or of 80."""

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from megatron_lite.config.units import ByteUnit, count, flops, percent, plural, size
from megatron_lite.description.operations import KeptTensor
from megatron_lite.memory.predict.states import parameter_count, rank_parameter_count
from megatron_lite.memory.predict.step_peak import band

from .recompute_report import Report, flags_of

WIDTH = 100
NAMED_TENSORS = 4


def report_text(
    report: Report, width: int = WIDTH, seconds: Sequence[float] = (), machine: str = ""
) -> str:
    """Returns all sections of the report, with an empty line between two of them.

    width: the most columns of a line, at least 80.
    seconds: those of a step with each of the report's policies, if a time model was asked.
    machine: that of the seconds, and their error, in words.
    """
    sections = [_head(report), _layer_by_layer(report), _kept(report), _step(report)]
    sections += [_pipeline(report)] * (len(report.ranks) > 1)
    sections += [_policies(report, seconds, machine), _notes(report)]
    texts = ["\n".join(line for part in one for line in _lines(part, width)) for one in sections]
    return "\n\n".join(filter(None, texts))


# A paragraph, with the indent of its lines after the first one; or the rows of a table.
Block = tuple[str, int] | list[Sequence[str]]


def _lines(block: Block, width: int) -> list[str]:
    if isinstance(block, list):
        return table(block, width)
    text, indent = block
    return textwrap.wrap(text, width, subsequent_indent=indent * " ", break_on_hyphens=False)


def table(rows: list[Sequence[str]], width: int) -> list[str]:
    """Returns rows of cells as lines. The first column is to the left, and cut if too wide."""
    others = [max(map(len, column)) for column in list(zip(*rows, strict=True))[1:]]
    first = min(max(len(row[0]) for row in rows), width - sum(others) - 3 * len(others))
    return [
        "   ".join(
            [
                (name if len(name) <= first else f"{name[: first - 2]}..").ljust(first),
                *(cell.rjust(columns) for cell, columns in zip(cells, others, strict=True)),
            ]
        ).rstrip()
        for name, *cells in rows
    ]


def _head(report: Report) -> Iterator[Block]:
    config, sizes, model = report.config, report.sizes, report.config.model
    ranks, rank = len(report.ranks), report.own.step.rank
    where = f"pipeline rank {rank}, the fullest of {ranks}" if ranks > 1 else "one rank"
    groups = f" (g {model.query_groups})" if model.group_query_attention else ""
    layout = [f"tensor-parallel {sizes.tp_size}"]
    layout += ["sequence-parallel"] * sizes.sequence_parallel
    if sizes.cp_size > 1:
        ways = ", ".join(sorted(config.parallel.exchanges))
        layout.append(f"context-parallel {sizes.cp_size} ({ways})")
    if sizes.ep_size > 1:
        times = sizes.expert_imbalance
        rows = "a balance of rows" if times == 1.0 else f"{times:g} times the rows of a balance"
        layout.append(f"expert-parallel {sizes.ep_size} ({rows})")
    layout += [f"pipeline-parallel {ranks}"] * (ranks > 1)
    attention = "unfused" if model.builds_scores(sizes.device) else "flash"
    device = "CUDA" if sizes.device == "cuda" else "the CPU"
    unseen = sizes.device == "cpu" and config.parallel.distributed_backend == "auto"
    on_rank = f"; {count(rank_parameter_count(config, rank))} on this rank"
    yield f"Activation recomputation, of one micro-batch on {where}", 0
    facts = {
        "model": (
            f"GPT of {model.num_layers} layers: h {model.hidden_size}, f {model.ffn_size}, "
            f"a {model.num_attention_heads}{groups}, s {sizes.seq_length}, "
            f"b {sizes.micro_batch_size}, V {sizes.padded_vocab_size}, {config.training.precision}"
        ),
        "ranks": (
            f"{', '.join(layout)}; on {device}, with {attention} attention"
            f"{' (GPU figures: --distributed-backend nccl)' if unseen else ''}"
        ),
        "parameters": (
            count(parameter_count(model, config.tokenizer.true_vocab_size))
            + (on_rank if sizes.tp_size * ranks > 1 else "")
        ),
        "flags": flags_of(config) or "none that recompute",
        "plan": str(config.recompute.policy),
    }
    for name, text in facts.items():
        yield f"    {name:12}{text}", 16


def _layer_by_layer(report: Report) -> Iterator[Block]:
    counted = " (numbers count from 0 within a stage)" if len(report.ranks) > 1 else ""
    yield f"Layer by layer{counted}", 0
    for part in report.parts:
        number = f" ({plural(part.count * part.num_layers, 'layer')})" if part.num_layers else ""
        yield f"  {part.name}{number}{': ' if part.treatment else ''}{part.treatment}", 4
        each = f" a {'unit' if part.num_layers > 1 else 'layer'}" if part.num_layers else ""
        facts = [("keeps", _tensors(part.kept, each))]
        if part.moved:
            facts.append(("on the host", _tensors(part.moved, each)))
        if part.replayed:
            again = sum(number for _, number in part.replayed)
            whole = part.count * report.sizes.num_ranks * again
            share = percent(whole / report.own.flops.model)
            names = ", ".join(name for name, _ in part.replayed)
            facts.append(("runs again", f"{flops(again)}{each}: {names}; {share} in all"))
        for phase, collectives in zip(part.traffic._fields, part.traffic, strict=True):
            if sent := Counter(collectives):
                calls = [
                    f"{times} {one.kind} of {size(one.num_bytes)}" for one, times in sent.items()
                ]
                facts.append((f"in {phase}", ", ".join(calls)))
        for name, text in facts:
            yield f"    {name:12}{text}", 16


def _tensors(tensors: Sequence[KeptTensor], each: str) -> str:
    """Returns the total, and the largest tensors by name."""
    if not tensors:
        return "nothing on the device"
    unit = ByteUnit.of(sum(one.num_bytes for one in tensors))
    named = [f"{one.name} {unit.number(one.num_bytes)}" for one in tensors[:NAMED_TENSORS]]
    if rest := tensors[NAMED_TENSORS:]:
        smaller = unit.number(sum(one.num_bytes for one in rest))
        named.append(f"+ {len(rest)} smaller {smaller}")
    return f"{size(sum(one.num_bytes for one in tensors))}{each}: {', '.join(named)}"


def _kept(report: Report) -> Iterator[Block]:
    own = report.own
    rows = [(part.name, part.count, part.count * part.kept_bytes) for part in report.parts]
    rows.append(("kept in all", 1, own.memory.kept_bytes))
    if own.host_bytes:
        rows.append(("kept in host memory", 1, own.host_bytes))
    in_flight = f", {plural(own.memory.in_flight, 'forward')} in flight"
    rows.append((f"held at the fullest moment{in_flight}", 1, own.memory.peak_bytes))
    unit = ByteUnit.of(max(number for *_, number in rows))
    yield [
        ("Kept for backward", "times", unit.name, "bytes"),
        *(
            (f"  {name}", str(times) if times > 1 else "", unit.number(number), f"{number:,}")
            for name, times, number in rows
        ),
    ]


def _step(report: Report) -> Iterator[Block]:
    """Yields the whole peak of a step: everything that the rank holds then."""
    step, total = report.own.step, report.own.step.num_bytes
    unit = ByteUnit.of(total)
    yield [
        ("The whole peak of a step", unit.name, "bytes", "share", "how sure"),
        *(
            (
                f"  {term.name}",
                unit.number(term.num_bytes),
                f"{term.num_bytes:,}",
                f"{term.num_bytes / total:.1%}",
                term.tag,
            )
            for term in step.terms
        ),
        ("  together", unit.number(total), f"{total:,}", "", ""),
    ]
    where = f" of pipeline rank {step.rank}" if len(report.ranks) > 1 else ""
    if report.dp_cp_size > 1:
        where += f", on the first of {report.dp_cp_size} data-parallel ranks"
    yield (
        f"  Reached in the {step.moment}{where}. exact: to the byte, as the allocator counts it. "
        "bound: it may be less. estimate: the whole peak is "
        f"{band(report.config, report.sizes.device)} that of a real step. The "
        "allocator's fragmentation comes on top.",
        2,
    )
    if report.dp_cp_size == 1 and report.config.data_parallel.shares_out:
        yield (
            "  There is one data-parallel rank here, so nothing is sharded. With WORLD_SIZE=N and "
            "RANK=0 in the environment the figures are those of N ranks.",
            2,
        )


def _pipeline(report: Report) -> Iterator[Block]:
    unit = ByteUnit.of(max(rank.peak_bytes for rank in report.ranks))
    rows: list[Sequence[str]] = [
        ("Pipeline rank", "layers", f"kept {unit.name}", "in flight", "they keep", "at most")
    ]
    for number, rank in enumerate(report.ranks):
        spans = (
            f"{one.first_layer}-{one.first_layer + one.num_layers - 1}" if one.num_layers else "-"
            for one in rank.stages
        )
        layers = textwrap.shorten(", ".join(spans), 24, placeholder=" ..")
        kept, held, peak = map(unit.number, (rank.kept_bytes, rank.held_bytes, rank.peak_bytes))
        mark = ">" if number == report.own.step.rank else " "
        rows.append((f"{mark} {number}", layers, kept, str(rank.in_flight), held, peak))
    yield rows
    number = report.num_microbatches
    yield (
        "  > is the rank that holds most. kept: of a step's first micro-batch, in all stages of "
        "the rank. in flight: forwards that wait for their backward at once, each of one stage, of "
        f"{plural(number, 'micro-batch', 'micro-batches')} in a step. at most: what they keep and "
        "what a replay rebuilds.",
        2,
    )


def _policies(report: Report, seconds: Sequence[float], machine: str) -> Iterator[Block]:
    unit = ByteUnit.of(max(one.step.num_bytes for one in report.policies))
    several = len(report.ranks) > 1
    heading = ["What the flags could do here", f"kept {unit.name}", "whole peak", "FLOPs"]
    rows = [heading + ["step s"] * bool(seconds) + ["on rank"] * several]
    for one, time in zip_longest(report.policies, seconds):
        mark = ">" if one is report.own else " "
        host = f", {size(one.host_bytes)} to host" if one.host_bytes else ""
        row = [f"{mark} {one.name}{host}", unit.number(one.memory.kept_bytes)]
        row += [unit.number(one.step.num_bytes), percent(one.flops.added)]
        row += [] if time is None else [f"{time:.4g}"]
        rows.append(row + [str(one.step.rank)] * several)
    yield [*rows]
    tail = "" if report.own.plan.skip_tail else ", without the tail skip"
    yield (
        "  > is this run. whole peak: all that the fullest rank holds at once in a step. FLOPs: on "
        f"top of forward and backward{tail}. "
        + f"step s: an estimate for {machine}. "
        * bool(seconds)
        + "full: --recompute-granularity full with the method "
        "and the layers of a unit; distributed: --distribute-saved-activations. selective: "
        "--recompute-modules. policy: --recompute-policy.",
        2,
    )


def _notes(report: Report) -> Iterator[Block]:
    if report.notes:
        yield "Notes", 0
    for note in report.notes:
        yield f"- {note}", 2
