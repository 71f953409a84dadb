"""The contestants of smoke.py and step_time.py: one model on one rank, built by several libraries.

Three models: "gpt2" has learned positions, LayerNorm, biases, gelu and tied embeddings; "llama" has
rotary positions, RMSNorm, swiglu, no biases and an output layer of its own; "qwen3_moe" has experts
in place of the MLP, and norms of queries and keys. All contestants of a
model have the weights of ours, so their losses are equal up to rounding.
"""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from benchmarks import peers as others
from benchmarks.engines import LEARNING_RATE, one_rank, our_model, our_optimizer
from benchmarks.peers import Contestant
from megatron_lite.config.checks import InputError
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.model.gpt import ModelStages
from megatron_lite.recompute.schedule import plan_stage
from megatron_lite.training.deterministic import use_deterministic_algorithms
from megatron_lite.training.graphs import LEAST_WARMUP, Recorder
from megatron_lite.training.step import StageRunner, train_step

OURS, PLAIN = "ours, none", "plain torch"
COMPILED, GRAPH, DETERMINISTIC = ", compiled", ", CUDA graph", ", deterministic"
ROUNDED = ", 16-bit states"  # as the peers have: all that is summed or kept of gradients
LATE = ("transformers", "litgpt")  # what the compiler makes of them comes after the others
PEERS = {
    "plain": (("gpt2",), others.plain),
    "transformers": (("gpt2", "llama", "qwen3_moe"), others.transformers),
    "litgpt": (("llama",), others.litgpt),
    "megatron-core": (("gpt2", "llama"), others.megatron),
}


def build_contestants(setting, skipped, *, peers=tuple(PEERS), compiled=False):
    """Yields the contestants, each built when it is asked for. Ours without recomputation is the
    first; the others follow by how much they tell.

    skipped: gets who is left out, and why.
    peers: the libraries to compare with, if they have the model (PEERS).
    compiled: whether contestants of torch.compile are built too. On a GPU ours are there as a CUDA
        graph, with deterministic algorithms, and with states in 16 bits besides.
    """
    model = our_model(setting, one_rank(setting))
    weights, late = dict(model.named_parameters()), list[Contestant]()
    optimizer = our_optimizer(model, setting)
    yield from _ours(model, optimizer, setting, [OURS])
    own = replace(setting, compiled=compiled)
    fused = our_model(own, one_rank(own), weights=weights)
    ours, modes = partial(_ours, fused, optimizer, own), ()
    if compiled:
        modes = (COMPILED, GRAPH) if setting.device.type == "cuda" else (COMPILED,)
    building = {OURS + mode: partial(ours, [OURS], mode=mode) for mode in modes}
    for library in peers:
        families, theirs = PEERS[library]
        if setting.family in families:
            building[library] = partial(theirs, setting, weights, compiled=compiled)
    if GRAPH in modes:
        building[OURS + ROUNDED] = partial(_rounded, own, weights)
        building[OURS + DETERMINISTIC] = partial(ours, [OURS], mode=DETERMINISTIC)
    building |= {"full" + mode: partial(ours, ["ours, full"], mode=mode) for mode in modes}
    for name, build in building.items():
        try:
            for one in build():
                if name in LATE and one.name.endswith(COMPILED):
                    late.append(one)
                else:
                    yield one
        except (ImportError, InputError, torch.OutOfMemoryError) as reason:
            skipped[name] = str(reason).splitlines()[0]
    yield from late
    yield from _ours(model, optimizer, setting, ["ours, full", "ours, pointwise"])


def as_graph(step, rng, batches):
    """Returns the step as a CUDA graph, which the host launches at once."""
    recorder = Recorder(step, rng)
    for _ in range(LEAST_WARMUP + 1):
        recorder.run(batches, learning_rate=0.0)  # the others begin with the same weights
    return recorder.run


def _rounded(setting, weights):
    """Returns ours with all that is summed or kept of gradients in 16 bits."""
    model = our_model(setting, one_rank(setting))
    model.load_state_dict(weights)
    optimizer = our_optimizer(
        model,
        setting,
        use_precision_aware_optimizer=True,
        main_grads_dtype="bf16",
        exp_avg_dtype="bf16",
        exp_avg_sq_dtype="bf16",
    )
    return _ours(model, optimizer, setting, [OURS], mode=ROUNDED)


def _ours(model, optimizer, setting, names, *, mode=""):
    """Yields our contestants, of one model and its optimizer. mode: how they run, see above."""
    stages, parallel = ModelStages([model]), one_rank(setting)
    runner = StageRunner(stages, parallel, loss_in_one_pass=setting.loss_in_one_pass)
    batch, num_layers = setting.batch(), setting.shape.num_layers
    model.loss_chunk_size = setting.loss_chunk_size

    def run(plan, batches, **_):
        model.decoder.plan = plan
        optimizer.zero_grad()
        return runner.train(batches, loss_factor=1.0, before_last=optimizer.sync_next_backward)

    def step(plan, batches, learning_rate, **_):
        model.decoder.plan = plan
        return train_step(runner, optimizer, batches, learning_rate=learning_rate).loss

    def called(way):
        if mode == DETERMINISTIC:
            way = deterministic()(way)
        if mode == GRAPH:
            way = as_graph(way, model.context.rng, (batch,))
        return partial(way, (batch,), learning_rate=LEARNING_RATE)

    for name in names:
        policy = RecomputeConfig(recompute_policy=f"*:{name.split(', ')[1]}")
        plan = plan_stage(policy, num_layers)
        ways = (called(partial(way, plan)) for way in (run, step))
        yield Contestant(name + mode, optimizer.zero_grad, *ways)


@contextmanager
def deterministic():
    """As under --deterministic-mode."""
    use_deterministic_algorithms()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
