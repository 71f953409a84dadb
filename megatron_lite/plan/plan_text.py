"""A verdict as text of at most 100 columns, and as JSON. Standard library only."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_lite.config.invocation import shell_lines
from megatron_lite.config.run import RunConfig
from megatron_lite.config.run_flags import flags_of
from megatron_lite.config.stages import stages
from megatron_lite.memory.predict.flops import hardware_flops, step_flops
from megatron_lite.memory.predict.step_peak import StepPeak
from megatron_lite.plan.fit_verdict import DOES_NOT_FIT, FITS, FitVerdict
from megatron_lite.plan.hardware import Hardware
from megatron_lite.plan.layouts import kind_of
from megatron_lite.plan.neighbours import Neighbour
from megatron_lite.plan.search import Plan
from megatron_lite.recompute.recompute_plan import keep_everything
from megatron_lite.recompute.schedule import plan_model

GIB = 2**30
WIDTH = 100
PROGRAM = ("-m", "megatron_lite", "train")
STATES = ("weights", "main weights", "gradients", "optimizer states")
LEGEND = (
    "t p c d: tensor-, pipeline-, context- and data-parallel ranks; v: virtual stages; b: "
    "micro-batch; chunk: --loss-chunk-size; extra: FLOPs that recomputation adds"
)
HEADER = (
    f"{'':2}{'t':>3}{'p':>4}{'v':>3}{'c':>3}{'d':>5}  {'states':<10}{'b':>4}{'chunk':>6}"
    f"{'peak GiB':>9}{'free':>6}{'extra':>7}{'step s':>9}{'MFU':>6}"
)


def extra_flops(config: RunConfig, device: str) -> float:
    """Returns the FLOPs that recomputation and loss chunks add, over those of the model."""
    parallel = config.parallel
    tp_size = parallel.tensor_model_parallel_size
    vocab = config.tokenizer.padded_vocab_size(tp_size)
    shape: dict[str, Any] = dict(
        batch=1, seq_length=config.data.seq_length, padded_vocab_size=vocab
    )
    ranks: dict[str, Any] = dict(
        tp_size=tp_size, cp_size=parallel.context_parallel_size, device=device
    )
    own = hardware_flops(
        config.model,
        plan_model(config),
        loss_chunk_size=config.loss_chunk_size,
        loss_in_one_pass=config.loss_in_one_pass,
        **shape,
        **ranks,
    )
    whole = hardware_flops(config.model, keep_everything(config.model.num_layers), **shape, **ranks)
    return (own - whole) / step_flops(config.model, **shape)


def command(config: RunConfig, hardware: Hardware, num_ranks: int) -> list[str]:
    """Returns the words of the command that runs a configuration, in any directory."""
    per_node = num_ranks
    if num_ranks > hardware.ranks_per_node:  # torchrun starts equally many ranks on each node
        per_node = math.gcd(num_ranks, hardware.ranks_per_node)
    nodes = num_ranks // per_node
    words = ["torchrun", "--nproc-per-node", str(per_node)]
    if nodes > 1:
        words += ["--nnodes", str(nodes), "--node-rank", "$NODE_RANK"]
        words += ["--master-addr", "$MASTER_ADDR"]
    return [*words, *PROGRAM, *flags_of(config)]


def lines(one: FitVerdict, hardware: Hardware, width: int = WIDTH) -> Iterator[str]:
    """Yields the lines of a verdict.

    width: the most columns of a line, at least 80. Below 100 the policy of a plan has its own line.
    """
    budget, plan = one.budget, one.plan
    found = f"{one.num_ranks} x {hardware.name}: {one.word}"
    yield from _wrapped(
        f"{found}   ({gib(budget.memory_bytes)} GiB, of which {gib(budget.reserve_bytes)} are a "
        f"reserve; {one.found.num_layouts:,} layouts)",
        width,
    )
    if plan is None:
        return
    if one.word == DOES_NOT_FIT:
        yield from _infeasible(one, plan, hardware, width)
        return
    if one.word != FITS:
        yield f"The best plan takes {_into_reserve(one, plan)} GiB of the reserve."
    yield ""
    yield from _rows(one.found.plans, budget.memory_bytes, hardware, width)
    yield ""
    yield from _held(plan.peak, width)
    yield ""
    yield from _around(one, plan, width)
    yield ""
    yield from _command(plan, hardware, width)


def _infeasible(one: FitVerdict, plan: Plan, hardware: Hardware, width: int) -> Iterator[str]:
    lack = plan.peak.num_bytes - one.budget.plan_bytes
    yield from _wrapped(
        f"The smallest peak that was found is {gib(plan.peak.num_bytes)} GiB, which is {gib(lack)} "
        f"GiB more than the {gib(one.budget.plan_bytes)} GiB that a plan may take:",
        width,
    )
    yield ""
    yield from _rows([plan], one.budget.memory_bytes, hardware, width, numbered=False)
    yield ""
    yield from _held(plan.peak, width)
    states = sum(term.num_bytes for term in plan.peak.terms if term.name in STATES)
    if states > one.budget.plan_bytes:
        yield ""
        yield from _wrapped(
            f"Weights, gradients and optimizer states alone take {gib(states)} GiB, so no "
            "recompute policy, micro-batch or sequence length makes this layout fit.",
            width,
        )


def _into_reserve(one: FitVerdict, plan: Plan) -> str:
    return gib(plan.peak.num_bytes - one.budget.plan_bytes)


def _rows(
    plans: Sequence[Plan],
    memory_bytes: int,
    hardware: Hardware,
    width: int,
    *,
    numbered: bool = True,
) -> Iterator[str]:
    """Yields the table of plans and its legend."""
    beside = width >= WIDTH
    yield f"{HEADER}  policy" if beside else HEADER
    for number, plan in enumerate(plans, start=1):
        row = _row(f"{number}" if numbered else "", plan, memory_bytes, hardware)
        policy = str(plan.config.recompute.policy)
        if beside:
            yield f"{row}  {_cut(policy, WIDTH - len(row) - 2)}"
        else:
            yield row
            yield f"    policy {_cut(policy, width - 11)}"
    yield from _wrapped(LEGEND, width)


def _row(number: str, plan: Plan, memory_bytes: int, hardware: Hardware) -> str:
    config, parallel = plan.config, plan.config.parallel
    virtual = _virtual(config)
    chunk = config.loss_chunk_size
    free = (memory_bytes - plan.peak.num_bytes) / GIB
    kind = kind_of(config)
    return (
        f"{number:2}{parallel.tensor_model_parallel_size:>3}"
        f"{parallel.pipeline_model_parallel_size:>4}{virtual:>3}{parallel.context_parallel_size:>3}"
        f"{parallel.data_parallel_size(plan.num_ranks):>5}  {kind:<10}"
        f"{config.training.micro_batch_size:>4}{chunk or '-':>6}{gib(plan.peak.num_bytes):>9}"
        f"{_short(free):>6}{extra_flops(config, hardware.device):>7.1%}{plan.time.seconds:>9.2f}"
        f"{plan.time.mfu:>6.1%}"
    )


def _short(number: float) -> str:
    """Returns a number in at most five characters, if it lies between -9999 and 99999."""
    return f"{number:.1f}" if -100 < number < 1000 else f"{number:.0f}"


def _cut(text: str, width: int) -> str:
    """Returns the text, or its beginning if it is longer than `width` characters."""
    return text if len(text) <= width else text[: width - 2] + ".."


def _virtual(config: RunConfig) -> int:
    all_stages = stages(config.parallel, config.model.num_layers)
    return len(all_stages) // config.parallel.pipeline_model_parallel_size


def _held(peak: StepPeak, width: int) -> Iterator[str]:
    name = 60 if width >= WIDTH else 46
    yield from _wrapped(f"What holds the peak (pipeline rank {peak.rank}, {peak.moment}):", width)
    for term in sorted(peak.terms, key=lambda term: -term.num_bytes):
        if term.num_bytes:
            share = term.num_bytes / peak.num_bytes
            size = f"{gib(term.num_bytes):>9} GiB{share:>7.1%}"
            yield f"  {_cut(term.name, name):<{name}}{size}  {term.tag}"


def _around(one: FitVerdict, plan: Plan, width: int) -> Iterator[str]:
    if one.largest_micro_batch is not None:
        largest = one.largest_micro_batch
        yield (
            f"Largest micro-batch in this layout: {largest.config.training.micro_batch_size} "
            f"({gib(largest.peak.num_bytes)} GiB, {largest.time.seconds:.2f} s a step)"
        )
    if (larger := one.found.larger) is not None:
        lack = larger.peak.num_bytes - one.budget.plan_bytes
        yield from _wrapped(
            f"Next better plan: {_layout(larger)} without recomputation takes "
            f"{larger.time.seconds:.2f} s a step, and lacks {gib(lack)} GiB.",
            width,
        )
    if one.neighbours:
        yield "One step away, each with its own best policy:"
    for neighbour in one.neighbours:
        yield _step(neighbour, plan, 28 if width >= WIDTH else 23)


def _step(neighbour: Neighbour, plan: Plan, name: int) -> str:
    other, change = neighbour.plan, f"  {neighbour.change:<{name}}"
    if not neighbour.fits:
        return f"{change} does not fit: {gib(other.peak.num_bytes)} GiB at least"
    speed = other.time.tokens_per_second / plan.time.tokens_per_second - 1.0
    more = (other.peak.num_bytes - plan.peak.num_bytes) / GIB
    return (
        f"{change} {gib(other.peak.num_bytes):>7} GiB ({more:+.2f}), "
        f"{other.time.seconds:.2f} s a step, {speed:+.1%} tokens/s"
    )


def _layout(plan: Plan) -> str:
    config, parallel = plan.config, plan.config.parallel
    words = [
        f"t {parallel.tensor_model_parallel_size}, p {parallel.pipeline_model_parallel_size}",
        f"c {parallel.context_parallel_size}",
        kind_of(config),
        f"b {config.training.micro_batch_size}",
    ]
    if config.loss_chunk_size is not None:
        words.append(f"chunks of {config.loss_chunk_size}")
    return ", ".join(words)


def _command(plan: Plan, hardware: Hardware, width: int) -> Iterator[str]:
    yield "To run plan 1:"
    yield shell_lines(command(plan.config, hardware, plan.num_ranks))
    try:
        plan.config.check_complete_for_training()
    except ValueError as error:
        yield from _wrapped(f"({error})", width)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width)


def gib(num_bytes: float) -> str:
    """Returns a number of bytes in GiB with two digits."""
    return f"{num_bytes / GIB:.2f}"


def to_json(verdicts: Sequence[FitVerdict], hardware: Hardware) -> str:
    """Returns the verdicts as indented JSON. Bytes and seconds are numbers."""
    return json.dumps(
        {"machine": hardware.name, "verdicts": [_verdict(one, hardware) for one in verdicts]},
        indent=2,
    )


def _verdict(one: FitVerdict, hardware: Hardware) -> dict[str, Any]:
    larger, largest = one.found.larger, one.largest_micro_batch
    smallest = one.found.smallest
    return {
        "verdict": one.word,
        "num_gpus": one.num_ranks,
        "memory_bytes": one.budget.memory_bytes,
        "reserve_bytes": one.budget.reserve_bytes,
        "num_layouts": one.found.num_layouts,
        "plans": [_plan(plan, hardware) for plan in one.found.plans],
        "smallest": None if smallest is None else _plan(smallest, hardware),
        "next_better": None if larger is None else _plan(larger, hardware),
        "largest_micro_batch_size": (
            None if largest is None else largest.config.training.micro_batch_size
        ),
        "neighbours": [
            {
                "change": neighbour.change,
                "fits": neighbour.fits,
                "peak_bytes": neighbour.plan.peak.num_bytes,
                "step_seconds": neighbour.plan.time.seconds,
                "tokens_per_second": neighbour.plan.time.tokens_per_second,
            }
            for neighbour in one.neighbours
        ],
    }


def _plan(plan: Plan, hardware: Hardware) -> dict[str, Any]:
    return {
        "command": command(plan.config, hardware, plan.num_ranks),
        "config": json.loads(plan.config.to_json()),
        "layout": _layout(plan),
        "recompute_policy": str(plan.config.recompute.policy),
        "pipeline_rank": plan.peak.rank,
        "moment": plan.peak.moment,
        "peak_bytes": plan.peak.num_bytes,
        "peak_terms": [
            {"name": term.name, "bytes": term.num_bytes, "tag": term.tag}
            for term in plan.peak.terms
        ],
        "step_seconds": plan.time.seconds,
        "step_terms": dict(plan.time.terms),
        "tokens_per_second": plan.time.tokens_per_second,
        "mfu": plan.time.mfu,
        "extra_flops": extra_flops(plan.config, hardware.device),
    }
