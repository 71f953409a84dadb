"""Times a training step beside other libraries' models of the same shape, with the same weights.

Two figures for each contestant: forward and backward alone, and the whole step with clipping and
AdamW. benchmarks/README.md explains how to read the table. On a GPU the table has the peak of
forward and backward too, above what weights, gradients and optimizer hold before.
"""

import gc
import math
import sys
import time
from contextlib import suppress
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, ".")  # the root of the clone, which may not be installed

from benchmarks.contestants import GRAPH, OURS, PEERS, build_contestants
from benchmarks.engines import DTYPES, FAMILIES, Setting
from benchmarks.harness import (
    OutOfTime,
    add_number,
    benchmark_parser,
    blocks,
    clock_of,
    in_rounds,
    parse_benchmark,
    peak_above,
    progress,
    spread,
)
from megatron_lite.description.model_ends import head_operations
from megatron_lite.description.self_attention import CORE
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.transformer_layer import describe_layers
from megatron_lite.memory.predict.flops import step_flops
from megatron_lite.parallel.torch_internals import grouped_product

LINEAR = "linear layers alone"
FOR_WARMING = 0.6  # of --seconds; torch's compiler takes most of it


def linear_layers(setting):
    """Returns a function that runs each linear layer's forward matmul once, and its FLOPs.

    Those of experts are grouped products of balanced rows.
    """
    sizes = Sizes(model=setting.model_config(), **setting.sizes)
    layers = describe_layers(sizes, [1] * sizes.model.num_layers)
    operations = [*head_operations(sizes)]
    operations += [one for layer in layers for one in layer.operations if one.name != CORE]
    matmuls = [one for operation in operations for call in operation.calls for one in call.matmuls]
    drawn = partial(torch.randn, device=setting.device, dtype=DTYPES[setting.dtype])
    products = {}
    for one in set(matmuls):
        rows, weight = drawn(one.m, one.k), (one.n, one.k)
        products[one] = partial(F.linear, rows, drawn(*weight))
        if one.groups > 1:
            ends = torch.arange(1, one.groups + 1, device=setting.device) * one.m // one.groups
            experts = drawn(one.groups, *weight[::-1])
            products[one] = partial(grouped_product, rows, experts, offs=ends.int())

    def run():
        for one in matmuls:
            products[one]()

    return run, sum(one.flops for one in matmuls)


def kernels(one, device):
    """Returns the launches of a forward and backward on a GPU, and the ms of its kernels."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        one.run()
        torch.cuda.synchronize(device)
    times = [event.device_time for event in found.events() if event.device_type == DeviceType.CUDA]
    return len(times), sum(times) / 1000.0


def warm(one, device):
    """Runs the contestant. Returns its loss, and on a GPU its peak, launches and kernels, as fields
    of its row."""
    loss = one.run().item()  # it builds kernels and workspaces
    one.clear()
    peak = launches = kernel_ms = None
    if device.type == "cuda":
        if GRAPH not in one.name:  # a graph's memory was there before
            peak = peak_above(one.run, device)
        launches, kernel_ms = kernels(one, device)
        one.clear()
    return dict(loss=loss, peak_bytes=peak, launches=launches, kernel_ms=kernel_ms)


def measure(setting, args, skipped):
    """Returns a row of each contestant that the memory is enough for.

    ms, step_ms: of forward and backward, and of the whole step.
    ratio, step_ratio: its time over that of ours without recomputation, over the rounds.
    launches, kernel_ms: on a GPU. If `ms` is far above them, the host does not keep up.
    of_matmuls: the model's FLOPs at the rate of its linear layers alone, over `ms`.
    peak_bytes: on a GPU, above what was there before.
    """
    began, seconds = time.monotonic(), args.seconds or math.inf
    contestants = build_contestants(setting, skipped, peers=args.peers, compiled=args.compile)
    warmed = {}
    with suppress(OutOfTime):
        for one in contestants:  # a contestant that fails leaves the others alone
            progress(f"warming up {one.name}")
            try:
                warmed[one.name] = one, warm(one, setting.device)
            except (RuntimeError, ImportError, OutOfTime) as reason:
                skipped[one.name] = str(reason).splitlines()[0][:150]
                one.clear()
            gc.collect()
            if time.monotonic() > began + FOR_WARMING * seconds:
                skipped["those after " + one.name] = f"no time left of --seconds {args.seconds}"
                break
    clock, (run, linear_flops) = clock_of(args), linear_layers(setting)
    linear = in_rounds({LINEAR: partial(clock, run)}, args.repeats).get(LINEAR, [math.nan])
    # the ms of the model's FLOPs at the rate of these layers
    at_their_rate = (
        median(linear)
        / linear_flops
        * step_flops(Sizes(model=setting.model_config(), **setting.sizes))
    )
    samples, steps, rows = {}, {}, []
    try:
        for found, kind, share in ((samples, "run", FOR_WARMING + 0.2), (steps, "step", 1.0)):
            timed = {
                name: partial(one.ms, clock, getattr(one, kind))
                for name, (one, _) in warmed.items()
            }
            found |= in_rounds(timed, args.repeats, began + share * seconds)
    except torch.OutOfMemoryError as reason:
        skipped["the rest"] = str(reason).splitlines()[0][:150]
    for name, times in samples.items() if OURS in samples else ():
        ms, step = median(times), steps.get(name)
        rows.append(
            dict(
                name=name,
                dtype=setting.dtype,
                dropout=setting.dropout,
                **warmed[name][1],
                ms=ms,
                ratio=spread(times, samples[OURS]),
                step_ms=median(step) if step else None,
                step_ratio=spread(step, steps[OURS]) if step else None,
                tokens_per_second=setting.tokens / ms * 1000.0,
                of_matmuls=at_their_rate / ms,
                samples_ms=times,
            )
        )
    return rows


def main(argv=None):
    """Runs the benchmark. Returns 0, or 1 if the losses of the contestants differ."""
    parser = benchmark_parser(__doc__, repeats=9)
    parser.add_argument("--family", choices=FAMILIES, default="gpt2", help="default: gpt2")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--compile", action="store_true", help="also torch.compile's contestants")
    add_number(parser, "--seconds", None, "leave out contestants and rounds, to end in this time")
    args, status = parse_benchmark(parser, argv), 0
    for rows in blocks(args, partial(Setting, family=args.family), measure):
        losses = [row["loss"] for row in rows if not row["dropout"]]
        if losses and max(losses) - min(losses) > 2e-2 * max(losses):
            print(f"the contestants compute different losses: {losses}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
