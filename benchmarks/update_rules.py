"""Times one optimizer step of each update rule beside torch's optimizer of the same name.

    row     ours                 torch's
    adam    --optimizer adam     clip_grad_norm_, AdamW(fused=True)
    muon    --optimizer muon     clip_grad_norm_, Muon for the matrices of layers, AdamW(fused=True)
                                 for the rest

A step computes the global norm, clips at 1.0 and updates. Our step also decides whether it is
skipped. Both Muons use the simple coefficients, Nesterov momentum and linear_qkv as one matrix. The
row "muon, split qkv" has three matrices in ours, which is the default. The sides take turns, A B C
A B C .., and each round gives one ratio. The benchmark runs in one process on one device, in
float32.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # runs from a clone in which nothing was installed

from benchmarks.engines import LEARNING_RATE, Setting, one_rank, our_model
from benchmarks.harness import (
    Progress,
    benchmark_parser,
    clock_of,
    heading,
    new_report,
    parse_benchmark,
    spread,
    write_report,
)
from megatron_lite.config.optimizer_settings import OptimizerConfig
from megatron_lite.model.gpt import GPTModel
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.parameter_spec import spec_of

MUON = OptimizerConfig(
    optimizer="muon",
    muon_nesterov=True,
    muon_coefficient_type="simple",
    muon_split_qkv=False,
    muon_scale_mode="shape_scaling",
    muon_momentum=0.95,
)
# By row: our config, and whether it is compared with torch's Muon (True) or AdamW (False).
RULES: Mapping[str, tuple[OptimizerConfig, bool]] = {
    "adam": (OptimizerConfig(), False),
    "muon": (MUON, True),
    "muon, split qkv": (
        OptimizerConfig(optimizer="muon", muon_nesterov=True, muon_coefficient_type="simple"),
        True,
    ),
}
Step = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one rule.

    time_ratio: the time of our step over that of torch's, as (median, least, most) of the rounds.
    """

    rule: str
    ms: float
    torch_ms: float
    time_ratio: tuple[float, float, float]
    samples_ms: list[float]
    torch_samples_ms: list[float]


def model_with_gradients(setting: Setting) -> GPTModel:
    """Returns a freshly initialised model with the gradients of one batch."""
    batch, model = setting.batch(), our_model(setting, one_rank(setting))
    model.loss(batch.tokens, batch.labels).mean().backward()
    return model


def our_step(setting: Setting, config: OptimizerConfig) -> Step:
    """Returns our optimizer's step, which uses the same gradients at every call."""
    model = model_with_gradients(setting)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    optimizer = Optimizer(model, config, one_rank(setting))
    for name, parameter in model.named_parameters():
        grad = gradients[name]
        assert grad is not None
        parameter.grad = optimizer.buffer.grads[name].copy_(grad)
    return lambda: optimizer.step(LEARNING_RATE)


def torch_step(setting: Setting, *, muon: bool) -> Step:
    """Returns the step of torch's optimizers, which uses the same gradients at every call."""
    model = model_with_gradients(setting)
    matrices = [one for one in model.parameters() if muon and spec_of(one).matrices]
    others = [one for one in model.parameters() if not (muon and spec_of(one).matrices)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, lr=LEARNING_RATE, weight_decay=0.01, fused=True)
    ]
    if muon:
        optimizers.append(
            torch.optim.Muon(
                matrices, lr=LEARNING_RATE, weight_decay=0.01, momentum=0.95, nesterov=True
            )
        )

    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()

    return step


def measure(setting: Setting, args: argparse.Namespace, progress: Progress) -> list[Row]:
    """Measures all rules of one setting."""
    steps: dict[str, Step] = {}
    for rule, (config, muon) in RULES.items():
        steps |= {rule: our_step(setting, config), f"torch, {rule}": torch_step(setting, muon=muon)}
    for step in steps.values():
        step()  # the first step creates the states
    clock, names = clock_of(args), list(steps)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(args.repeats):
        for place in range(len(names)):
            name = names[(place + number) % len(names)]
            progress(f"round {number + 1} of {args.repeats}, {name}")
            samples[name].append(clock.ms(steps[name]))
    return [
        Row(
            rule=rule,
            ms=statistics.median(samples[rule]),
            torch_ms=statistics.median(samples[f"torch, {rule}"]),
            time_ratio=spread(samples[rule], samples[f"torch, {rule}"]),
            samples_ms=samples[rule],
            torch_samples_ms=samples[f"torch, {rule}"],
        )
        for rule in RULES
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns 0."""
    parser = benchmark_parser("update_rules.py", (__doc__ or "").partition("\n")[0], repeats=15)
    parser.set_defaults(dropout=[0.0], dtype=["float32"])
    args = parse_benchmark(parser, argv)
    if args.dtype != ["float32"] or args.dropout != [0.0] or args.profile:
        parser.error(
            "an optimizer step has no dropout, and torch's Muon no float32 masters: leave --dtype, "
            "--dropout and --profile out"
        )
    report: dict[str, Any] = new_report(args)
    print(
        heading(report), f"{'rule':20}{'ms':>9}{'torch ms':>10}  time / torch", sep="\n", flush=True
    )
    for row in measure(
        Setting(shape=args.shape, device=args.device, dtype="float32", dropout=0.0),
        args,
        Progress(),
    ):
        print(
            f"{row.rule:20}{row.ms:9.2f}{row.torch_ms:10.2f}  "
            + "{:.3f} ({:.3f}-{:.3f})".format(*row.time_ratio)
        )
        report["rows"].append(asdict(row))
    write_report(report, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
