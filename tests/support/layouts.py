"""The same small training in every layout over data-parallel ranks, and what came of it as whole tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import megatron_lite.optim.fsdp
import megatron_lite.parallel.fsdp  # noqa: F401  (0.6 s, here once instead of in every forked rank)
from megatron_lite.config.data_parallel import DataParallelConfig
from megatron_lite.config.training import OptimizerConfig
from megatron_lite.model.gpt import GPTModel
from megatron_lite.model.sharding import shard_model_
from megatron_lite.optim.adamw import Optimizer
from megatron_lite.optim.loss_scale import LossScale
from megatron_lite.parallel.collectives import all_reduce_
from megatron_lite.parallel.parameter_spec import spec_of
from megatron_lite.parallel.rng import RngStreams
from megatron_lite.parallel.state import ParallelState
from tests.support.equality import variant_config
from tests.support.models import build_tiny_model, sample_tokens, whole_tensor

SMALL = dict(overlap_grad_reduce=True, ddp_bucket_size=3000)  # of some 20,000 parameters
LAYOUTS = {
    "replicated": DataParallelConfig(),
    "overlap": DataParallelConfig(**SMALL),
    "zero1": DataParallelConfig(use_distributed_optimizer=True),
    "zero1, overlap": DataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True, **SMALL),
    "fsdp2": DataParallelConfig(use_torch_fsdp2=True),
    "fsdp2, no reshard": DataParallelConfig(use_torch_fsdp2=True, torch_fsdp2_reshard_after_forward=False),
    "fsdp2, memory-efficient": DataParallelConfig(use_torch_fsdp2=True, fsdp_memory_efficient_wrapping=True),
}


@dataclass(frozen=True)
class Run:
    """Of each step the loss, the gradient norm and the number of zero gradients. grads: of the last step, clipped. All whole, and
    states[name][key]. piece_elements: how many elements this rank's optimizer works on."""

    losses: list[float]
    grad_norms: list[float]
    zeros: list[int]
    params_norm: float
    weights: dict[str, Tensor]
    grads: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]
    piece_elements: int


def build(name: str, parallel: ParallelState, config: DataParallelConfig, *, clip_grad: float = 1e9,
          loss_scale: LossScale | None = None, **model: object) -> tuple[GPTModel, Optimizer]:
    """A tiny model of a variant in the layout, from the same weights and random numbers every time."""
    fresh = replace(parallel, rng=RngStreams(parallel.device, seed=7, tp_rank=parallel.tp_rank, dp_rank=parallel.data_rank))
    built = build_tiny_model(variant_config(name), fresh, **model)
    shard_model_(built, fresh, config)
    return built, Optimizer(built, OptimizerConfig(clip_grad=clip_grad), fresh, config, loss_scale=loss_scale)


def backward(model: GPTModel, optimizer: Optimizer, parallel: ParallelState, step: int, *, sequences: int = 12,
             micro_batches: int = 2) -> float:
    """One step's gradients of the same sequences however many ranks share them, in micro-batches. Returns the mean loss."""
    optimizer.zero_grad()
    mine = [part.chunk(parallel.data_size)[parallel.data_rank].chunk(micro_batches)
            for part in sample_tokens(step, batch=sequences)]
    total = torch.zeros((), dtype=torch.float64)
    for number, (tokens, labels) in enumerate(zip(*mine, strict=True)):
        if number == micro_batches - 1:
            optimizer.sync_next_backward()
        loss = model.loss(tokens, labels).mean() / (micro_batches * parallel.data_size)
        loss.backward()
        total += loss.detach()
    return all_reduce_(total, parallel.data_group).item()


def train(name: str, parallel: ParallelState, config: DataParallelConfig, *, steps: int, clip_grad: float = 1e9,
          rate: float = 0.003, micro_batches: int = 2, **model_options: object) -> Run:
    """`steps` updates in the layout."""
    model, optimizer = build(name, parallel, config, clip_grad=clip_grad, **model_options)
    losses, norms, zeros = [], [], []
    for step in range(steps):
        losses.append(backward(model, optimizer, parallel, step, micro_batches=micro_batches))
        norms.append(optimizer.step(rate).grad_norm.item())
        zeros.append(int(optimizer.num_zeros_in_grad()))
    specs = {key: spec_of(parameter) for key, parameter in model.named_parameters()}
    held = {piece.name: piece.grad for piece in optimizer.layout.pieces}

    def whole(value: Tensor, key: str) -> Tensor:
        marked = value.detach().clone()
        marked.parameter_spec = specs[key]  # type: ignore[attr-defined]
        return whole_tensor(marked, marked, parallel)

    return Run(losses, norms, zeros, optimizer.params_norm().item(),
               weights={key: whole(optimizer.weight(key), key) for key in specs},
               grads={key: whole(optimizer.layout.whole(key, held.get(key)), key) for key in specs},
               states={key: {kind: whole(value, key) for kind, value in optimizer.whole_states(key).items()} for key in specs},
               piece_elements=sum(piece.stop - piece.start for piece in optimizer.layout.pieces))


def differing(expected: Run, actual: Run) -> list[str]:
    """Names of gradients, weights and states that are not equal to the bit."""
    pairs = [(f"grad of {key}", value, actual.grads[key]) for key, value in expected.grads.items()]
    pairs += [(key, value, actual.weights[key]) for key, value in expected.weights.items()]
    pairs += [(f"{key}/{kind}", value, actual.states[key][kind]) for key, state in expected.states.items()
              for kind, value in state.items()]
    return [key for key, mine, other in pairs if not torch.equal(mine, other)]
