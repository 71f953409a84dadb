"""The verdict on a run: does it fit, with which plan, and what would change it.

It is also here as plain data, which `--json` writes, and that data as text. Standard library only.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from megatron_lite.config.checks import InputError
from megatron_lite.config.invocation import shell_lines
from megatron_lite.config.plain import parse_json
from megatron_lite.config.run import RunConfig
from megatron_lite.config.run_flags import flags_of
from megatron_lite.config.stages import stages
from megatron_lite.memory.predict.flops import logits_flops, replay_flops, step_flops
from megatron_lite.memory.predict.states import parameter_count
from megatron_lite.memory.predict.step_peak import PeakTerm
from megatron_lite.plan.auto_policy import Budget, Unreachable
from megatron_lite.plan.hardware import Hardware
from megatron_lite.plan.layouts import (
    KINDS,
    LOSS_CHUNKS,
    kind_of,
    layouts,
    refusal,
    states_on_host,
    with_host_memory,
)
from megatron_lite.plan.problem import LOSS_CHUNK, MICRO_BATCH, Problem, with_fields
from megatron_lite.plan.rank_mixes import Run, with_policy
from megatron_lite.plan.search import Plan, Search, SearchResult
from megatron_lite.recompute.schedule import plan_model

FITS, TIGHT, DOES_NOT_FIT = "fits", "tight", "does not fit"
EXIT_STATUS = {FITS: 0, TIGHT: 1, DOES_NOT_FIT: 2}
MOST_RANKS = 16384
MOST_TRIED = 6  # numbers of ranks, in the search for the fewest that are enough
LEAST_STATES = 16  # bytes of a parameter under FSDP2: weight, gradient and two moments in float32
LARGEST_MICRO_BATCH = 4096


class Neighbour(NamedTuple):
    """A plan one step away. fits: whether it does; if not, it has the smallest peak found."""

    change: str
    plan: Plan
    fits: bool


class FitVerdict(NamedTuple):
    """The answer for one number of ranks.

    word: FITS; TIGHT, if the best plan takes a part of the reserve; or DOES_NOT_FIT.
    found: the plans. largest_micro_batch, neighbours: what is one step away from the first.
    """

    word: str
    num_ranks: int
    budget: Budget
    found: SearchResult
    largest_micro_batch: Plan | None = None
    neighbours: tuple[Neighbour, ...] = ()

    @property
    def plan(self) -> Plan | None:
        """The fastest plan that fits, or the plan with the smallest peak."""
        return self.found.plans[0] if self.found.plans else self.found.smallest


def verdict(
    problem: Problem, num_ranks: int, budget: Budget, *, may_offload: bool = True
) -> FitVerdict:
    """Returns the verdict for so many ranks.

    may_offload: whether host memory may be used if nothing else fits.
    Raises InputError if training would refuse every layout.
    """
    search = Search(problem)
    if next(layouts(problem, num_ranks), None) is None:
        raise InputError(f"{num_ranks} GPUs: {refusal(problem, num_ranks)}")
    for word, num_bytes in ((FITS, budget.plan_bytes), (TIGHT, budget.memory_bytes)):
        found = search.find(num_ranks, num_bytes)
        if found.plans:
            best = found.plans[0]
            largest = largest_micro_batch(search, best, num_bytes)
            # One step away, each with its own best policy. Training would refuse some.
            base = best.config if search.fixed_policy else with_policy(best.config, None)
            near = [
                _neighbour(search, base, *change, num_bytes)
                for change in _changes(search, base, num_ranks)
            ]
            return FitVerdict(word, num_ranks, budget, found, largest, tuple(filter(None, near)))
        # The next round has a chance only if the smallest peak is within its budget.
        if found.smallest is None or not found.smallest.peak.fits(budget.memory_bytes):
            break
    others = [
        verdict(other, num_ranks, budget, may_offload=False)
        for other in (with_host_memory(problem) if may_offload else ())
        if next(layouts(other, num_ranks), None) is not None
    ]
    fitting = [one for one in others if one.found.plans]
    if fitting:
        return min(
            fitting, key=lambda one: (EXIT_STATUS[one.word], one.found.plans[0].time.seconds)
        )
    return FitVerdict(DOES_NOT_FIT, num_ranks, budget, found)


def fewest_ranks(problem: Problem, budget: Budget, *, above: int = 0) -> int | None:
    """Returns the fewest of 1, 2, 4, ... ranks, and more than `above`, on which a plan fits.

    Returns None if none of the MOST_TRIED smallest possible numbers is enough: then more ranks do
    not help, because the memory goes to tensors that are not shared out over ranks.
    """
    search, base = Search(problem), problem.base
    parameters = parameter_count(base.model, base.tokenizer.true_vocab_size)
    count, tried = (1 << above.bit_length() if above else 1), 0
    while count <= MOST_RANKS and tried < MOST_TRIED:
        # No layout takes less than all states shared out over all ranks.
        states = LEAST_STATES * parameters / count
        if states <= budget.memory_bytes and next(layouts(problem, count), None) is not None:
            tried += 1
            if search.find(count, budget.memory_bytes, most=1).plans:
                return count
        count *= 2
    return None


def smallest_machine(problem: Problem, budget: Budget) -> FitVerdict:
    """Returns the verdict for the fewest ranks on which the run fits: 1, 2, 4, ... of them.

    Raises InputError if more ranks do not help.
    """
    count = fewest_ranks(problem, budget)
    if count is None:
        raise InputError(
            f"no number of GPUs up to {MOST_RANKS} was found to be enough for this run: its "
            "layouts are refused, or it needs more memory; give --gpus N for the reason"
        )
    return verdict(problem, count, budget)


def status(verdicts: Sequence[FitVerdict]) -> int:
    """Returns the exit status: that of the best of the verdicts."""
    return min(EXIT_STATUS[one.word] for one in verdicts)


def largest_micro_batch(search: Search, plan: Plan, budget_bytes: int) -> Plan:
    """Returns the plan with the largest micro-batch that fits in the same layout.

    Sizes are tried in steps of a factor of two, as far as they divide the batch.
    """
    largest = plan
    while (size := 2 * largest.config.training.micro_batch_size) <= LARGEST_MICRO_BATCH:
        found = _neighbour(
            search, plan.config, "", plan.num_ranks, {MICRO_BATCH: size}, budget_bytes
        )
        if found is None or not found.fits:
            break
        largest = found.plan
    return largest


def _neighbour(
    search: Search,
    base: RunConfig,
    words: str,
    num_ranks: int,
    fields: Mapping[str, Any],
    budget_bytes: int,
) -> Neighbour | None:
    """Returns a changed run with its best policy, or None if training would refuse it."""
    try:
        found = search.fit(with_fields(base, fields), num_ranks, budget_bytes)
        fits = not isinstance(found, Unreachable)
        chosen = found.smallest if isinstance(found, Unreachable) else found
        return Neighbour(words, search.plan(chosen, num_ranks), fits)
    except ValueError:
        return None


def _changes(
    search: Search, base: RunConfig, ranks: int
) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    """Yields the words of each change, the ranks, and the new values by field."""
    size, chunk = base.training.micro_batch_size, base.loss_chunk_size
    yield "double the micro-batch", ranks, {MICRO_BATCH: 2 * size}
    if size % 2 == 0:
        yield "halve the micro-batch", ranks, {MICRO_BATCH: size // 2}
    if base.training.loss_chunk_size is not None:
        yield "no --loss-chunk-size", ranks, {LOSS_CHUNK: None}
    smaller = LOSS_CHUNKS[0] if chunk is None else chunk // 2
    if smaller:
        yield f"--loss-chunk-size {smaller}", ranks, {LOSS_CHUNK: smaller}
    if search.run(base, ranks).dp_cp_size > 1:
        for kind, flags in KINDS.items():
            if kind != kind_of(base):
                yield kind, ranks, flags
    node = search.problem.hardware.ranks_per_node
    more = ranks + node if ranks >= node else 2 * ranks
    for count in (more, 2 * ranks):
        with suppress(ValueError):  # the batch does not divide over so many
            base.training.num_microbatches(base.parallel.data_parallel_size(count))
            yield f"{count} GPUs", count, {}
            break


GIB = 2**30
WIDTH = 100
MOST_STAGES = 64
STATES = ("weights", "main weights", "gradients", "optimizer states")
LEGEND = (
    "t p c d e: tensor-, pipeline- (layers of the first and last), context- (--cp-comm-type), "
    "data- and expert-parallel ranks (x those that share an expert); v: virtual stages; b: "
    "micro-batch; chunk: --loss-chunk-size; extra: FLOPs that recomputation adds; +-: the band of "
    "an estimate"
)
DAY_S = 86400.0


class Training(NamedTuple):
    """The length of a training run and the price of a GPU, for the days and the cost of a plan."""

    tokens: int | None = None
    price_per_gpu_hour: float | None = None

    def plain(self, plan: Plan) -> dict[str, float]:
        """Returns the days and the cost of a plan, as far as they are known."""
        if self.tokens is None:
            return {}
        days = self.tokens / plan.time.tokens_per_second / DAY_S
        if self.price_per_gpu_hour is None:
            return {"days": days}
        return {"days": days, "cost": 24 * days * plan.num_ranks * self.price_per_gpu_hour}


NOT_KNOWN = Training()


def plain_verdict(
    one: FitVerdict, hardware: Hardware, training: Training = NOT_KNOWN
) -> dict[str, Any]:
    """Returns a verdict as JSON has it. Bytes and seconds are numbers."""

    def plain(plan: Plan | None) -> dict[str, Any] | None:
        return None if plan is None else _plain_plan(plan, hardware) | training.plain(plan)

    largest, smallest, larger = one.largest_micro_batch, one.found.smallest, one.found.larger
    return {
        "verdict": one.word,
        "machine": hardware.name,
        "num_gpus": one.num_ranks,
        "memory_bytes": one.budget.memory_bytes,
        "reserve_bytes": one.budget.reserve_bytes,
        "num_layouts": one.found.num_layouts,
        "plans": [plain(plan) for plan in one.found.plans],
        "smallest": plain(smallest),
        "next_better": plain(larger),
        "largest_micro_batch_size": largest and largest.config.training.micro_batch_size,
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


def _plain_plan(plan: Plan, hardware: Hardware) -> dict[str, Any]:
    incomplete = ""
    try:
        plan.config.check_complete_for_training()
    except ValueError as error:
        incomplete = str(error)
    return {
        "command": command(plan.config, hardware, plan.num_ranks),
        "incomplete": incomplete,
        "config": parse_json(plan.config.to_json()),
        "layout": _layout(plan),
        "recompute_policy": str(plan.config.recompute.policy),
        "pipeline_rank": plan.peak.rank,
        "moment": plan.peak.moment,
        "peak_bytes": plan.peak.num_bytes,
        "peak_terms": plain_terms(plan.peak.terms),
        "states_on_host_bytes": states_on_host(plan.config, plan.num_ranks, plan.peak.rank),
        "step_seconds": plan.time.seconds,
        "band": plan.time.band,
        "step_terms": dict(plan.time.terms),
        "tokens_per_second": plan.time.tokens_per_second,
        "mfu": plan.time.mfu,
        "extra_flops": extra_flops(plan.config, hardware.device),
    }


def plain_terms(terms: Iterable[PeakTerm]) -> list[dict[str, Any]]:
    """Returns the terms of a peak as JSON has them."""
    return [{"name": term.name, "bytes": term.num_bytes, "tag": term.tag} for term in terms]


def plain_stages(problem: Problem, one: FitVerdict) -> list[dict[str, Any]]:
    """Returns the terms of the peak of every pipeline rank of a verdict's plan, or of MOST_STAGES
    evenly spread ranks."""
    if one.plan is None:
        return []
    config, most = one.plan.config, MOST_STAGES - 1
    run = Run(config, problem.hardware, one.plan.num_ranks)
    last = config.parallel.pipeline_model_parallel_size - 1
    ranks = {place * last // most for place in range(most + 1)} | {one.plan.peak.rank}
    return [
        {"rank": rank, "terms": plain_terms(run.rank_peak(config, rank).terms)}
        for rank in sorted(ranks)
    ]


def _layout(plan: Plan) -> str:
    config, parallel = plan.config, plan.config.parallel
    size, cut = parallel.pipeline_model_parallel_size, stages(parallel, config.model.num_layers)
    first, last = (sum(one.num_layers for one in cut[rank::size]) for rank in (0, size - 1))
    between = "+..+" if size > 2 else "+"
    is_uneven = len({one.num_layers for one in cut}) > 1
    context, experts = parallel.context_parallel_size, parallel.expert_model_parallel_size
    words = [
        f"t {parallel.tensor_model_parallel_size}",
        f"p {size}" + f" ({first}{between}{last})" * is_uneven,
        *([f"v {len(cut) // size}"] if len(cut) > size else []),
        *([f"c {context} {parallel.cp_comm_type}"] if context > 1 else []),
        f"d {parallel.data_parallel_size(plan.num_ranks)}",
        *([f"e {experts} x {parallel.expert_tensor_parallel}"] if experts > 1 else []),
        kind_of(config) + " wrapped" * config.data_parallel.fsdp_memory_efficient_wrapping,
        f"b {config.training.micro_batch_size}",
        *(["host"] if config.optimizer.optimizer_cpu_offload else []),
        *([f"chunk {config.loss_chunk_size}"] if config.loss_chunk_size else []),
    ]
    return ", ".join(words)


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
    return [*words, "-m", "megatron_lite", "train", *flags_of(config)]


def extra_flops(config: RunConfig, device: str) -> float:
    """Returns the FLOPs that recomputation and loss chunks add, over those of the model."""
    parallel = config.parallel
    tp_size, cp_size = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    shape: dict[str, Any] = dict(batch=1, seq_length=config.data.seq_length)
    head = dict(shape, padded_vocab_size=config.tokenizer.rows(tp_size))
    ranks: dict[str, Any] = dict(tp_size=tp_size, cp_size=cp_size, device=device)
    in_two_passes = config.loss_chunk_size is not None and not config.loss_in_one_pass
    more = replay_flops(config.model, plan_model(config), **shape, **ranks)
    more += logits_flops(config.model, **head) * in_two_passes
    return more / step_flops(config.model, **head)


def lines(one: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of a plain verdict, of at most WIDTH columns."""
    budget = one["memory_bytes"] - one["reserve_bytes"]
    yield from _wrapped(
        f"{one['num_gpus']} x {one['machine']}: {one['verdict']}   ({gib(one['memory_bytes'])} "
        f"GiB, of which {gib(one['reserve_bytes'])} are a reserve; {one['num_layouts']:,} layouts)"
    )
    plan = one["plans"][0] if one["plans"] else one["smallest"]
    if plan is None:
        return
    lack = gib(plan["peak_bytes"] - budget)
    if one["verdict"] == DOES_NOT_FIT:
        yield from _wrapped(
            f"The smallest peak that was found is {gib(plan['peak_bytes'])} GiB, which is {lack} "
            f"GiB more than the {gib(budget)} GiB that a plan may take:"
        )
    elif one["verdict"] != FITS:
        yield f"The best plan takes {lack} GiB of the reserve."
    yield ""
    yield f"{'':3}{'layout':<46}{'peak GiB':>9}{'free':>7}{'extra':>8}{'step s':>15}{'MFU':>10}"
    for number, row in enumerate(one["plans"] or [plan], start=1):
        free = (one["memory_bytes"] - row["peak_bytes"]) / GIB
        yield (
            f"{number:<3}{row['layout']:<46}{gib(row['peak_bytes']):>9}{free:>7.1f}"
            f"{row['extra_flops']:>8.1%}{banded(row['step_seconds'], row['band']):>15}"
            f"{100 * row['mfu']:>6.0f}+-{100 * row['mfu'] * row['band']:.0f}%"
        )
        yield from textwrap.wrap(
            row["recompute_policy"], WIDTH, initial_indent="   ", subsequent_indent="   "
        )
        if "days" in row:
            cost = f", cost {banded(row['cost'], row['band'], ',.0f')}" if "cost" in row else ""
            yield f"   {banded(row['days'], row['band'], '.1f')} days{cost}"
    yield from _wrapped(LEGEND)
    yield ""
    yield from _wrapped(
        f"What holds the peak (pipeline rank {plan['pipeline_rank']}, {plan['moment']}):"
    )
    for term in sorted(plan["peak_terms"], key=lambda term: -term["bytes"]):
        share = term["bytes"] / plan["peak_bytes"]
        yield f"  {term['name']:<60}{gib(term['bytes']):>9} GiB{share:>7.1%}  {term['tag']}"
    if plan["states_on_host_bytes"]:
        yield from _wrapped(
            f"{gib(plan['states_on_host_bytes'])} GiB of main weights and optimizer states are in "
            "host memory (the step's time has their copies, and not the host's arithmetic)."
        )
    yield ""
    if one["plans"]:
        yield from _around(one, plan, budget)
        yield from ("", "To run plan 1:", shell_lines(plan["command"]))
        yield from _wrapped(f"({plan['incomplete']})" if plan["incomplete"] else "")
        return
    states = sum(term["bytes"] for term in plan["peak_terms"] if term["name"] in STATES)
    if states > budget:
        yield from _wrapped(
            f"Weights, gradients and optimizer states alone take {gib(states)} GiB, so no "
            "recompute policy, micro-batch or sequence length makes this layout fit."
        )


def _around(one: Mapping[str, Any], plan: Mapping[str, Any], budget: int) -> Iterator[str]:
    yield f"Largest micro-batch in this layout: {one['largest_micro_batch_size']}"
    if larger := one["next_better"]:
        yield from _wrapped(
            f"Next better plan: {larger['layout']} without recomputation takes "
            f"{banded(larger['step_seconds'], larger['band'])} s a step, and lacks "
            f"{gib(larger['peak_bytes'] - budget)} GiB."
        )
    if one["neighbours"]:
        yield "One step away, each with its own best policy:"
    for other in one["neighbours"]:
        change, peak = f"  {other['change']:<28}", gib(other["peak_bytes"])
        if not other["fits"]:
            yield f"{change} does not fit: {peak} GiB at least"
            continue
        speed = other["tokens_per_second"] / plan["tokens_per_second"] - 1.0
        more = (other["peak_bytes"] - plan["peak_bytes"]) / GIB
        yield (
            f"{change} {peak:>7} GiB ({more:+.2f}), "
            f"{banded(other['step_seconds'], plan['band'])} s a step, "
            f"{speed:+.1%} tokens/s"
        )


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH)


def banded(value: float, band: float, style: str = ".2f") -> str:
    """Returns an estimate with its band, such as "1.23 +-10%"."""
    return f"{value:{style}} +-{band:.0%}"


def gib(num_bytes: float) -> str:
    """Returns a number of bytes in GiB with two digits."""
    return f"{num_bytes / GIB:.2f}"
