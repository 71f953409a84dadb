"""Times a Llama-8B-shaped stack in bf16 on one GPU, beside the peers that are installed.

The stack has as many layers as the card holds for all contestants together. They have the same
weights and take turns (benchmarks/README.md). The program first prints the rate of large matmuls on
this card, since every other figure is judged by it. Each finished row is printed at once.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # runs from a clone in which nothing was installed

from benchmarks.contestant_peers import Contestant
from benchmarks.contestants import OUR_POLICIES, OURS, LlamaSetting, build_contestants
from benchmarks.engines import PRESETS, Setting, Shape
from benchmarks.harness import Clock, device_name, versions, write_report
from benchmarks.recompute_engines import policies
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.memory.predict.flops import hardware_flops, peak_flops, step_flops
from megatron_lite.recompute.schedule import plan_stage

LAYER_8B = Shape(
    num_layers=1,
    hidden_size=4096,
    num_attention_heads=32,
    seq_length=4096,
    batch_size=1,
    vocab_size=32768,
)
# Per parameter: ours keeps 2 bytes of weight, 4 of gradient and 12 of masters and moments; two
# peers keep 2 of weight each, and one of them at a time 2 of gradient.
BYTES_PER_PARAMETER = 18 + 2 * 2 + 2
SHARE = 0.6  # of the free memory for these; the rest is for activations
GEMM_SIZE = 8192
TARGET = 0.55  # of the rate of large matmuls


def fitting(free_bytes: int) -> Shape:
    """Returns the stack with as many layers as fit, from 1 to 32."""
    hidden, vocab = LAYER_8B.hidden_size, LAYER_8B.vocab_size
    layer = 12 * hidden * hidden  # attention and an MLP of 8/3
    left = SHARE * free_bytes / BYTES_PER_PARAMETER - 2 * hidden * vocab
    return replace(LAYER_8B, num_layers=max(1, min(32, int(left / layer))))


def gemm_rate(device: torch.device, dtype: torch.dtype, clock: Clock, size: int) -> float:
    """Returns the FLOP/s of a square matmul, the best of several."""
    first, second = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    first @ second
    best = min(clock.ms(lambda: first @ second) for _ in range(10))
    return 2.0 * size**3 / (best / 1000.0)


def hardware_flops_of(name: str, setting: Setting) -> int | None:
    """Returns the hardware FLOPs of one of our policies; None for a peer."""
    policy = OUR_POLICIES.get(name.removeprefix("ours, "))
    if policy is None or not name.startswith("ours, "):
        return None
    shape = setting.shape
    flags = policies(shape.num_layers)[policy]
    return hardware_flops(
        setting.model_config(),
        plan_stage(RecomputeConfig(**flags), shape.num_layers),
        batch=shape.batch_size,
        seq_length=shape.seq_length,
        padded_vocab_size=shape.vocab_size,
        device="cuda" if setting.device.type == "cuda" else "cpu",
    )


def measure(
    contestants: Sequence[Contestant], setting: Setting, rounds: int, skipped: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """Returns loss, peak and times of every contestant that the memory is enough for."""
    device = setting.device
    clock, found = Clock(device=device), {}
    for one in contestants:  # warms up; a contestant that fails leaves the others alone
        try:
            found[one.name] = _first(one, device)
        except (RuntimeError, ImportError) as reason:
            skipped[one.name] = str(reason).splitlines()[0][:150]
            one.clear()
        gc.collect()
    running = [one for one in contestants if one.name in found]
    for number in range(rounds):
        for turn in range(len(running)):
            one = running[(turn + number) % len(running)]
            one.clear()
            found[one.name]["samples_ms"].append(clock.ms(one.run))
            one.clear()
    return found


def _first(one: Contestant, device: torch.device) -> dict[str, Any]:
    is_cuda = device.type == "cuda"
    one.clear()
    one.run()
    one.clear()
    before = 0
    if is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    loss = one.run().item()
    peak = torch.cuda.max_memory_allocated(device) - before if is_cuda else None
    one.clear()
    return {"loss": loss, "peak_bytes": peak, "samples_ms": []}


def rows(
    found: dict[str, dict[str, Any]], setting: Setting, rate: float, peak: float | None
) -> list[dict[str, Any]]:
    """Returns the figures of each contestant.

    mfu, hfu: model and hardware FLOPs over time and the data sheet's peak.
    of_gemm: model FLOPs over time and the measured rate of large matmuls.
    """
    shape = setting.shape
    flops = step_flops(
        setting.model_config(),
        batch=shape.batch_size,
        seq_length=shape.seq_length,
        padded_vocab_size=shape.vocab_size,
    )
    table = []
    for name, own in found.items():
        ms = statistics.median(own["samples_ms"])
        hardware = hardware_flops_of(name, setting)
        per_second = 1000.0 / ms
        table.append(
            {
                "name": name,
                **own,
                "ms": ms,
                "tokens_per_second": shape.batch_size * shape.seq_length * per_second,
                "time_ratio": statistics.median(
                    mine / ours
                    for mine, ours in zip(own["samples_ms"], found[OURS]["samples_ms"], strict=True)
                ),
                "of_gemm": flops * per_second / rate,
                "mfu": None if peak is None else flops * per_second / peak,
                "hfu": None if peak is None or hardware is None else hardware * per_second / peak,
            }
        )
    return table


def shown(row: dict[str, Any]) -> str:
    """Returns a row of the table."""
    shares = "".join(
        f"{'-' if row[name] is None else format(row[name], '.1%'):>8}"
        for name in ("of_gemm", "mfu", "hfu")
    )
    peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f}"
    return (
        f"{row['name']:29}{row['ms']:10.1f}{row['tokens_per_second']:10.0f}"
        f"{row['time_ratio']:8.2f}{shares}{peak:>9}"
    )


HEADER = (
    f"{'contestant':29}{'ms':>10}{'tokens/s':>10}{'/ ours':>8}{'of GEMM':>8}{'MFU':>8}{'HFU':>8}"
    f"{'peak GiB':>9}"
)


def blocks(args: argparse.Namespace) -> list[tuple[str, Callable[..., Setting]]]:
    """Returns the models: the Llama stack first, since its figure is the one that matters."""
    kinds: dict[str, Callable[..., Setting]] = {"llama": LlamaSetting, "gpt": Setting}
    return [(name, kinds[name]) for name in args.models]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns 0, or 1 if the losses of the contestants differ."""
    parser = argparse.ArgumentParser(prog="gpu_step.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--preset", choices=list(PRESETS), help="default: what fills the card")
    parser.add_argument("--models", nargs="+", default=["llama"], choices=["llama", "gpt"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="also torch.compile's contestants")
    parser.add_argument("--json", help="the report")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    is_cuda = device.type == "cuda"
    clock, name = Clock(device=device), device_name(device)
    rate = gemm_rate(device, torch.bfloat16, clock, GEMM_SIZE if is_cuda else 256)
    peak = peak_flops(name, bf16=True) if is_cuda else None
    free = torch.cuda.mem_get_info(device)[0] if is_cuda else 0
    shape = PRESETS[args.preset or "tiny"] if args.preset or not is_cuda else fitting(free)
    report: dict[str, Any] = {
        "device": name,
        "versions": versions(),
        "gemm_flops_per_second": rate,
        "peak_flops_per_second": peak,
        "shape": asdict(shape),
        "blocks": [],
    }
    sheet = "" if peak is None else f", {rate / peak:.0%} of the data sheet's {peak / 1e12:.0f}"
    print(f"{name}: a large bf16 matmul runs at {rate / 1e12:.4g} TFLOP/s{sheet}")
    print(", ".join(f"{key} {value}" for key, value in asdict(shape).items()), flush=True)
    status = 0
    for family, kind in blocks(args):
        setting = kind(shape=shape, device=device, dtype="bf16", dropout=0.0)
        contestants, skipped = build_contestants(
            family, setting, peers=("plain", "transformers", "litgpt"), compiled=args.compile
        )
        found = rows(measure(contestants, setting, args.rounds, skipped), setting, rate, peak)
        print(f"\n{family}, bf16, forward and backward", HEADER, *map(shown, found), sep="\n")
        for who, why in skipped.items():
            print(f"{who} left out: {why}")
        best = next(row for row in found if row["name"] == OURS)["of_gemm"]
        if is_cuda:
            verdict = "reached" if best >= TARGET else "missed"
            print(f"target, {TARGET:.0%} of the matmul rate: {verdict} with {best:.1%}", flush=True)
        losses = [row["loss"] for row in found]
        if max(losses) - min(losses) > 2e-2 * max(losses):
            print(f"the contestants compute different losses: {losses}", file=sys.stderr)
            status = 1
        report["blocks"].append({"family": family, "rows": found, "skipped": skipped})
        write_report(report, args.json)
    return status


if __name__ == "__main__":
    sys.exit(main())
