"""AdamW over pieces of a model's parameters, with float32 master weights where the model is bf16 or fp16.

torch's fused AdamW does the arithmetic. A step whose gradient norm or loss is not finite changes nothing (torch's `found_inf`),
which every rank decides alike from the same global norm, on the device, without waiting for it. It lowers the loss scale, if any.
Nor does a step whose loss is a spike, where one is looked for (spike.py). What a piece is, and what is sent, is the layout's
affair: see pieces.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lite.config.data_parallel import DataParallelConfig
from megatron_lite.config.training import OptimizerConfig
from megatron_lite.optim.grad_buffer import GradBuffer
from megatron_lite.optim.loss_scale import LossScale
from megatron_lite.optim.norms import count_zeros, global_norms
from megatron_lite.optim.pieces import Layout, Piece
from megatron_lite.optim.replicated import Replicated
from megatron_lite.optim.spike import SpikeGuard
from megatron_lite.optim.zero1 import Zero1
from megatron_lite.parallel.collectives import all_reduce
from megatron_lite.parallel.state import ParallelState


class OptimizerStep(NamedTuple):
    """grad_norm: global 2-norm before clipping, not finite either where the loss was not. skipped: 1.0 where nothing changed.
    Both 0-d, on device. piece_norms: of the gradients of this rank's pieces."""

    grad_norm: Tensor
    skipped: Tensor
    piece_norms: Tensor


class Optimizer:
    """Owns gradients, master weights and moments. `states[name]` holds "exp_avg", "exp_avg_sq" and, for a 16-bit model, "master"
    of this rank's piece of a parameter, each float32; a rank without a piece of it has no entry. loss_scale: what gradients were
    multiplied with in backward, and are divided by here. spikes: what a loss is compared with; None: with nothing."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, parallel: ParallelState,
                 data_parallel: DataParallelConfig | None = None, *, loss_scale: LossScale | None = None,
                 spikes: SpikeGuard | None = None) -> None:
        self._parallel = parallel
        self._clip_grad = config.clip_grad
        self.loss_scale, self.spikes = loss_scale, spikes
        self.layout: Layout = choose_layout(model, parallel, data_parallel or DataParallelConfig())
        self._pieces = list(self.layout.pieces)
        groups = _weight_decay_groups(self._pieces, config.weight_decay)
        self._adamw = torch.optim.AdamW(groups, lr=0.0, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps,
                                        fused=True) if groups else None
        self._updates = torch.zeros((), dtype=torch.float32, device=parallel.device)
        self.states = {piece.name: self._new_state(piece) for piece in self._pieces}

    @property
    def buffer(self) -> GradBuffer:
        """Where gradients accumulate, in a layout that has such a buffer."""
        assert isinstance(self.layout.gradients, GradBuffer)
        return self.layout.gradients

    def zero_grad(self) -> None:
        """Forgets all gradients."""
        self.layout.gradients.forget()

    def sync_next_backward(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """The next gradient of these parameters (of all) is the last before `step`: so its reduction may begin beside backward.

        Not needed: without it `step` begins the reductions.
        """
        self.layout.gradients.sync_next_backward(parameters)

    def step(self, learning_rate: float, loss: Tensor | None = None) -> OptimizerStep:
        """Reduces and clips the gradients and updates the weights, unless the global norm is not finite or the loss is a spike.

        loss: 0-d, summed over the ranks of data and pipeline. One all-reduce of it over the TP group where spikes are looked for.
        """
        self.layout.gradients.reduce_()
        grads = [piece.grad for piece in self._pieces]
        if self.loss_scale is not None and grads:
            torch._foreach_mul_(grads, self.loss_scale.inverse())
        grad_norm, piece_norms = global_norms(self._pieces, grads, self._parallel, self.layout.shard_group, loss=loss)
        skipped = torch.isfinite(grad_norm).logical_not().float()
        if self.loss_scale is not None:
            self.loss_scale.update(skipped)
        if self.spikes is not None and loss is not None:
            skipped = self.spikes.judge(all_reduce(loss, self._parallel.tp_group, dist.ReduceOp.MAX), skipped)
        if self._clip_grad > 0.0 and grads:
            torch._foreach_mul_(grads, (self._clip_grad / (grad_norm + 1e-6)).clamp(max=1.0))
        if self._adamw is not None:
            for group in self._adamw.param_groups:
                group["lr"] = learning_rate
            self._adamw.found_inf = skipped  # type: ignore[attr-defined]
            self._adamw.step()
        self._updates += 1.0 - skipped
        self.layout.publish()
        return OptimizerStep(grad_norm, skipped, piece_norms)

    def finish(self) -> None:
        """Waits until every parameter of the model has its new weights. Modules wait by themselves for those that they use."""
        self.layout.finish()

    @property
    def num_updates(self) -> int:
        """Updates made so far; reads the device."""
        return int(self._updates.item())

    def params_norm(self) -> Tensor:
        """2-norm of all weights, 0-d."""
        return global_norms(self._pieces, [piece.master for piece in self._pieces], self._parallel, self.layout.shard_group).whole

    def num_zeros_in_grad(self) -> Tensor:
        """Zeros in the gradients of the last step, 0-d int64."""
        return count_zeros(self._pieces, [piece.grad for piece in self._pieces], self._parallel, self.layout.shard_group)

    def weight(self, name: str) -> Tensor:
        """A whole parameter in the model's dtype, as a checkpoint holds it. Every data-parallel rank must ask for it."""
        return self.layout.weight(name)

    def whole_states(self, name: str) -> dict[str, Tensor]:
        """The states of a whole parameter, shaped like it. Every data-parallel rank must ask for them."""
        keys = ("exp_avg", "exp_avg_sq", *(("master",) if self.layout.keeps_masters else ()))
        return {key: self.layout.whole(name, self.states.get(name, {}).get(key)) for key in keys}

    @torch.no_grad()
    def load(self, states: Mapping[str, Mapping[str, Tensor]], *, num_updates: int) -> None:
        """Takes over whole moments and, where present, master weights, and the number of updates. KeyError if one is missing.

        States without masters (saved by a float32 run) leave the masters as the model's loaded weights. Masters of a 16-bit run
        become the weights of a float32 one: nothing is rounded on the way.
        """
        for name, whole in states.items():
            if "master" in whole and not self.layout.keeps_masters:
                self.layout.set_weight(name, whole["master"])
        for piece in self._pieces:
            for key in ("exp_avg", "exp_avg_sq"):
                piece.take_(self.states[piece.name][key], states[piece.name][key])
            if "master" in states[piece.name] and self.layout.keeps_masters:
                piece.take_(piece.master, states[piece.name]["master"])
            if self._adamw is not None:
                self._adamw.state[piece.master]["step"].fill_(float(num_updates))
        self._updates.fill_(float(num_updates))

    def set_weight(self, name: str, values: Tensor) -> None:
        """Overwrites a whole parameter, and its master without rounding."""
        self.layout.set_weight(name, values)

    def _new_state(self, piece: Piece) -> dict[str, Tensor]:
        master = piece.master
        moments = {"exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
        assert self._adamw is not None
        self._adamw.state[master] = {"step": torch.zeros((), dtype=torch.float32, device=master.device), **moments}
        return {**moments, "master": master} if self.layout.keeps_masters else moments


def choose_layout(model: nn.Module, parallel: ParallelState, config: DataParallelConfig) -> Layout:
    """The one that the flags ask for; without other data-parallel ranks there is nothing to share out."""
    if parallel.data_group is None:
        return Replicated(model, parallel, config)
    if config.use_torch_fsdp2:
        from megatron_lite.optim.fsdp import FullySharded  # late: 0.6 s

        return FullySharded(model, parallel)
    return (Zero1 if config.use_distributed_optimizer else Replicated)(model, parallel, config)


def _weight_decay_groups(pieces: Sequence[Piece], weight_decay: float) -> list[dict[str, object]]:
    groups: list[dict[str, object]] = [
        {"params": [piece.master for piece in pieces if piece.decays], "weight_decay": weight_decay},
        {"params": [piece.master for piece in pieces if not piece.decays], "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
