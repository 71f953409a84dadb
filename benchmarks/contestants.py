"""The contestants of smoke.py and step_time.py: one model on one rank, built by several libraries.

Three models: "gpt2" has learned positions, LayerNorm, biases, gelu and tied embeddings; "llama" has
rotary positions, RMSNorm, swiglu, no biases and an output layer of its own; "qwen3_moe" has experts
in place of the MLP, and norms of queries and keys. All contestants of a
model have the weights of ours, so their losses are equal up to rounding.
"""

from contextlib import contextmanager, nullcontext
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
IN_16_BITS = dict(
    use_precision_aware_optimizer=True,
    main_grads_dtype="bf16",
    exp_avg_dtype="bf16",
    exp_avg_sq_dtype="bf16",
)
OUR_POLICIES = ("none", "full", "pointwise")
PEERS = {
    "plain": (("gpt2",), others.plain),
    "transformers": (("gpt2", "llama", "qwen3_moe"), others.transformers),
    "litgpt": (("llama",), others.litgpt),
    "megatron-core": (("gpt2", "llama"), others.megatron),
}


def build_contestants(setting, *, peers=tuple(PEERS), compiled=False):
    """Returns the contestants, and who is left out and why. Ours without recomputation is the
    first; the others follow by how much they tell.

    peers: the libraries to compare with, if they have the model (PEERS).
    compiled: whether contestants of torch.compile are built too. On a GPU ours are there as a CUDA
        graph, with deterministic algorithms, and with states in 16 bits besides.
    """
    model = our_model(setting, one_rank(setting))
    weights = dict(model.named_parameters())
    optimizer = our_optimizer(model, setting)
    first, *others = _ours(model, optimizer, setting, [f"ours, {name}" for name in OUR_POLICIES])
    found, late, skipped = [first], list[Contestant](), dict[str, str]()
    if compiled:
        own = replace(setting, compiled=True)
        build = partial(_ours, our_model(own, one_rank(own), weights=weights), optimizer, own)
        try:
            found += build([OURS, "ours, full"], mode=COMPILED)
            if setting.device.type == "cuda":
                found += build([OURS, "ours, full"], mode=GRAPH)
                found += build([OURS], mode=DETERMINISTIC)
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
    if compiled and setting.device.type == "cuda":
        try:
            model = our_model(own, one_rank(own))
            model.load_state_dict(weights)
            found += _ours(
                model, our_optimizer(model, own, **IN_16_BITS), own, [OURS], mode=ROUNDED
            )
        except torch.OutOfMemoryError as reason:
            skipped["ours, none" + ROUNDED] = str(reason).splitlines()[0]
    # the best ones of the peers first: the compiler may take more time than there is
    found += sorted(late, key=lambda one: "Liger" not in one.name) + others
    return found, skipped


def _ours(model, optimizer, setting, names, *, mode=""):
    """Yields our contestants, of one model and its optimizer. mode: how they run, see above."""
    stages, parallel = ModelStages([model]), one_rank(setting)
    runner = StageRunner(stages, parallel, loss_in_one_pass=setting.loss_in_one_pass)
    batch, num_layers = setting.batch(), setting.shape.num_layers
    model.loss_chunk_size = setting.loss_chunk_size
    around = deterministic if mode == DETERMINISTIC else nullcontext

    def run(plan, batches, **_):
        model.decoder.plan = plan
        optimizer.zero_grad()
        with around():
            return runner.train(batches, loss_factor=1.0, before_last=optimizer.sync_next_backward)

    def step(plan, batches, learning_rate, **_):
        model.decoder.plan = plan
        with around():
            return train_step(runner, optimizer, batches, learning_rate=learning_rate).loss

    def called(way):
        if mode != GRAPH:
            return partial(way, (batch,), learning_rate=LEARNING_RATE)
        recorder = Recorder(way, parallel.rng)
        for _ in range(LEAST_WARMUP + 1):
            recorder.run((batch,), learning_rate=0.0)  # the others begin with the same weights
        return partial(recorder.run, (batch,), learning_rate=LEARNING_RATE)

    for name in names:
        policy = RecomputeConfig(recompute_policy=f"*:{name.split(', ')[1]}")
        plan = plan_stage(policy, num_layers)
        ways = (called(partial(way, plan)) for way in (run, step))
        yield Contestant(name + mode, optimizer.zero_grad, *ways, plan)


@contextmanager
def deterministic():
    """As under --deterministic-mode."""
    use_deterministic_algorithms()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
