"""Times a training step beside other libraries' models of the same shape, with the same weights.

Two figures for each contestant: forward and backward alone, and the whole step with clipping and
AdamW. benchmarks/README.md explains how to read the table. On a GPU the table has the peak of
forward and backward too, above what weights, gradients and optimizer hold before.
"""

import gc
import itertools
import math
import statistics
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone may not be installed

from benchmarks.contestants import GRAPH, OURS, PEERS, build_contestants
from benchmarks.engines import DTYPES, SETTINGS
from benchmarks.harness import (
    OutOfTime,
    Progress,
    add_number,
    benchmark_parser,
    blocks,
    clock_of,
    garbage_kept,
    in_rounds,
    parse_benchmark,
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
    config, shape = setting.model_config(), setting.shape
    b, s, layers = shape.batch_size, shape.seq_length, shape.num_layers
    sizes = Sizes(micro_batch_size=b, seq_length=s, padded_vocab_size=shape.vocab_size)
    described = [layer.operations for layer in describe_layers(config, sizes, layers)]
    operations = itertools.chain(*described, head_operations(config, sizes))
    calls = [call for one in operations if one.name != CORE for call in one.calls]
    matmuls = [one for call in calls for one in call.matmuls]
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
    """Runs the contestant twice. Returns its loss, and on a GPU its peak, launches and kernels."""
    is_cuda = device.type == "cuda"
    before = 0
    for _ in range(2):  # the first run builds kernels and workspaces
        one.clear()
        if is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        loss = one.run().item()
    peak = None
    if is_cuda and GRAPH not in one.name:  # a graph's memory was there before
        peak = torch.cuda.max_memory_allocated(device) - before
    launches, kernel_ms = kernels(one, device) if is_cuda else (None, None)
    one.clear()
    return loss, peak, launches, kernel_ms


def measure(setting, args, skipped):
    """Returns a row of each contestant that the memory is enough for.

    ms, step_ms: of forward and backward, and of the whole step.
    ratio, step_ratio: its time over that of ours without recomputation, over the rounds.
    launches, kernel_ms: on a GPU. If `ms` is far above them, the host does not keep up.
    of_matmuls: the model's FLOPs at the rate of its linear layers alone, over `ms`.
    peak_bytes: on a GPU, above what was there before.
    """
    began, seconds, progress = time.monotonic(), args.seconds or math.inf, Progress()
    contestants = build_contestants(setting, skipped, peers=args.peers, compiled=args.compile)
    first, running = {}, {}
    with suppress(OutOfTime):
        for one in contestants:  # a contestant that fails leaves the others alone
            progress(f"warming up {one.name}")
            try:
                first[one.name] = warm(one, setting.device)
                running[one.name] = one
            except (RuntimeError, ImportError, OutOfTime) as reason:
                skipped[one.name] = str(reason).splitlines()[0][:150]
                one.clear()
            gc.collect()
            if time.monotonic() > began + FOR_WARMING * seconds:
                skipped["those after " + one.name] = f"no time left of --seconds {args.seconds}"
                break
    clock, shape, config = clock_of(args), setting.shape, setting.model_config()
    run, linear_flops = linear_layers(setting)
    with garbage_kept():
        linear = in_rounds({LINEAR: partial(clock.ms, run)}, args.repeats)
        samples, steps = {}, {}
        try:
            for found, kind, share in ((samples, "run", FOR_WARMING + 0.2), (steps, "step", 1.0)):
                timed = {
                    name: partial(one.ms, clock, getattr(one, kind))
                    for name, one in running.items()
                }
                found |= in_rounds(timed, args.repeats, began + share * seconds)
        except torch.OutOfMemoryError as reason:
            skipped["the rest"] = str(reason).splitlines()[0][:150]
    sizes = dict(
        micro_batch_size=shape.batch_size,
        seq_length=shape.seq_length,
        padded_vocab_size=shape.vocab_size,
    )
    flops = step_flops(config, **sizes)
    rows = []
    for name, times in samples.items() if OURS in samples else ():
        loss, peak, launches, kernel_ms = first[name]
        ms, step = statistics.median(times), steps.get(name)
        alone = statistics.median(linear[LINEAR]) if linear else math.nan
        rows.append(
            dict(
                name=name,
                dtype=setting.dtype,
                dropout=setting.dropout,
                loss=loss,
                peak_bytes=peak,
                launches=launches,
                kernel_ms=kernel_ms,
                ms=ms,
                ratio=spread(times, samples[OURS]),
                step_ms=statistics.median(step) if step else None,
                step_ratio=spread(step, steps[OURS]) if step else None,
                tokens_per_second=setting.tokens / ms * 1000.0,
                of_matmuls=flops * alone / linear_flops / ms,
                samples_ms=times,
            )
        )
    return rows


def parse(argv):
    parser = benchmark_parser(__doc__, repeats=9)
    parser.add_argument("--family", choices=list(SETTINGS), default="gpt", help="default: gpt")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--compile", action="store_true", help="also torch.compile's contestants")
    add_number(parser, "--seconds", None, "leave out contestants and rounds, to end in this time")
    return parse_benchmark(parser, argv)


def main(argv=None):
    """Runs the benchmark. Returns 0, or 1 if the losses of the contestants differ."""
    args = parse(argv)
    status = 0
    for rows in blocks(args, SETTINGS[args.family], measure):
        losses = [row["loss"] for row in rows if not row["dropout"]]
        if losses and max(losses) - min(losses) > 2e-2 * max(losses):
            print(f"the contestants compute different losses: {losses}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
