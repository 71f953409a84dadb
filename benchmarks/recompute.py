"""Measures memory and time of recomputation: our policies, and torch's and transformers' engines.

ours            `policies` by name, as flags; all share one set of weights
torch ..        our model and weights with torch.utils.checkpoint around each layer, MLP or core
                attention
transformers    GPT2LMHeadModel of the same shape, without and with
                gradient_checkpointing_enable

The table has for each the kept bytes after forward, the most bytes alive in forward and backward,
the FLOPs, and the step's time. The time comes from rounds in which every engine has its turn.
benchmarks/README.md explains how to read the table.
"""

import gc
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, ".")  # the root of the clone, which may not be installed

from benchmarks.contestants import GRAPH, as_graph
from benchmarks.engines import SEED, Setting, one_rank, our_model
from benchmarks.harness import (
    OutOfTime,
    benchmark_parser,
    blocks,
    clock_of,
    in_rounds,
    parse_benchmark,
    progress,
    spread,
)
from benchmarks.peers import of_logits, transformers_model
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.memory.measure.live_storages import LiveStorages
from megatron_lite.recompute.schedule import plan_stage
from tests.support.flash_flops import FORMULAS

NONE = "none"


class Engine(NamedTuple):
    """A model under one kind of recomputation.

    forward: returns the loss, 0-d, with its graph.
    rival: the policy of ours that keeps the same tensors. None for an engine of ours.
    """

    name: str
    model: nn.Module
    forward: Callable[[], Tensor]
    rival: str | None = None

    def step(self):
        """Drops the gradients, then runs forward, loss and backward.

        It leaves out the optimizer, which is the same for all engines.
        """
        self.model.zero_grad()
        self.forward().backward()


def policies(num_layers):
    """Returns our policies by name."""
    regions = ("core_attn", "mlp", "layernorm+activation", "core_attn+layernorm+activation")
    as_named = (
        "*:pointwise",
        "*:pointwise+core_attn",
        "every-2:full",
        "*:ops(matmul,attention)",
        "*:ops(matmul/2,attention)",
        "*:full@host",
        "*:pointwise@host",
        "*:none@host",
    )
    texts = {
        NONE: "*:none",
        "uniform 1": "*:full",
        "uniform 2": "*:full/2",
        f"block {num_layers // 2}": f"0-{num_layers // 2 - 1}:full",
        **{name: f"*:{name}" for name in (*regions, "core_attn+layernorm+mlp")},
        **{text: text for text in as_named},
        "every-2:full, else pointwise": "every-2:full; *:pointwise+core_attn",
    }
    table = {name: RecomputeConfig(recompute_policy=text) for name, text in texts.items()}
    whole = replace(table["uniform 1"], recompute_tail_skip=False)
    return {**table, "uniform 1, no tail skip": whole}


# Peers with torch.utils.checkpoint: the policy of ours that rebuilds the same, the module of a
# layer that the checkpoint wraps, and n for every n-th layer, as torchtune does it.
TORCH_PEERS = {
    "torch layers": ("uniform 1", lambda layer: layer, 1),
    "torch every-2": ("every-2:full", lambda layer: layer, 2),
    "torch core_attn": ("core_attn", lambda layer: layer.self_attention.core_attention, 1),
    "torch mlp": ("mlp", lambda layer: layer.mlp, 1),
}
MODES = {"reentrant": True, "non-reentrant": False}


def build_engines(setting, parallel, skipped):
    """Yields the engines that can run here, NONE first. skipped: gets the others, and why.

    torch's checkpoint restores the generator's state but not our named streams. With dropout its
    replays of attention therefore draw other masks than the forward. The time is the same, but a
    training would be wrong.
    """
    batch, num_layers = setting.batch(), setting.shape.num_layers
    weights = dict(our_model(setting, parallel).named_parameters())

    def ours(name, config, rival=None):
        plan = plan_stage(config, num_layers)
        model = our_model(setting, parallel, plan=plan, weights=weights)
        return Engine(name, model, lambda: model(batch.tokens, batch.labels).mean(), rival)

    for name, config in policies(num_layers).items():
        if name.endswith("@host") and setting.device.type == "cpu":
            skipped[name] = "on a CPU the host's memory is the device's"
        else:
            yield ours(name, config)
    for name, (rival, part, step) in TORCH_PEERS.items():
        for mode, use_reentrant in MODES.items():
            engine = ours(f"{name}, {mode}", RecomputeConfig(), rival)
            for layer in list(engine.model.decoder.layers)[::step]:
                module = part(layer)
                module.forward = partial(checkpoint, module.forward, use_reentrant=use_reentrant)
            yield engine
    torch.manual_seed(SEED)
    model = None
    try:
        for mode, use_reentrant in {NONE: None, **MODES}.items():
            model = transformers_model(setting, like=model, use_reentrant=use_reentrant)
            rival = NONE if use_reentrant is None else "uniform 1"
            yield Engine(f"transformers, {mode}", model, of_logits(model, setting), rival)
    except ImportError as reason:
        skipped["transformers"] = str(reason)


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
    built = list(build_engines(setting, parallel, skipped))
    names = [one.name for one in built]
    chosen = args.engines or names
    skipped |= dict.fromkeys({*chosen}.difference(names, skipped), "there is no such engine here")
    start, clock = parallel.rng.snapshot(), clock_of(args)
    measured, steps = {}, {}
    try:
        for one in built:
            if one.name not in chosen and not one.name.endswith(NONE):
                continue
            progress(f"bytes and FLOPs of {one.name}")
            found = footprint(one, parallel.rng, start)
            measured[one.name], steps[one.name] = (one, found), partial(clock, one.step)
            if args.cuda_graph and one.rival is None and "@host" not in one.name:
                graph = as_graph(lambda *_, one=one, **__: one.step(), parallel.rng, ())
                measured[one.name + GRAPH] = one, found
                steps[one.name + GRAPH] = partial(clock, partial(graph, (), learning_rate=0.0))
    except OutOfTime as reason:
        skipped["the other engines"] = str(reason)
    samples, rows = in_rounds(steps, args.repeats), []
    for name, (engine, found) in measured.items():
        base = f"transformers, {NONE}" if name.startswith("transformers") else NONE
        none = NONE + GRAPH if name.endswith(GRAPH) else NONE
        if not {name, none} <= samples.keys() or base not in measured:
            skipped[name] = "no time left"
            continue
        without, times, rival = measured[base][1], samples[name], engine.rival
        rows.append(
            dict(
                dtype=setting.dtype,
                dropout=setting.dropout,
                engine=name,
                kept_ratio=found["kept_bytes"] / without["kept_bytes"],
                extra_flops=found["flops"] / without["flops"] - 1.0,
                ms=statistics.median(times),
                samples_ms=times,
                time_ratio=spread(times, samples[none]),
                rival=rival,
                rival_time_ratio=spread(times, samples[rival]) if rival in samples else None,
                **found,
            )
        )
    return rows


def main(argv=None):
    """Runs the benchmark. Returns 0."""
    parser = benchmark_parser(__doc__, repeats=9)
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
    for _ in blocks(args, partial(Setting, compiled=args.compile), measure):
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
