"""The contestants of smoke.py and step_time.py: one model on one rank, built by several libraries.

Three models: "gpt2" has learned positions, LayerNorm, biases, gelu and tied embeddings; "llama" has
rotary positions, RMSNorm, swiglu, no biases and an output layer of its own; "qwen3_moe" has experts
in place of the MLP, and norms of queries and keys. All contestants of a
model have the weights of ours, so their losses are equal up to rounding.
"""

from dataclasses import replace
from functools import partial

import torch

from benchmarks import peers as others
from benchmarks.engines import LEARNING_RATE, one_rank, our_model, our_optimizer
from benchmarks.peers import Contestant
from megatron_lite.config.checks import InputError
from megatron_lite.config.parallel import DataParallelConfig
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.model.gpt import ModelStages
from megatron_lite.recompute.schedule import plan_stage
from megatron_lite.training.graphs import LEAST_WARMUP, Recorder
from megatron_lite.training.step import StageRunner, train_step

OURS, PLAIN, COMPILED = "ours, none", "plain torch", ", compiled"
OUR_POLICIES = ("none", "full", "pointwise")
PEERS = {
    "plain": (("gpt2",), others.plain),
    "transformers": (("gpt2", "llama", "qwen3_moe"), others.transformers),
}


def build_contestants(setting, *, peers=tuple(PEERS), compiled=False):
    """Returns the contestants, and who is left out and why. Ours without recomputation is the
    first; the others follow by how much they tell.

    peers: the libraries to compare with, if they have the model (PEERS).
    compiled: whether contestants of torch.compile are built too.
    """
    model = our_model(setting, one_rank(setting))
    weights = {name: one.detach() for name, one in model.named_parameters()}
    first, *others = _ours(model, setting, [f"ours, {name}" for name in OUR_POLICIES])
    found, late, skipped = [first], list[Contestant](), dict[str, str]()
    if compiled:
        try:
            own = replace(setting, compiled=True)
            model = our_model(own, one_rank(own))
            modes = {COMPILED: False, ", CUDA graph": True}
            for mode, captured in list(modes.items())[: 1 + (setting.device.type == "cuda")]:
                ones = _ours(model, own, [OURS, "ours, full"], captured=captured)
                found += [one._replace(name=one.name + mode) for one in ones]
        except (InputError, torch.OutOfMemoryError) as reason:
            skipped["ours, compiled"] = str(reason).splitlines()[0]
    for library in peers:
        families, build = PEERS[library]
        if setting.family in families:
            try:
                theirs = build(setting, weights, compiled=compiled)
            except (ImportError, torch.OutOfMemoryError) as reason:
                skipped[library] = str(reason).splitlines()[0]
                continue
            for one in theirs:
                (late if one.name.endswith(COMPILED) else found).append(one)
    # the best ones of the peers first: the compiler may take more time than there is
    found += sorted(late, key=lambda one: "Liger" not in one.name) + others
    return found, skipped


def _ours(model, setting, names, *, captured=False):
    """Yields our contestants. They share one model and its optimizer.

    captured: whether a CUDA graph runs them, as under --cuda-graph-impl.
    """
    stages, parallel = ModelStages([model]), one_rank(setting)
    optimizer = our_optimizer(stages, parallel, DataParallelConfig())
    runner = StageRunner(stages, parallel, loss_in_one_pass=setting.loss_in_one_pass)
    batch, num_layers = setting.batch(), setting.shape.num_layers
    model.loss_chunk_size = setting.loss_chunk_size

    def run(plan, batches, **_):
        model.decoder.plan = plan
        return runner.train(batches, loss_factor=1.0, before_last=optimizer.sync_next_backward)

    def step(plan, batches, learning_rate, **_):
        model.decoder.plan = plan
        return train_step(runner, optimizer, batches, learning_rate=learning_rate).loss

    def called(way):
        call = partial(way, (batch,), learning_rate=LEARNING_RATE)
        if not captured:
            return call
        recorder = Recorder(way, parallel.rng)
        call = partial(recorder.run, (batch,), learning_rate=LEARNING_RATE)
        for _ in range(LEAST_WARMUP + 1):
            call()
        optimizer.zero_grad()
        return call

    for name in names:
        policy = RecomputeConfig(recompute_policy=f"*:{name.split(', ')[1]}")
        plan = plan_stage(policy, num_layers)
        ways = (called(partial(way, plan)) for way in (run, step))
        yield Contestant(name, optimizer.zero_grad, *ways, plan)
