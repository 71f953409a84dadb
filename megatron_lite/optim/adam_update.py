"""The update rule AdamW, by torch's fused kernel or by NVIDIA apex's FusedAdam: `--optimizer-impl`.

Both update the same tensors in place: a master weight and two moments for each piece. A checkpoint
is therefore the same for both. They round differently: torch scales the weight by 1 - lr * decay
before the update, and apex adds decay * weight to the update. If `skipped` is 1, both change
nothing and do not count the step, without waiting for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megatron_lite.config.optimizer_settings import OptimizerConfig
from megatron_lite.optim.pieces import Layout, Piece
from megatron_lite.optim.update_rule import LearningRates
from megatron_lite.parallel.apex import fused_adam, require
from megatron_lite.parallel.parameter_spec import ParameterSpec
from megatron_lite.parallel.state import ParallelState

STATES = ("exp_avg", "exp_avg_sq")
# "params" and "weight_decay", as torch.optim takes them, and "at_an_end" for LearningRates.
Group = Mapping[str, Any]


class AdamW:
    """The UpdateRule AdamW. Its states are the means of the gradient and of its square.

    It issues no collective. InputError: the configuration asks for apex, which has no kernel here.
    """

    def __init__(
        self, pieces: Iterable[Piece], config: OptimizerConfig, device: torch.device
    ) -> None:
        pieces = list(pieces)
        groups = _groups(pieces, config.weight_decay)
        kind = ApexFusedAdam if config.optimizer_impl == "apex" else TorchAdamW
        self._kernel = kind(groups, config, device) if groups else None
        self.states = {
            piece.name: {key: torch.zeros_like(piece.master) for key in STATES} for piece in pieces
        }
        for piece in pieces:
            self._kernel.adopt(piece.master, **self.states[piece.name])  # type: ignore[union-attr]

    @classmethod
    def of(
        cls,
        layout: Layout,
        _: Mapping[str, ParameterSpec],
        config: OptimizerConfig,
        parallel: ParallelState,
    ) -> AdamW:
        """Returns the rule for all pieces of a layout."""
        return cls(layout.pieces, config, parallel.device)

    def state_names(self, _: str) -> tuple[str, ...]:
        """Implements UpdateRule.state_names."""
        return STATES

    def step(self, rates: LearningRates, skipped: Tensor) -> None:
        """Implements UpdateRule.step."""
        if self._kernel is not None:
            self._kernel.step(rates, skipped)

    def set_num_updates(self, number: int) -> None:
        """Implements UpdateRule.set_num_updates."""
        if self._kernel is not None:
            self._kernel.set_num_updates(number)


def _groups(pieces: Sequence[Piece], weight_decay: float) -> list[dict[str, object]]:
    """Returns the pieces that share a weight decay and a learning rate."""
    groups: list[dict[str, object]] = [
        {
            "params": [
                piece.master
                for piece in pieces
                if (piece.decays, piece.at_an_end) == (decays, at_an_end)
            ],
            "weight_decay": weight_decay if decays else 0.0,
            "at_an_end": at_an_end,
        }
        for decays in (True, False)
        for at_an_end in (False, True)
    ]
    return [group for group in groups if group["params"]]


class TorchAdamW:
    """The update by torch's fused kernel, as torch.optim.AdamW(fused=True) makes it.

    It calls the function below that class: creating a torch.optim.Optimizer imports torch._dynamo,
    which takes more than a second of every start.
    """

    def __init__(
        self, groups: Sequence[Group], config: OptimizerConfig, device: torch.device
    ) -> None:
        self._groups, self._config = groups, config
        self._states: dict[Tensor, tuple[Tensor, Tensor, Tensor]] = {}

    def adopt(self, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        """Makes these tensors the moments of a master. Call it once for each, before a step."""
        step = torch.zeros((), dtype=torch.float32, device=master.device)
        self._states[master] = exp_avg, exp_avg_sq, step

    @torch.no_grad()
    def step(self, rates: LearningRates, skipped: Tensor) -> None:
        """Updates the masters by their `.grad`, unless `skipped` is 1."""
        for group in self._groups:
            # The fused kernel raises the step count of each state, unless `skipped` is 1.
            masters = [master for master in group["params"] if master.grad is not None]
            states = [self._states[master] for master in masters]
            adamw(
                masters,
                [master.grad for master in masters],
                [exp_avg for exp_avg, _, _ in states],
                [exp_avg_sq for _, exp_avg_sq, _ in states],
                [],
                [step for _, _, step in states],
                fused=True,
                found_inf=skipped,
                amsgrad=False,
                beta1=self._config.adam_beta1,
                beta2=self._config.adam_beta2,
                lr=rates.of(at_an_end=group["at_an_end"]),
                weight_decay=group["weight_decay"],
                eps=self._config.adam_eps,
                maximize=False,
            )

    def set_num_updates(self, number: int) -> None:
        """Sets how many updates the moments have seen. Their bias correction depends on it."""
        for _, _, step in self._states.values():
            step.fill_(float(number))


class ApexFusedAdam:
    """The update by apex.optimizers.FusedAdam, for float32 masters.

    The optimizer is `capturable`: its kernel reads learning rate, step and `skipped` from the
    device. FusedAdam counts a step at the step's start, and subtracts a skipped step at the next
    start. With several groups it would subtract for the first group only. Each group therefore has
    an optimizer of its own.
    """

    def __init__(
        self, groups: Sequence[Group], config: OptimizerConfig, device: torch.device
    ) -> None:
        fused = require(fused_adam(device.type), "--optimizer-impl")
        self._adams = [
            fused(
                [dict(group)],
                lr=0.0,
                bias_correction=True,
                betas=(config.adam_beta1, config.adam_beta2),
                eps=config.adam_eps,
                adam_w_mode=True,
                weight_decay=0.0,
                capturable=True,
            )
            for group in groups
        ]
        self._of = {
            master: adam
            for adam, group in zip(self._adams, groups, strict=True)
            for master in group["params"]
        }
        self._last_skipped = torch.zeros(1, dtype=torch.int32, device=device)
        self.set_num_updates(0)

    def adopt(self, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        """Makes these tensors the moments of a master. Call it once for each, before a step."""
        assert master.dtype == torch.float32, master.dtype
        self._of[master].state[master] = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

    def step(self, rates: LearningRates, skipped: Tensor) -> None:
        """Updates the masters by their `.grad`, unless `skipped` is 1."""
        for adam in self._adams:
            group = adam.param_groups[0]
            group["lr"].fill_(rates.of(at_an_end=group["at_an_end"]))
            adam.step(grad_scaler=_Skipping(skipped))
        self._last_skipped.copy_(skipped)

    def set_num_updates(self, number: int) -> None:
        """Sets how many updates the moments have seen. Their bias correction depends on it."""
        for adam in self._adams:
            # FusedAdam subtracts a skipped last step at the next step's start, hence the sum.
            adam.param_groups[0]["step"] = self._last_skipped + number


class _Skipping:
    """The part of torch.amp.GradScaler that FusedAdam calls.

    It returns whether to skip, and the scale that the gradients still have, which is 1.
    """

    def __init__(self, skipped: Tensor) -> None:
        self._skipped = skipped.reshape(1)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, Tensor]:
        return {self._skipped.device: self._skipped}

    def _get_scale_async(self) -> Tensor:
        return torch.ones_like(self._skipped)
