"""The verdict on a run as plain data, which `--json` writes, and that data as text.

Standard library only.
"""

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from megatron_lite.config.checks import Values, parse_json
from megatron_lite.config.invocation import shell_lines
from megatron_lite.config.notices import notices
from megatron_lite.config.run_flags import flags_of
from megatron_lite.config.units import GIB
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.predict.flops import PolicyFlops
from megatron_lite.memory.predict.step_peak import PeakTerm
from megatron_lite.recompute.schedule import plan_model

from .auto_policy import Plan
from .hardware import Hardware
from .layouts import kind_of
from .step_time import HOST_UPDATE
from .verdict import DOES_NOT_FIT, FITS, FitVerdict

WIDTH = 100
MOST_STAGES = 64
STATES = ("weights", "main weights", "gradients", "optimizer states")
LEGEND = (
    "t p c d e: tensor-, pipeline- (layers of the first and last), context- (--cp-comm-type, "
    "if not p2p), data- and expert-parallel ranks (x those that share an expert); v: virtual "
    "stages; b: micro-batch; chunk: --loss-chunk-size; kept, wrapped: "
    "--torch-fsdp2-no-reshard-after-forward, --fsdp-memory-efficient-wrapping; extra: FLOPs that "
    "recomputation adds; +-: the band of an estimate"
)
DAY_S = 86400.0


class Training(NamedTuple):
    """The length of a training run and the price of a GPU, for the days and the cost of a plan."""

    tokens: int | None
    price_per_gpu_hour: float | None

    def plain(self, plan: Plan) -> dict[str, float]:
        """Returns the days and the cost of a plan, as far as they are known."""
        if self.tokens is None:
            return {}
        days = self.tokens / plan.time.tokens_per_second / DAY_S
        if self.price_per_gpu_hour is None:
            return {"days": days}
        return {"days": days, "cost": 24 * days * plan.num_ranks * self.price_per_gpu_hour}


def plain_verdict(one: FitVerdict, hardware: Hardware, training: Training) -> Values:
    """Returns a verdict as JSON has it. Bytes and seconds are numbers."""
    largest, larger = one.largest_micro_batch, one.found.larger
    return {
        "verdict": one.word,
        "machine": hardware.name,
        "num_gpus": one.num_ranks,
        "memory_bytes": one.budget.memory_bytes,
        "reserve_bytes": one.budget.reserve_bytes,
        "num_layouts": one.found.num_layouts,
        "plans": [_plain_plan(plan, training) for plan in one.found.plans],
        "smallest": None if one.found.plans else _plain_plan(one.plan, training),
        "next_better": larger and _plain_plan(larger, training),
        "largest_micro_batch_size": largest and largest.config.training.micro_batch_size,
        "neighbours": [
            {
                "change": change,
                "fits": fits,
                "peak_bytes": plan.peak.num_bytes,
                "step_seconds": plan.time.seconds,
                "band": plan.time.band,
                "tokens_per_second": plan.time.tokens_per_second,
            }
            for change, plan, fits in one.neighbours
        ],
    }


def _plain_plan(plan: Plan, training: Training) -> Values:
    config, peak, time = plan.config, plan.peak, plan.time
    sizes = Sizes.of(config, plan.hardware.device)
    incomplete = ""
    try:
        config.check_complete_for_training()
    except ValueError as error:
        incomplete = str(error)
    return {
        "command": command(plan),
        "incomplete": incomplete,
        "notices": notices(config, "formats", world_size=plan.num_ranks),
        "config": parse_json(config.to_json()),
        "layout": _layout(plan),
        "recompute_policy": str(config.recompute.policy),
        "pipeline_rank": peak.rank,
        "moment": peak.moment,
        "peak_bytes": peak.num_bytes,
        "peak_terms": plain_terms(peak.terms),
        "kept_on_host_bytes": peak.on_host,
        "states_on_host_bytes": plan.states(peak.rank).on_host,
        "step_seconds": time.seconds,
        "band": time.band,
        "step_terms": dict(time.terms),
        "tokens_per_second": time.tokens_per_second,
        "mfu": time.ideal_seconds / time.seconds,  # from 0 to 1
        "extra_flops": PolicyFlops.of(sizes, plan_model(config)).added,
        **training.plain(plan),
    }


def plain_terms(terms: Iterable[PeakTerm]) -> list[Values]:
    """Returns the terms of a peak as JSON has them."""
    return [{"name": term.name, "bytes": term.num_bytes, "tag": term.tag} for term in terms]


def plain_stages(one: FitVerdict) -> list[Values]:
    """Returns the terms of the peak of every pipeline rank of a verdict's plan, or of MOST_STAGES
    evenly spread ranks."""
    last = one.plan.config.parallel.pipeline_model_parallel_size - 1
    ranks = {place * last // (MOST_STAGES - 1) for place in range(MOST_STAGES)} | {
        one.plan.peak.rank
    }
    return [
        {"rank": rank, "terms": plain_terms(one.plan.step_peak(rank).terms)}
        for rank in sorted(ranks)
    ]


def _layout(plan: Plan) -> str:
    config, parallel = plan.config, plan.config.parallel
    size, cut = parallel.pipeline_model_parallel_size, config.stages()
    first, last = (sum(one.num_layers for one in cut[rank::size]) for rank in (0, size - 1))
    between = "+..+" if size > 2 else "+"
    is_uneven = len({one.num_layers for one in cut}) > 1
    way = "+".join(sorted(parallel.exchanges))
    exchange = "" if way == "p2p" else f" {way}"
    context, experts = parallel.context_parallel_size, parallel.expert_model_parallel_size
    instances = parallel.num_distributed_optimizer_instances
    tensor = parallel.tensor_model_parallel_size
    words = [
        f"t {tensor}" + " without SP" * (tensor > 1 and not parallel.sequence_parallel),
        f"p {size}" + f" ({first}{between}{last})" * is_uneven,
        *[f"v {len(cut) // size}"] * (len(cut) > size),
        *[f"c {context}{exchange}"] * (context > 1),
        f"d {plan.dp_size}",
        *[f"e {experts} x {parallel.expert_tensor_parallel}"] * (experts > 1),
        kind_of(config)
        + f" x {instances}" * (instances > 1)
        + " wrapped" * config.data_parallel.fsdp_memory_efficient_wrapping
        + " kept" * (not config.data_parallel.torch_fsdp2_reshard_after_forward),
        f"b {config.training.micro_batch_size}",
        *["host"] * config.optimizer.optimizer_cpu_offload,
        *["16-bit states"] * config.optimizer.is_rounded,
        *[f"chunk {config.loss_chunk_size}"] * (config.loss_chunk_size is not None),
    ]
    return ", ".join(words)


def command(plan: Plan) -> list[str]:
    """Returns the words of the command that runs a plan, in any directory."""
    per_node = min(plan.num_ranks, plan.hardware.ranks_per_node)
    nodes = plan.num_ranks // per_node
    words = ["torchrun", "--nproc-per-node", str(per_node)]
    if nodes > 1:
        words += ["--nnodes", str(nodes), "--node-rank", "$NODE_RANK"]
        words += ["--master-addr", "$MASTER_ADDR"]
    return [*words, "-m", "megatron_lite", "train", *flags_of(plan.config)]


def lines(one: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of a plain verdict, of at most WIDTH columns."""
    budget = one["memory_bytes"] - one["reserve_bytes"]
    yield from _wrapped(
        f"{one['num_gpus']} x {one['machine']}: {one['verdict']}   ({gib(one['memory_bytes'])} "
        f"GiB, of which {gib(one['reserve_bytes'])} are a reserve; {one['num_layouts']:,} layouts)"
    )
    plan = one["plans"][0] if one["plans"] else one["smallest"]
    lack = gib(plan["peak_bytes"] - budget)
    if one["verdict"] == DOES_NOT_FIT:
        yield from _wrapped(
            f"The smallest peak that was found is {gib(plan['peak_bytes'])} GiB, which is {lack} "
            f"GiB more than the {gib(budget)} GiB that a plan may take:"
        )
    elif one["verdict"] != FITS:
        yield f"The best plan takes {lack} GiB of the reserve."
    yield ""
    yield f"{'':3}{'layout':<46}{'peak GiB':>9}{'free':>9}{'extra':>8}{'step s':>15}{'MFU':>10}"
    for number, row in enumerate(one["plans"] or [plan], start=1):
        free = (one["memory_bytes"] - row["peak_bytes"]) / GIB
        yield (
            f"{number:<3}{row['layout']:<46}{gib(row['peak_bytes']):>9}{free:>9.1f}"
            f"{row['extra_flops']:>8.1%}{banded(row['step_seconds'], row['band']):>15}"
            f"{100 * row['mfu']:>6.0f}+-{100 * row['mfu'] * row['band']:.0f}%"
        )
        yield from textwrap.wrap(
            row["recompute_policy"], WIDTH, initial_indent="   ", subsequent_indent="   "
        )
        if "days" in row:
            cost = ""
            if "cost" in row:
                style = ",.0f" if row["cost"] >= 10.0 else ".2g"
                cost = f", cost {banded(row['cost'], row['band'], style)}"
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
            f"{gib(plan['states_on_host_bytes'])} GiB of main weights, optimizer states and copies "
            "of gradients are in host memory (the update there takes "
            f"{plan['step_terms'].get(HOST_UPDATE, 0.0):.2f} s of a step)."
        )
    if plan["kept_on_host_bytes"]:
        yield f"The policy keeps at most {gib(plan['kept_on_host_bytes'])} GiB in host memory."
    yield ""
    if one["plans"]:
        yield from _around(one, plan, budget)
        yield from ("", "To run plan 1:", shell_lines(plan["command"]))
        yield from _wrapped(f"({plan['incomplete']})" if plan["incomplete"] else "")
        for text in plan["notices"]:
            yield from _wrapped(f"note: {text}")
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
            f"{banded(other['step_seconds'], other['band'])} s a step, "
            f"{speed:+.1%} tokens/s"
        )


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH)


def banded(value: float, band: float, style: str = ".2f") -> str:
    """Returns an estimate with its band, such as "1.23 +-10%"."""
    return f"{value:{style if value >= 0.1 else '.2g'}} +-{band:.0%}"


def gib(num_bytes: float) -> str:
    """Returns a number of bytes in GiB with two digits."""
    return f"{num_bytes / GIB:.2f}"
