"""A stand-in for NVIDIA apex on a CPU.

It has apex's modules, functions and classes, with their signatures, argument orders and dtype
rules. It follows apex at commit 6424da3b (csrc/megatron/fused_weight_gradient_dense*.cu,
csrc/layer_norm_cuda.cpp, csrc/multi_tensor_adam.cu, apex/optimizers/fused_adam.py,
apex/normalization/fused_layer_norm.py). It refuses every call that apex refuses, and also calls for
which apex would read or write out of bounds. Only the device differs: the stand-in takes CPU
tensors. Arithmetic is in float32, as in apex. LayerNorm calls torch's own kernel in float32, so a
float32 run equals one without apex bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.parallel import apex
from tests.support.modules import provide

HALVES = (torch.float16, torch.bfloat16)


class Calls:
    """The number of calls of each kernel in this process."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def __getitem__(self, name: str) -> int:
        return self.counts.get(name, 0)


def install(patch: pytest.MonkeyPatch) -> Calls:
    """Makes imports of apex and of its extension modules find the stand-in.

    Ranks that are forked later inherit it.
    """
    calls = Calls()
    has_kernels_for(patch, "cpu")
    for name, values in _modules(calls).items():
        module = ModuleType(name)
        if name.startswith("apex"):
            module.__path__ = []  # a package
        module.__dict__.update(values)
        provide(patch, name, module)
    return calls


def has_kernels_for(patch: pytest.MonkeyPatch, device_type: str) -> None:
    """Runs on a device of this type may use apex, and no others."""
    patch.setattr(apex, "DEVICE_TYPE", device_type)


def _modules(calls: Calls) -> dict[str, dict[str, Any]]:
    kernels = {
        "fused_weight_gradient_mlp_cuda": _weight_gradient_kernels(),
        "fused_layer_norm_cuda": _norm_kernels(),
        "amp_C": _adam_kernels(),
    }
    counted = {
        module: {name: _counting(calls, name, function) for name, function in functions.items()}
        for module, functions in kernels.items()
    }
    norms = _norm_functions(counted["fused_layer_norm_cuda"])
    return {
        **counted,
        "apex": {},
        "apex.normalization": {},
        "apex.normalization.fused_layer_norm": norms,
        "apex.optimizers": {"FusedAdam": _fused_adam(counted["amp_C"])},
    }


def _counting(calls: Calls, name: str, function: Any) -> Any:
    def counted(*args: Any) -> Any:  # pybind11's functions here have no keyword arguments
        calls.add(name)
        return function(*args)

    return counted


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(f"apex's stand-in: {message}")


# --- fused_weight_gradient_mlp_cuda ---


def _weight_gradient_kernels() -> dict[str, Any]:
    def accumulate(
        input: Tensor, d_output: Tensor, d_weight: Tensor, total_dtypes: Sequence[torch.dtype]
    ) -> None:
        _check(d_weight.dtype in total_dtypes, f"the sum is {d_weight.dtype}")
        _check(input.dtype == d_output.dtype, f"operands are {input.dtype} and {d_output.dtype}")
        _check(
            all(operand.is_contiguous() for operand in (input, d_output, d_weight)),
            "an operand is not contiguous",
        )
        rows, grad_rows = input.flatten(0, -2), d_output.flatten(0, -2)
        _check(
            d_weight.shape == (grad_rows.shape[1], rows.shape[1]) and len(rows) == len(grad_rows),
            (
                f"a sum {tuple(d_weight.shape)} of {tuple(input.shape)} and "
                f"{tuple(d_output.shape)} is out of bounds"
            ),
        )
        total = torch.addmm(d_weight.float(), grad_rows.t().float(), rows.float())
        d_weight.copy_(total)

    def wgrad_gemm_accum_fp32(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
        _check(input.dtype in (torch.float32, *HALVES), f"operands are {input.dtype}")
        accumulate(input, d_output, d_weight, (torch.float32,))

    def wgrad_gemm_accum_fp16(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
        _check(input.dtype in HALVES, f"operands are {input.dtype}")
        accumulate(input, d_output, d_weight, (input.dtype,))

    return dict(
        wgrad_gemm_accum_fp32=wgrad_gemm_accum_fp32, wgrad_gemm_accum_fp16=wgrad_gemm_accum_fp16
    )


# --- fused_layer_norm_cuda and apex.normalization ---


def _norm_kernels() -> dict[str, Any]:
    def rows_of(input: Tensor, normalized_shape: Sequence[int], *affine: Tensor) -> Tensor:
        shape = tuple(normalized_shape)
        _check(
            len(shape) > 0 and tuple(input.shape[-len(shape) :]) == shape,
            f"{tuple(input.shape)} does not end in {shape}",
        )
        for operand in (input, *affine):
            _check(operand.is_contiguous(), "an operand is not contiguous")
        for parameter in affine:
            _check(
                tuple(parameter.shape) == shape,
                f"a parameter of shape {tuple(parameter.shape)}, not {shape}",
            )
            _check(
                parameter.dtype == input.dtype,
                f"a parameter of {parameter.dtype} for an input of {input.dtype}",
            )
        return _wide(input).view(-1, affine[0].numel())

    def forward_affine(
        input: Tensor, normalized_shape: Sequence[int], gamma: Tensor, beta: Tensor, epsilon: float
    ) -> list[Tensor]:
        rows = rows_of(input, normalized_shape, gamma, beta)
        output, mean, invvar = torch.native_layer_norm(
            rows, rows.shape[1:], _wide(gamma).flatten(), _wide(beta).flatten(), epsilon
        )
        return [
            output.to(input.dtype).view(input.shape),
            mean.flatten().clone(),
            invvar.flatten().clone(),
        ]

    def backward_affine(
        dout: Tensor,
        mean: Tensor | None,
        invvar: Tensor,
        input_or_output: Tensor,
        normalized_shape: Sequence[int],
        gamma: Tensor,
        beta: Tensor,
        epsilon: float,
        memory_efficient: bool,
    ) -> list[Tensor]:
        _check(not memory_efficient and mean is not None, "memory_efficient is not modelled")
        rows, grad_rows = (
            rows_of(x, normalized_shape, gamma, beta) for x in (input_or_output, dout)
        )
        grads = torch.ops.aten.native_layer_norm_backward(
            grad_rows,
            rows,
            rows.shape[1:],
            mean.view(-1, 1),
            invvar.view(-1, 1),
            _wide(gamma).flatten(),
            _wide(beta).flatten(),
            [True, True, True],
        )
        return [
            grad.to(dout.dtype).view(like.shape)
            for grad, like in zip(grads, (dout, gamma, beta), strict=True)
        ]

    def rms_forward_affine(
        input: Tensor, normalized_shape: Sequence[int], gamma: Tensor, epsilon: float
    ) -> list[Tensor]:
        rows = rows_of(input, normalized_shape, gamma)
        invvar = rows.square().mean(1).add(epsilon).rsqrt()
        output = rows * invvar[:, None] * _wide(gamma).flatten()
        return [output.to(input.dtype).view(input.shape), invvar]

    def rms_backward_affine(
        dout: Tensor,
        invvar: Tensor,
        input_or_output: Tensor,
        normalized_shape: Sequence[int],
        gamma: Tensor,
        epsilon: float,
        memory_efficient: bool,
    ) -> list[Tensor]:
        _check(not memory_efficient, "memory_efficient is not modelled")
        rows, grad_rows = (rows_of(x, normalized_shape, gamma) for x in (input_or_output, dout))
        normed = rows * invvar[:, None]
        scaled = grad_rows * _wide(gamma).flatten()
        grad_input = (scaled - normed * (scaled * normed).mean(1, keepdim=True)) * invvar[:, None]
        return [
            grad_input.to(dout.dtype).view(dout.shape),
            (grad_rows * normed).sum(0).to(gamma.dtype).view(gamma.shape),
        ]

    return dict(
        forward_affine=forward_affine,
        backward_affine=backward_affine,
        rms_forward_affine=rms_forward_affine,
        rms_backward_affine=rms_backward_affine,
    )


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().float() if tensor.dtype in HALVES else tensor.detach()


def _norm_functions(cuda: dict[str, Any]) -> dict[str, Any]:
    class FusedNorm(torch.autograd.Function):
        kernels: tuple[str, str]
        num_affine: int

        @classmethod
        def forward(cls, ctx: Any, *arguments: Any) -> Tensor:
            count = 1 + cls.num_affine
            shape, eps, *rest = arguments[count:]
            operands = [tensor.contiguous() for tensor in arguments[:count]]
            output, *statistics = cuda[cls.kernels[0]](operands[0], shape, *operands[1:], eps)
            ctx.save_for_backward(*operands, *statistics)
            ctx.facts, ctx.memory_efficient = (shape, eps), bool(rest and rest[0])
            ctx.unused = [None] * (len(arguments) - count)
            return output

        @classmethod
        def backward(cls, ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
            count, (shape, eps) = 1 + cls.num_affine, ctx.facts
            input, *affine = ctx.saved_tensors[:count]
            grads = cuda[cls.kernels[1]](
                grad_output.contiguous(),
                *ctx.saved_tensors[count:],
                input,
                shape,
                *affine,
                eps,
                ctx.memory_efficient,
            )
            return *grads, *ctx.unused

    class FusedLayerNormAffineFunction(FusedNorm):
        kernels, num_affine = ("forward_affine", "backward_affine"), 2

    class FusedRMSNormAffineFunction(FusedNorm):
        kernels, num_affine = ("rms_forward_affine", "rms_backward_affine"), 1

    return dict(
        FusedLayerNormAffineFunction=FusedLayerNormAffineFunction,
        FusedRMSNormAffineFunction=FusedRMSNormAffineFunction,
    )


# --- amp_C and apex.optimizers ---


def _adam_kernels() -> dict[str, Any]:
    def check(noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]]) -> None:
        _check(noop_flag.dtype == torch.int32, "the flag to skip is no int32")
        _check(len(tensor_lists) == 4 and len(tensor_lists[0]) > 0, "tensor_lists.size() != depth")
        for tensors in tensor_lists:
            _check(len(tensors) == len(tensor_lists[0]), "Size mismatch among tensor lists")
            for tensor, first in zip(tensors, tensor_lists[0], strict=True):
                _check(tensor.is_contiguous(), "A tensor was not contiguous.")
                _check(
                    tensor.numel() == first.numel() and tensor.dtype == first.dtype, "Size mismatch"
                )

    def multi_tensor_adam(*_: Any) -> None:
        raise NotImplementedError("only the capturable kernel is modelled")

    @torch.no_grad()
    def multi_tensor_adam_capturable(
        chunk_size: int,
        noop_flag: Tensor,
        tensor_lists: Any,
        lr: Tensor,
        beta1: float,
        beta2: float,
        epsilon: float,
        step: Tensor,
        mode: int,
        bias_correction: int,
        weight_decay: float,
        inv_scale: Tensor,
    ) -> None:
        check(noop_flag, tensor_lists)
        _check(
            lr.dtype == inv_scale.dtype == torch.float32 and step.dtype == torch.int32,
            "expected float, float and int",
        )
        _check(mode == bias_correction == 1, "only AdamW with bias correction is modelled")
        if noop_flag.item() == 1:
            return
        corrections = [torch.tensor(1.0 - beta ** int(step)) for beta in (beta1, beta2)]
        for grad, weight, mean, square in zip(*tensor_lists, strict=True):
            grad.mul_(inv_scale)
            mean.copy_(beta1 * mean + (1.0 - beta1) * grad)
            square.copy_(beta2 * square + (1.0 - beta2) * grad * grad)
            change = mean / corrections[0] / ((square / corrections[1]).sqrt() + epsilon)
            weight.copy_(weight - lr * (change + weight_decay * weight))

    return dict(
        multi_tensor_adam=multi_tensor_adam,
        multi_tensor_adam_capturable=multi_tensor_adam_capturable,
    )


def _fused_adam(amp_c: dict[str, Any]) -> type:
    class FusedAdam(torch.optim.Optimizer):
        def __init__(
            self,
            params: Iterable[Any],
            lr: float = 1e-3,
            bias_correction: bool = True,
            betas: tuple[float, float] = (0.9, 0.999),
            eps: float = 1e-8,
            adam_w_mode: bool = True,
            weight_decay: float = 0.0,
            amsgrad: bool = False,
            set_grad_none: bool = True,
            capturable: bool = False,
            master_weights: bool = False,
        ) -> None:
            _check(
                not amsgrad and not master_weights, "amsgrad and master_weights are not modelled"
            )
            _check(capturable, "only capturable is modelled")
            rate = torch.tensor(lr, dtype=torch.float32)
            super().__init__(
                params,
                dict(
                    lr=rate,
                    bias_correction=bias_correction,
                    betas=betas,
                    eps=eps,
                    weight_decay=weight_decay,
                ),
            )
            self.adam_w_mode = int(adam_w_mode)
            self._dummy_overflow_buf = torch.tensor([0], dtype=torch.int)

        def step(
            self,
            closure: Any = None,
            grads: Any = None,
            output_params: Any = None,
            scale: Any = None,
            grad_norms: Any = None,
            grad_scaler: Any = None,
        ) -> None:
            _check(
                all(one is None for one in (closure, grads, output_params, scale, grad_norms)),
                "FusedAdam has been updated.",
            )
            for group in self.param_groups:
                # The flag is that of the step before, as in apex.
                if "step" in group:
                    group["step"] += (self._dummy_overflow_buf != 1).to(torch.int)
                else:
                    group["step"] = torch.tensor([1], dtype=torch.int)
                self._step_group(group, grad_scaler)

        def _step_group(self, group: dict[str, Any], grad_scaler: Any) -> None:
            lists: tuple[list[Tensor], ...] = ([], [], [], [])
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                _check(parameter.dtype == torch.float32, "FusedAdam only support fp16 and fp32.")
                state = self.state[parameter]
                if len(state) == 0:
                    state["exp_avg"], state["exp_avg_sq"] = (
                        torch.zeros_like(parameter),
                        torch.zeros_like(parameter),
                    )
                for one, tensor in zip(
                    lists,
                    (parameter.grad, parameter.data, state["exp_avg"], state["exp_avg_sq"]),
                    strict=True,
                ):
                    one.append(tensor)
            settings = (
                group["lr"],
                *group["betas"],
                group["eps"],
                group["step"],
                self.adam_w_mode,
                int(group["bias_correction"]),
                group["weight_decay"],
            )
            device = group["params"][0].device
            found_inf = (
                torch.zeros(1)
                if grad_scaler is None
                else grad_scaler._check_inf_per_device(self)[device]
            )
            self._dummy_overflow_buf.copy_(found_inf)
            inv_scale = (
                torch.ones(1)
                if grad_scaler is None
                else grad_scaler._get_scale_async().double().reciprocal().float()
            )
            amp_c["multi_tensor_adam_capturable"](
                2048 * 32, self._dummy_overflow_buf, lists, *settings, inv_scale
            )

    return FusedAdam
