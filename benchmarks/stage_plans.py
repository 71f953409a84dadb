"""Compares per-stage recompute plans with the best single setting of Megatron's flags.

Nothing runs: the peaks come from memory/predict/step_peak.py, and the FLOPs from the description.
For each size of a GPU's memory the table has the cheapest of Megatron's settings that fits, the
plan of `--recompute-policy auto`, and the FLOPs that each of them adds.
`python benchmarks/stage_plans.py --output docs/planning.md` puts the table into the page.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # runs from a clone in which nothing was installed

from benchmarks.page_part import replace_part
from megatron_lite.config.data_parallel import DataParallelConfig
from megatron_lite.config.data_settings import DataConfig, TokenizerConfig
from megatron_lite.config.known_models import preset
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.config.training import TrainingConfig
from megatron_lite.plan.auto_policy import Unreachable, fitted
from megatron_lite.plan.hardware import load_hardware
from megatron_lite.plan.memo import Memo
from megatron_lite.plan.plan_text import extra_flops
from megatron_lite.plan.planned_run import Run

GIB = 2**30
BEGIN, END = "<!-- begin: per-stage plans -->\n", "\n<!-- end: per-stage plans -->"
MODEL, MACHINE = "175b", "a100-80gb"
TP_SIZE, DP_SIZE, SEQ_LENGTH, MICRO_BATCHES = 8, 8, 2048, 64


class Row(NamedTuple):
    """A budget with both plans. A setting or policy is None if nothing fits.

    *_extra: the FLOPs that it adds, as a share of the model's.
    """

    pp_size: int
    micro_batch_size: int
    budget_gib: int
    setting: str | None
    setting_extra: float | None
    policy: str | None
    policy_extra: float | None


def run_of(
    pp_size: int, micro_batch_size: int, recompute: RecomputeConfig | None = None
) -> RunConfig:
    """Returns the run: 175B on TP 8 with sequence parallelism, ZeRO-1 over 8 replicas, bf16.

    A sample has 2,048 tokens, and a step 64 micro-batches."""
    model = preset(MODEL)
    return RunConfig(
        model=ModelConfig(**model.fields),
        training=TrainingConfig(
            micro_batch_size=micro_batch_size,
            global_batch_size=micro_batch_size * DP_SIZE * MICRO_BATCHES,
            bf16=True,
        ),
        data=DataConfig(seq_length=SEQ_LENGTH),
        tokenizer=TokenizerConfig(vocab_size=model.vocab_size - 1),
        parallel=ParallelConfig(
            tensor_model_parallel_size=TP_SIZE,
            pipeline_model_parallel_size=pp_size,
            sequence_parallel=True,
        ),
        data_parallel=DataParallelConfig(use_distributed_optimizer=True),
        recompute=recompute or RecomputeConfig(),
    )


def megatron_settings(layers: int) -> Iterator[tuple[str, RecomputeConfig]]:
    """Yields Megatron's settings for stages of so many layers, each the same for all stages."""
    yield "nothing", RecomputeConfig()
    for modules in (("core_attn",), ("layernorm",), ("mlp",), ("core_attn", "layernorm", "mlp")):
        yield (
            f"selective {' '.join(modules)}",
            RecomputeConfig(recompute_granularity="selective", recompute_modules=modules),
        )
    for method, numbers in (("block", range(1, layers + 1)), ("uniform", (1, 2, 3, 4, 6))):
        for number in numbers:
            yield (
                f"full {method} {number}",
                RecomputeConfig(
                    recompute_granularity="full",
                    recompute_method=method,
                    recompute_num_layers=number,
                ),
            )


def rows(
    pp_sizes: Sequence[int], micro_batch_sizes: Sequence[int], budgets: Sequence[int]
) -> Iterator[Row]:
    """Yields the rows of the table."""
    hardware = load_hardware(MACHINE)
    for pp_size, size in itertools.product(pp_sizes, micro_batch_sizes):
        base = Run(run_of(pp_size, size), hardware, TP_SIZE * DP_SIZE * pp_size, Memo())
        priced = []
        for number, (name, recompute) in enumerate(megatron_settings(96 // pp_size)):
            config = run_of(pp_size, size, recompute)
            priced.append(
                (extra_flops(config, hardware.device), number, name, base.peak(config).num_bytes)
            )
        for budget in budgets:
            fits = [
                (extra, name) for extra, _, name, peak in sorted(priced) if peak <= budget * GIB
            ]
            found = fitted(base, budget * GIB)
            chosen = None if isinstance(found, Unreachable) else found.config
            yield Row(
                pp_size=pp_size,
                micro_batch_size=size,
                budget_gib=budget,
                setting=fits[0][1] if fits else None,
                setting_extra=fits[0][0] if fits else None,
                policy=None if chosen is None else str(chosen.recompute.policy),
                policy_extra=None if chosen is None else extra_flops(chosen, hardware.device),
            )


def table(found: Sequence[Row]) -> str:
    """Returns the rows as a Markdown table."""
    lines = [
        "| p | b | GiB | Megatron's cheapest setting that fits | adds | per stage | less |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        less = "-"
        if row.setting_extra and row.policy_extra is not None:
            less = f"{1.0 - row.policy_extra / row.setting_extra:.0%}"
        setting = row.setting or "none fits"
        lines.append(
            f"| {row.pp_size} | {row.micro_batch_size} | {row.budget_gib} | {setting} "
            f"| {_percent(row.setting_extra)} | {_percent(row.policy_extra)} | {less} |"
        )
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}"


def main(argv: Sequence[str] | None = None, make_rows: Callable[..., Iterable[Row]] = rows) -> int:
    """Prints the table. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pipeline-sizes", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--micro-batch-sizes", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--gib", type=int, nargs="+", default=[40, 60, 80])
    parser.add_argument("--output", metavar="PAGE", help="a page with the marks of the table")
    parser.add_argument("--json", help="also write the rows, with the policies, to this file")
    args = parser.parse_args(argv)
    found = list(make_rows(args.pipeline_sizes, args.micro_batch_sizes, args.gib))
    if args.output is None:
        print(table(found))
    else:
        try:
            replace_part(Path(args.output), BEGIN, END, table(found))
        except ValueError as error:
            parser.error(str(error))
    if args.json:
        Path(args.json).write_text(
            json.dumps([row._asdict() for row in found], indent=2) + "\n", encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
