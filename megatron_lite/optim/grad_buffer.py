"""All gradients of a rank in one contiguous buffer, float32 (float64 for a float64 model), where backward accumulates them.

    [ gradients that TP ranks must add | all others ]       one all-reduce over TP for the first part,
                                                            one over DP x CP for the whole
A parameter's `.grad` becomes a view of the buffer when its first gradient of a step arrives, which is copied in: nothing needs
to be zeroed and added to. Later micro-batches add to the view. A 16-bit parameter's is float32 too (`grad_dtype`): each
micro-batch's gradient is rounded to 16 bits once and summed in float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megatron_lite.parallel.collectives import all_reduce_
from megatron_lite.parallel.parameter_spec import spec_of
from megatron_lite.parallel.state import ParallelState

ALIGNMENT = 32  # elements: 128 bytes, so that vectorised kernels take their fast path on every view


class GradBuffer:
    """Owns the gradients of the given parameters; `grads[name]` is the float32 view of one."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], parallel: ParallelState) -> None:
        self._parallel = parallel
        ordered = sorted(parameters.items(), key=lambda item: not spec_of(item[1]).sum_grad_over_tp)  # stable
        starts, total, num_partial = {}, 0, 0
        for name, parameter in ordered:
            starts[name] = total
            total += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
            if spec_of(parameter).sum_grad_over_tp:
                num_partial = total
        dtype = torch.promote_types(torch.float32, ordered[0][1].dtype)
        self._flat = torch.zeros(total, dtype=dtype, device=parallel.device)
        self._partial = self._flat[:num_partial]
        self._parameters = dict(parameters)
        self.grads: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            view = self._flat[starts[name] : starts[name] + parameter.numel()].view_as(parameter)
            self.grads[name] = view
            _accumulate_into(parameter, view)

    def forget(self) -> None:
        """Begins a step: what the buffer holds counts no more."""
        for name, parameter in self._parameters.items():
            parameter.grad = None
            if not _autograd_sums_into(parameter, self.grads[name]):
                self.grads[name].zero_()

    def reduce_(self) -> None:
        """Completes the gradients once backward has run: sums over TP where ranks hold parts, over first and last stage where
        both hold the parameter, then over DP and CP."""
        for name, parameter in self._parameters.items():
            if parameter.grad is None and _autograd_sums_into(parameter, self.grads[name]):  # had no part in this step
                parameter.grad = self.grads[name].zero_()
        if self._partial.numel():
            all_reduce_(self._partial, self._parallel.tp_group)
        for name, parameter in self._parameters.items():
            if spec_of(parameter).tied:
                all_reduce_(self.grads[name], self._parallel.embedding_group)
        all_reduce_(self._flat, self._parallel.data_group)

    def scale_(self, factor: Tensor) -> None:
        """Multiplies all gradients by a 0-d tensor, without reading it."""
        self._flat.mul_(factor)


def _autograd_sums_into(parameter: nn.Parameter, view: Tensor) -> bool:
    """Whether the parameter's own `.grad` may be the view: not for a 16-bit parameter in a torch before grad_dtype."""
    return parameter.dtype == view.dtype or hasattr(parameter, "grad_dtype")


def _accumulate_into(parameter: nn.Parameter, view: Tensor) -> None:
    if not _autograd_sums_into(parameter, view):

        def add_and_drop(owner: Tensor) -> None:
            assert owner.grad is not None
            view.add_(owner.grad)
            owner.grad = None

        parameter.register_post_accumulate_grad_hook(add_and_drop)
        return

    def adopt_first(owner: Tensor) -> None:
        assert owner.grad is not None
        if owner.grad.data_ptr() != view.data_ptr():
            view.copy_(owner.grad)
            owner.grad = view

    if parameter.dtype != view.dtype:
        parameter.grad_dtype = view.dtype
    parameter.register_post_accumulate_grad_hook(adopt_first)
