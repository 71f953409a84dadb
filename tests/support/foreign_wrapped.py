"""Trains models that are not ours inside DistributedDataParallel and torch.compile."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.foreign import SEED, outcome, two_micro_batches


def train_in_ddp(foreign, prepare, *, find_unused, static=False):
    """Trains two steps of two micro-batches each. Every rank must call this, and has its own data.

    DDP reduces the gradients in the backward of every micro-batch.
    """
    torch.manual_seed(SEED)
    model = foreign.build()
    model = (prepare(model) if prepare is not None else None) or model
    wrapped = DistributedDataParallel(
        model, find_unused_parameters=find_unused, static_graph=static
    )
    torch.manual_seed(SEED + 1 + dist.get_rank())
    losses = []
    for step in range(2):  # two, since DDP rebuilds its buckets after the first
        model.zero_grad()
        for number in range(2):
            loss = foreign.loss(wrapped, 10 * dist.get_rank() + 2 * step + number)
            losses.append(loss.detach())
            loss.backward()
    return outcome(model, losses)


def compile_around(model, foreign, backend):
    """Compiles the whole model as one function."""
    return torch.compile(model, backend=backend)


def compile_layers(model, foreign, backend):
    """Compiles each layer by `layer.compile()`, including its policy."""
    for name in foreign.lists:
        for layer in model.get_submodule(name):
            layer.compile(backend=backend)
    return model


def compile_forwards(model, foreign, backend):
    """Compiles each layer's forward, which a policy may wrap afterwards."""
    for name in foreign.lists:
        for layer in model.get_submodule(name):
            layer.forward = torch.compile(layer.forward, backend=backend)
    return model


def train_compiled(foreign, prepare, *, wrap, backend, first=False):
    """Trains two micro-batches of a compiled model.

    backend: "aot_eager" keeps the arithmetic of eager mode.
    first: compile before `prepare` puts on the policy.
    """
    torch.compiler.reset()
    torch.manual_seed(SEED)
    model = foreign.build()
    if first:
        model = wrap(model, foreign, backend)
    model = (prepare(model) if prepare is not None else None) or model
    if not first:
        model = wrap(model, foreign, backend)
    torch.manual_seed(SEED + 1)
    return two_micro_batches(model, foreign)
