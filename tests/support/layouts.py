"""Runs a small training in every layout over data-parallel ranks. Its results are whole tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor

import megatron_lite.parallel.fsdp  # noqa: F401  (0.6 s: once here, not in every forked rank)
from megatron_lite.config.optimizer_settings import OptimizerConfig
from megatron_lite.config.parallel import DataParallelConfig
from megatron_lite.model.gpt import shard_model_
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.collectives import all_reduce_
from tests.support.equality import variant_config
from tests.support.models import (
    build_tiny_model,
    sample_tokens,
    specs_of,
    whole_tensors,
    with_new_streams,
)

SMALL = dict(overlap_grad_reduce=True, ddp_bucket_size=3000)  # of about 20,000 parameters
LAYOUTS = {
    "replicated": DataParallelConfig(),
    "overlap": DataParallelConfig(**SMALL),
    "zero1": DataParallelConfig(use_distributed_optimizer=True),
    "zero1, overlap": DataParallelConfig(
        use_distributed_optimizer=True, overlap_param_gather=True, **SMALL
    ),
    "fsdp2": DataParallelConfig(use_torch_fsdp2=True),
    "fsdp2, no reshard": DataParallelConfig(
        use_torch_fsdp2=True, torch_fsdp2_reshard_after_forward=False
    ),
    "fsdp2, memory-efficient": DataParallelConfig(
        use_torch_fsdp2=True, fsdp_memory_efficient_wrapping=True
    ),
}


@dataclass(frozen=True)
class Run:
    """The result of a training. All tensors are whole.

    losses, grad_norms, zeros: the loss, the gradient norm and the number of zero gradients by step.
    grads: the gradients of the last step, clipped.
    states: the optimizer's states as states[name][key].
    """

    losses: list[float]
    grad_norms: list[float]
    zeros: list[int]
    params_norm: float
    weights: dict[str, Tensor]
    grads: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]


def build(name, parallel, config, *, clip_grad=1e9, settings=None, **model):
    """Returns a tiny model of a variant in the layout, and its optimizer.

    The first weights and the random numbers are the same every time.
    settings: the optimizer's config, instead of clip_grad.
    """
    fresh = with_new_streams(parallel)
    built = build_tiny_model(variant_config(name), fresh, **model)
    shard_model_(built, fresh, config)
    settings = settings or OptimizerConfig(clip_grad=clip_grad)
    return built, Optimizer(built, settings, fresh, config)


def backward(model, optimizer, parallel, step, *, sequences=12, micro_batches=2):
    """Computes one step's gradients, in micro-batches. Returns the mean loss.

    The sequences are the same for any number of ranks that share them.
    """
    optimizer.zero_grad()
    mine = [
        part.chunk(parallel.dp_cp_size)[parallel.dp_cp_rank].chunk(micro_batches)
        for part in sample_tokens(step, batch=sequences)
    ]
    total = torch.zeros((), dtype=torch.float64)
    for number, (tokens, labels) in enumerate(zip(*mine, strict=True)):
        if number == micro_batches - 1:
            optimizer.sync_next_backward()
        loss = model(tokens, labels).mean() / (micro_batches * parallel.dp_cp_size)
        loss.backward()
        total += loss.detach()
    return all_reduce_(total, parallel.dp_cp_group).item()


def train(
    name, parallel, config, *, steps, clip_grad=1e9, rate=0.003, micro_batches=2, **model_options
):
    """Trains a tiny model by `steps` updates in the layout."""
    model, optimizer = build(name, parallel, config, clip_grad=clip_grad, **model_options)
    losses, norms, zeros = [], [], []
    for step in range(steps):
        losses.append(backward(model, optimizer, parallel, step, micro_batches=micro_batches))
        norms.append(optimizer.step(rate).grad_norm.item())
        zeros.append(int(optimizer.num_zeros_in_grad()))
    specs = specs_of(model)
    held = {piece.name: piece.grad for piece in optimizer.layout.pieces}
    states = {key: optimizer.whole_states(key) for key in specs}
    flat = {(key, kind): value for key, state in states.items() for kind, value in state.items()}
    whole_states = whole_tensors(
        {"/".join(names): value for names, value in flat.items()},
        {"/".join(names): specs[names[0]] for names in flat},
        parallel,
    )
    return Run(
        losses,
        norms,
        zeros,
        optimizer.params_norm().item(),
        weights=whole_tensors({key: optimizer.weight(key) for key in specs}, specs, parallel),
        grads=whole_tensors(
            {key: optimizer.layout.whole(key, held.get(key)) for key in specs}, specs, parallel
        ),
        states={
            key: {kind: whole_states[f"{key}/{kind}"] for kind in state}
            for key, state in states.items()
        },
    )


def differing(expected, actual):
    """Returns the names of gradients, weights and states that are not equal to the bit."""
    pairs = [(f"grad of {key}", value, actual.grads[key]) for key, value in expected.grads.items()]
    pairs += [(key, value, actual.weights[key]) for key, value in expected.weights.items()]
    pairs += [
        (f"{key}/{kind}", value, actual.states[key][kind])
        for key, state in expected.states.items()
        for kind, value in state.items()
    ]
    return [key for key, mine, other in pairs if not torch.equal(mine, other)]
