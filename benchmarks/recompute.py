"""Measures memory and time of recomputation: our policies, and torch's and transformers' engines.

The engines are those of benchmarks/recompute_engines.py. The table has for each the kept bytes
after forward, the most bytes alive in forward and backward, the FLOPs, and the step's time. The
time comes from rounds in which every engine has its turn. benchmarks/README.md explains how to read
the table.
"""

import gc
import statistics
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone may not be installed

from benchmarks.contestants import GRAPH, as_graph
from benchmarks.engines import Setting, one_rank
from benchmarks.harness import (
    OutOfTime,
    Progress,
    benchmark_parser,
    blocks,
    clock_of,
    garbage_kept,
    in_rounds,
    parse_benchmark,
    spread,
)
from benchmarks.recompute_engines import NONE, build_engines, engine_names
from megatron_lite.config.model import ATTENTION_BACKENDS
from megatron_lite.memory.measure.live_storages import LiveStorages
from tests.support.flash_flops import FORMULAS


def footprint(engine, streams, start):
    """Measures one forward and backward of an engine. Every engine starts from the same random
    state.

    kept_bytes: the bytes alive after forward. peak_bytes: the most alive in forward and backward.
    They include neither parameters nor the gradients to which backward adds. They include each
    new gradient until it is added.
    """
    with torch.autograd.set_multithreading_enabled(False):  # a dispatch mode belongs to its thread
        streams.restore(start)
        with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
            engine.step()
        grads = [one.grad.zero_() for one in engine.model.parameters() if one.grad is not None]
        streams.restore(start)
        gc.collect()
        with LiveStorages() as live:
            loss = engine.forward()
            kept_bytes = live.total_bytes()
            loss.backward()
    return dict(
        kept_bytes=kept_bytes,
        peak_bytes=live.peak_bytes,
        flops=counter.get_total_flops(),
        loss=loss.item(),
        grad_norm=torch.stack([grad.double().norm() for grad in grads]).norm().item(),
    )


def measure(setting, args, skipped):
    """Measures all engines of one setting, and returns their rows.

    kept_ratio, extra_flops: relative to the same model without recomputation. transformers'
        engines are compared with transformers' model.
    time_ratio: its time over that of our `none`, or of our `none` as a CUDA graph, over the rounds.
    rival_time_ratio: over that of `rival`, the policy of ours that keeps the same tensors, if the
        engine is not ours. Above 1 ours is faster.
    """
    parallel = one_rank(setting)
    built = build_engines(setting, parallel, skipped)
    chosen = args.engines or [one.name for one in built]
    engines = [one for one in built if one.name in chosen or one.name.endswith(NONE)]
    start, footprints, progress = parallel.rng.snapshot(), {}, Progress()
    steps, clock = {}, clock_of(args)
    with garbage_kept():
        with suppress(OutOfTime):
            for one in engines:
                progress(f"bytes and FLOPs of {one.name}")
                footprints[one.name] = footprint(one, parallel.rng, start)
                steps[one.name] = partial(clock.ms, one.step)
                if args.cuda_graph and one.rival is None and "@host" not in one.name:
                    graph = as_graph(lambda *_, one=one, **__: one.step(), parallel.rng, ())
                    replay = partial(graph, (), learning_rate=0.0)
                    steps[one.name + GRAPH] = partial(clock.ms, replay)
        samples = in_rounds(steps, args.repeats)
    rows, by_name = [], {one.name: one for one in engines}
    for name in {**by_name, **steps}:
        engine = by_name[name.removesuffix(GRAPH)]
        base = footprints.get(f"transformers, {NONE}" if name.startswith("transf") else NONE)
        none = NONE + GRAPH if name.endswith(GRAPH) else NONE
        if base is None or none not in samples or name not in samples:
            skipped[name] = "no time left"
            continue
        found, times, rival = footprints[engine.name], samples[name], engine.rival
        rows.append(
            dict(
                dtype=setting.dtype,
                dropout=setting.dropout,
                engine=name,
                kept_ratio=found["kept_bytes"] / base["kept_bytes"],
                extra_flops=found["flops"] / base["flops"] - 1.0,
                ms=statistics.median(times),
                samples_ms=times,
                time_ratio=spread(times, samples[none]),
                rival=rival,
                rival_time_ratio=spread(times, samples[rival]) if rival in samples else None,
                **found,
            )
        )
    return rows


def parse(argv):
    parser = benchmark_parser(__doc__, repeats=9)
    parser.add_argument(
        "--attention-backend",
        choices=ATTENTION_BACKENDS,
        default="auto",
        help="of megatron_lite; default: auto, which is unfused on a CPU with dropout, else flash",
    )
    parser.add_argument("--compile", action="store_true", help="ours has its compiled kernels")
    parser.add_argument(
        "--cuda-graph", action="store_true", help="time ours as CUDA graphs too, but for @host"
    )
    parser.add_argument(
        "--engines",
        nargs="+",
        default=[],
        metavar="NAME",
        help='only these rows of the table and those without recomputation, such as "uniform 1"',
    )
    args = parse_benchmark(parser, argv)
    known = engine_names(args.shape.num_layers)
    for name in set(args.engines) - known:
        parser.error(f"--engines {name!r} must be one of {', '.join(sorted(known))}")
    return args


def main(argv=None):
    """Runs the benchmark. Returns 0."""
    args = parse(argv)
    own = dict(attention_backend=args.attention_backend, compiled=args.compile)
    for _ in blocks(args, partial(Setting, **own), measure):
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
