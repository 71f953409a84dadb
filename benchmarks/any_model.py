"""Times recomputation of transformers' GPT-2 by several engines, and counts their kept bytes.

    ours            apply_policy_(model, layers_fqn="transformer.h", policy=...)
    torch           torch.utils.checkpoint around each layer, non-reentrant, and with a selective
                    context that keeps matmuls
    transformers    model.gradient_checkpointing_enable(), with use_reentrant False and True

The model is called as by default. The engines take turns, A B C A B C .., and each round gives one
ratio to the model without recomputation. Everything runs in one process. The model creates no
key-value cache, because torch's selective engine cannot replay one (docs/who-is-right.md).
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, logging

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # runs from a clone in which nothing was installed

from benchmarks.harness import Clock, Progress, device_name, write_report
from megatron_lite.memory.measure.kept_bytes import measure_kept_bytes
from megatron_lite.recompute.apply import apply_policy_

NONE = "none"
SEED = 3
MATMULS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
]


def ours(model: PreTrainedModel, policy: str) -> None:
    """Puts our engine on the model."""
    apply_policy_(model, layers_fqn="transformer.h", policy=policy)


def torchs(model: PreTrainedModel, *, keep_matmuls: bool) -> None:
    """Puts torch's non-reentrant checkpoint around each layer."""
    options: dict[str, Any] = (
        {"context_fn": partial(create_selective_checkpoint_contexts, MATMULS)}
        if keep_matmuls
        else {}
    )
    for layer in model.transformer.h:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **options)


def transformers_own(model: PreTrainedModel, *, use_reentrant: bool) -> None:
    """Turns on transformers' own gradient checkpointing."""
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": use_reentrant}
    )


ENGINES: dict[str, Callable[[PreTrainedModel], None]] = {
    NONE: lambda model: None,
    "ours, full": partial(ours, policy="*:full"),
    "torch, full": partial(torchs, keep_matmuls=False),
    "transformers": partial(transformers_own, use_reentrant=False),
    "transformers, reentrant": partial(transformers_own, use_reentrant=True),
    "ours, ops(matmul)": partial(ours, policy="*:ops(matmul)"),
    "torch, matmuls": partial(torchs, keep_matmuls=True),
    "ours, every-2": partial(ours, policy="every-2:full"),
}


def build(engine: str, args: argparse.Namespace) -> nn.Module:
    """Returns the model in training mode under an engine, always from the same seed."""
    torch.manual_seed(SEED)
    model = GPT2LMHeadModel(
        GPT2Config(
            n_layer=args.num_layers,
            n_embd=args.hidden_size,
            n_head=args.num_attention_heads,
            vocab_size=args.vocab_size,
            n_positions=args.seq_length,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )
    model.to(args.device, {"float32": torch.float32, "bf16": torch.bfloat16}[args.dtype]).train()
    ENGINES[engine](model)
    return model


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table. Returns the exit status."""
    args = _parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    tokens = torch.randint(
        0,
        args.vocab_size,
        (args.micro_batch_size, args.seq_length),
        device=args.device,
        generator=torch.Generator(args.device).manual_seed(SEED),
    )
    models = {name: build(name, args) for name in ENGINES}
    kept = {name: _kept(model, tokens) for name, model in models.items()}
    clock, progress = Clock(device=torch.device(args.device), kind=args.clock), Progress()
    samples: dict[str, list[float]] = {name: [] for name in models}
    for number in range(-1, args.repeats):  # the first round warms up
        for name, model in models.items():
            time = clock.ms(
                lambda model=model: model(input_ids=tokens, labels=tokens).loss.backward()
            )
            if number >= 0:
                samples[name].append(time)
        progress(f"round {number + 1} of {args.repeats}")
    rows = [_row(name, kept, samples) for name in models]
    write_report(
        {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "device": device_name(torch.device(args.device)),
            "torch": torch.__version__,
            "clock": args.clock,
            "settings": {name: value for name, value in vars(args).items() if name != "json"},
            "rows": rows,
        },
        args.json,
    )
    print(
        f"{device_name(torch.device(args.device))}, torch {torch.__version__}, {args.clock} time, "
        f"medians of {args.repeats} rounds"
    )
    print(
        f"GPT-2 of transformers, {args.num_layers} layers of h {args.hidden_size}, s "
        f"{args.seq_length}, b {args.micro_batch_size}, V {args.vocab_size}, {args.dtype}, dropout "
        "0.1"
    )
    print(f"\n{'engine':26}{'kept MiB':>10}{'time / none':>13}   lowest to highest")
    for row in rows:
        print(
            f"{row['engine']:26}{row['kept_bytes'] / 2**20:10.2f}{row['ratio']:13.2f}   "
            f"{row['lowest']:.2f} to {row['highest']:.2f}"
        )
    return 0


def _kept(model: nn.Module, tokens: torch.Tensor) -> int:
    with measure_kept_bytes(model) as meter:
        loss = model(input_ids=tokens, labels=tokens).loss
    total = meter.measure(loss).total
    loss.backward()
    return total


def _row(name: str, kept: dict[str, int], samples: dict[str, list[float]]) -> dict[str, Any]:
    ratios = [mine / other for mine, other in zip(samples[name], samples[NONE], strict=True)]
    return {
        "engine": name,
        "kept_bytes": kept[name],
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "ms": samples[name],
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="any_model.py", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    sizes = {
        "num-layers": 4,
        "hidden-size": 256,
        "num-attention-heads": 8,
        "vocab-size": 1024,
        "seq-length": 128,
        "micro-batch-size": 4,
        "repeats": 9,
    }
    for name, default in sizes.items():
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"default: {default}"
        )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bf16"], default="float32")
    parser.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="cpu: processor time; give --threads 1, too",
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="CPU threads; default: torch's choice"
    )
    parser.add_argument("--json", metavar="FILE", help="also write settings and every sample")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
