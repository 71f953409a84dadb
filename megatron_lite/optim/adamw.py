"""AdamW over a model's parameters, with float32 master weights where the model is bf16 or fp16.

torch's fused AdamW does the arithmetic. A step whose gradient norm is not finite changes nothing (torch's `found_inf`), which
every rank decides alike from the same global norm, on the device, without waiting for it. It lowers the loss scale, if any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_lite.config.training import OptimizerConfig
from megatron_lite.optim.grad_buffer import GradBuffer
from megatron_lite.optim.loss_scale import LossScale
from megatron_lite.optim.norms import count_zeros, global_norm
from megatron_lite.parallel.state import ParallelState


class OptimizerStep(NamedTuple):
    """grad_norm: global 2-norm before clipping. skipped: 1.0 where it was not finite and nothing changed. Both 0-d, on device."""

    grad_norm: Tensor
    skipped: Tensor


class Optimizer:
    """Owns gradients, master weights and moments. `states[name]` holds a parameter's "exp_avg", "exp_avg_sq" and, for a
    16-bit model, "master", each float32 and shaped like the parameter: what a checkpoint keeps. loss_scale: what the losses were
    multiplied with before backward, and gradients are divided by here."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, parallel: ParallelState, *,
                 loss_scale: LossScale | None = None) -> None:
        self._parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self._parallel = parallel
        self._clip_grad = config.clip_grad
        self.loss_scale = loss_scale
        self.buffer = GradBuffer(self._parameters, parallel)
        self._masters = {name: _master_of(parameter) for name, parameter in self._parameters.items()}
        for name, master in self._masters.items():
            master.grad = self.buffer.grads[name]
        self._adamw = torch.optim.AdamW(_weight_decay_groups(self._masters, config.weight_decay), lr=0.0,
                                        betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps, fused=True)
        self.states = {name: self._new_state(name, master) for name, master in self._masters.items()}

    def zero_grad(self) -> None:
        """Forgets all gradients."""
        self.buffer.forget()

    def step(self, learning_rate: float) -> OptimizerStep:
        """Reduces and clips the gradients and updates the weights, unless the global norm is not finite."""
        self.buffer.reduce_()
        if self.loss_scale is not None:
            self.buffer.scale_(self.loss_scale.inverse())
        grad_norm = global_norm(self._parameters, self.buffer.grads, self._parallel)
        skipped = torch.isfinite(grad_norm).logical_not().float()
        if self.loss_scale is not None:
            self.loss_scale.update(skipped)
        if self._clip_grad > 0.0:
            self.buffer.scale_((self._clip_grad / (grad_norm + 1e-6)).clamp(max=1.0))
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.found_inf = skipped  # type: ignore[attr-defined]
        self._adamw.step()
        self._copy_masters_to_model()
        return OptimizerStep(grad_norm, skipped)

    @property
    def num_updates(self) -> int:
        """Updates made so far; reads the device."""
        return int(next(iter(self._adamw.state.values()))["step"].item())

    def params_norm(self) -> Tensor:
        """2-norm of all weights, 0-d."""
        return global_norm(self._parameters, self._masters, self._parallel)

    def num_zeros_in_grad(self) -> Tensor:
        """Zeros in the gradients of the last step, 0-d int64."""
        return count_zeros(self._parameters, self.buffer.grads, self._parallel)

    @torch.no_grad()
    def load(self, states: Mapping[str, Mapping[str, Tensor]], *, num_updates: int) -> None:
        """Takes over moments and, where present, master weights, and the number of updates. KeyError if a name is missing.

        States without masters (saved by a float32 run) leave the masters as the model's loaded weights. Masters of a 16-bit run
        become the weights of a float32 one: nothing is rounded on the way.
        """
        for name, master in self._masters.items():
            for key in ("exp_avg", "exp_avg_sq"):
                self.states[name][key].copy_(states[name][key])
            if "master" in states[name]:  # for a float32 model the parameter itself
                master.copy_(states[name]["master"])
            self._adamw.state[master]["step"].fill_(float(num_updates))

    @torch.no_grad()
    def set_master(self, name: str, values: Tensor) -> None:
        """Overwrites a parameter's master weights, which for a float32 model are the parameter itself."""
        self._masters[name].copy_(values)

    @torch.no_grad()
    def _copy_masters_to_model(self) -> None:
        pairs = [(parameter, self._masters[name]) for name, parameter in self._parameters.items()
                 if self._masters[name] is not parameter]
        if pairs:
            torch._foreach_copy_([parameter for parameter, _ in pairs], [master for _, master in pairs])

    def _new_state(self, name: str, master: Tensor) -> dict[str, Tensor]:
        moments = {"exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
        self._adamw.state[master] = {"step": torch.zeros((), dtype=torch.float32, device=master.device), **moments}
        return moments if master is self._parameters[name] else {**moments, "master": master}


def _master_of(parameter: nn.Parameter) -> Tensor:
    return parameter.detach().float() if parameter.dtype in (torch.bfloat16, torch.float16) else parameter


def _weight_decay_groups(masters: Mapping[str, Tensor], weight_decay: float) -> list[dict[str, object]]:
    """Megatron's rule: biases and one-dimensional parameters (norms) do not decay."""
    decayed: list[Tensor] = []
    rest: list[Tensor] = []
    for name, master in masters.items():
        (decayed if master.dim() > 1 and not name.endswith(".bias") else rest).append(master)
    groups: list[dict[str, object]] = [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
