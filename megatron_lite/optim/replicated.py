"""The default layout: each data-parallel rank holds all weights, gradients and optimizer states."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_lite.config.parallel import DataParallelConfig
from megatron_lite.optim.grad_buffer import GradBuffer
from megatron_lite.optim.pieces import is_rounded, new_piece
from megatron_lite.parallel.state import ParallelState
from megatron_lite.parallel.torch_internals import foreach_copy_


class Replicated:
    """The Layout without sharding.

    It issues one all-reduce for each bucket of gradients, and no collective after the step.
    """

    def __init__(
        self, model: nn.Module, parallel: ParallelState, config: DataParallelConfig
    ) -> None:
        self._parameters = dict(model.named_parameters())
        self.shard_group, self.replicates_weights = None, True
        self.gradients = GradBuffer(self._parameters, parallel, config)
        masters = {name: _master_of(parameter) for name, parameter in self._parameters.items()}
        for name, master in masters.items():
            master.grad = self.gradients.grads[name]
        self.pieces = [
            new_piece(name, parameter, masters[name], start=0, stop=parameter.numel())
            for name, parameter in self._parameters.items()
        ]
        self._rounded = {
            name: master for name, master in masters.items() if master is not self._parameters[name]
        }
        self.keeps_masters = bool(self._rounded)

    @torch.no_grad()
    def publish(self) -> None:
        """Rounds the masters of a 16-bit model into its parameters."""
        if self._rounded:
            foreach_copy_(
                [self._parameters[name] for name in self._rounded], list(self._rounded.values())
            )

    def finish(self) -> None:
        """Does nothing, because `publish` starts no collective."""

    def whole(self, name: str, value: Tensor | None) -> Tensor:
        """Returns the value itself."""
        assert value is not None, name
        return value

    def weight(self, name: str) -> Tensor:
        """Returns the parameter itself."""
        return self._parameters[name]

    @torch.no_grad()
    def set_weight(self, name: str, values: Tensor) -> None:
        """Implements Layout.set_weight."""
        self._parameters[name].copy_(values)
        if name in self._rounded:
            self._rounded[name].copy_(values)


def _master_of(parameter: nn.Parameter) -> Tensor:
    return parameter.detach().float() if is_rounded(parameter.dtype) else parameter
