"""A stand-in for NVIDIA apex on a CPU: the symbols that the library uses, by torch.

It follows apex at commit 6424da3b (csrc/megatron/fused_weight_gradient_dense*.cu,
csrc/layer_norm_cuda.cpp, apex/optimizers/fused_adam.py, apex/normalization/fused_layer_norm.py). It
refuses the calls that apex refuses, and those for which apex would read or write out of bounds.
Arithmetic is in float32, as in apex. LayerNorm calls torch's own kernel in float32, so a float32
run equals one without apex bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.parallel import apex
from tests.support.modules import provide

HALVES = (torch.float16, torch.bfloat16)
ADAM, NORMS = "multi_tensor_adam", ("forward_affine", "backward_affine")


def install(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Makes imports of apex and of its extension modules find the stand-in.

    Returns the number of calls of each kernel in this process. Ranks that are forked later inherit
    the stand-in.
    """
    calls: Counter[str] = Counter()
    has_kernels_for(patch, "cpu")
    norms = {
        f"Fused{name}AffineFunction": type(name, (Norm,), dict(calls=calls))
        for name in ("LayerNorm", "RMSNorm")
    }
    modules: dict[str, dict[str, Any]] = {
        "fused_weight_gradient_mlp_cuda": weight_gradient_kernels(calls),
        "fused_layer_norm_cuda": dict.fromkeys((*NORMS, *(f"rms_{name}" for name in NORMS)), print),
        "amp_C": dict.fromkeys((ADAM, f"{ADAM}_capturable"), print),
        "apex": {},
        "apex.normalization": {},
        "apex.normalization.fused_layer_norm": norms,
        "apex.optimizers": {"FusedAdam": type("FusedAdam", (Adam,), dict(calls=calls))},
    }
    for name, values in modules.items():
        module = ModuleType(name)
        if name.startswith("apex"):
            module.__path__ = []  # a package
        module.__dict__.update(values)
        provide(patch, name, module)
    return calls


def has_kernels_for(patch: pytest.MonkeyPatch, device_type: str) -> None:
    """Runs on a device of this type may use apex, and no others."""
    patch.setattr(apex, "DEVICE_TYPE", device_type)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(f"apex's stand-in: {message}")


def weight_gradient_kernels(calls: Counter[str]) -> dict[str, Any]:
    def wgrad_gemm_accum_fp32(input: Tensor, d_output: Tensor, d_weight: Tensor, /) -> None:
        calls["wgrad_gemm_accum_fp32"] += 1
        operands, rows, grad_rows = (
            (input, d_output, d_weight),
            input.flatten(0, -2),
            d_output.flatten(0, -2),
        )
        _check(d_weight.dtype == torch.float32, f"the sum is {d_weight.dtype}")
        _check(
            input.dtype == d_output.dtype and input.dtype in (torch.float32, *HALVES),
            f"operands are {input.dtype} and {d_output.dtype}",
        )
        _check(all(one.is_contiguous() for one in operands), "an operand is not contiguous")
        _check(
            d_weight.shape == (grad_rows.shape[1], rows.shape[1]) and len(rows) == len(grad_rows),
            f"{[tuple(one.shape) for one in operands]} are out of bounds",
        )
        d_weight.addmm_(grad_rows.t().float(), rows.float())

    return dict(wgrad_gemm_accum_fp32=wgrad_gemm_accum_fp32)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().float() if tensor.dtype in HALVES else tensor.detach()


class Norm(torch.autograd.Function):
    """LayerNorm or RMSNorm, by its name, of (input, weight, [bias,] normalized_shape, eps)."""

    calls: Counter[str]

    @classmethod
    def normed(cls, epsilon: float, input: Tensor, *affine: Tensor) -> Tensor:
        norm: Any = F.layer_norm if cls.__name__ == "LayerNorm" else F.rms_norm
        return norm(input, affine[0].shape, *affine, epsilon)

    @classmethod
    def forward(cls, ctx: Any, input: Tensor, *arguments: Any) -> Tensor:
        *affine, shape, ctx.epsilon = arguments
        cls.calls[f"{cls.__name__} forward"] += 1
        for parameter in affine:
            _check(parameter.shape == tuple(shape), f"a parameter of shape {parameter.shape}")
            _check(parameter.dtype == input.dtype, f"{parameter.dtype} for {input.dtype}")
        operands = [tensor.contiguous() for tensor in (input, *affine)]
        statistics = [_wide(input)[..., 0].flatten().clone() for _ in affine]  # a number per row
        ctx.save_for_backward(*operands, *statistics)
        return cls.normed(ctx.epsilon, *map(_wide, operands)).to(input.dtype)

    @classmethod
    def backward(cls, ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        cls.calls[f"{cls.__name__} backward"] += 1
        operands = ctx.saved_tensors[: len(ctx.saved_tensors) // 2 + 1]
        wide = [_wide(tensor).requires_grad_() for tensor in operands]
        with torch.enable_grad():
            output = cls.normed(ctx.epsilon, *wide)
        grads = torch.autograd.grad(output, wide, _wide(grad_output.contiguous()))
        return *(grad.to(grad_output.dtype) for grad in grads), None, None


class Adam(torch.optim.Optimizer):
    """FusedAdam in its capturable mode, with one group."""

    calls: Counter[str]

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        capturable: bool = False,
    ) -> None:
        _check(bias_correction and adam_w_mode and capturable, "this mode is not modelled")
        rate = torch.tensor(lr, dtype=torch.float32)
        super().__init__(params, dict(lr=rate, betas=betas, eps=eps, weight_decay=weight_decay))
        self._is_skipped = torch.tensor([0], dtype=torch.int)

    @torch.no_grad()
    def step(self, *, grad_scaler: Any) -> None:  # type: ignore[override]
        type(self).calls[ADAM] += 1
        (group,) = self.param_groups
        # The flag is that of the step before, as in apex.
        group["step"] += (self._is_skipped != 1).to(torch.int)
        rate, step, betas = group["lr"], group["step"], group["betas"]
        _check((rate.dtype, step.dtype) == (torch.float32, torch.int32), "expected float and int")
        self._is_skipped.copy_(grad_scaler._check_inf_per_device(self)[rate.device])
        if self._is_skipped.item() == 1:
            return
        corrections = [torch.tensor(1.0 - beta ** int(step)) for beta in betas]
        for weight in group["params"]:
            grad, state = weight.grad, self.state[weight]
            grad.div_(grad_scaler._get_scale_async())
            mean, square = state["exp_avg"], state["exp_avg_sq"]
            for one in (weight, grad, mean, square):
                _check(one.is_contiguous() and one.dtype == torch.float32, "a tensor's layout")
                _check(one.shape == weight.shape, "Size mismatch")
            mean.copy_(betas[0] * mean + (1.0 - betas[0]) * grad)
            square.copy_(betas[1] * square + (1.0 - betas[1]) * grad * grad)
            change = mean / corrections[0] / ((square / corrections[1]).sqrt() + group["eps"])
            weight.copy_(weight - rate * (change + group["weight_decay"] * weight))
