"""The time of single compiled kernels beside torch's operators. See recompute_cost.py."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.engines import DTYPES, SEED, Setting
from benchmarks.harness import spread
from megatron_lite.model import activations, compiled_activations, compiled_norm
from megatron_lite.model.compiled_dropout import drop_and_add, drop_gradient
from megatron_lite.parallel.compiled import CompiledKernels
from megatron_lite.tensor_parallel.cross_entropy import (
    GradientFactors,
    row_statistics,
    write_gradient_,
)


def cpu_ms(action: Callable[[], object]) -> float:
    start = time.process_time()
    action()
    return 1000.0 * (time.process_time() - start)


def kernels(setting: Setting, rounds: int) -> Iterator[dict[str, Any]]:
    """Yields the median ms of each kernel without and with the compiler, in turn."""
    compiled = CompiledKernels(setting.device)
    with torch.no_grad():
        for name, (eager, function, tensors, constants) in _kernels(setting).items():
            ways = dict(
                eager=eager,
                compiled=lambda: compiled(function, *tensors, **constants),  # noqa: B023
            )
            times: dict[str, list[float]] = {way: [] for way in ways}
            for number in range(-2, 3 * rounds):
                for way, call in ways.items():
                    milliseconds = cpu_ms(call)
                    if number >= 0:
                        times[way].append(milliseconds)
            yield dict(
                dtype=setting.dtype,
                kernel=name,
                eager_ms=statistics.median(times["eager"]),
                compiled_ms=statistics.median(times["compiled"]),
                ratio=spread(times["compiled"], times["eager"]),
            )


def _kernels(setting: Setting) -> dict[str, tuple[Any, Any, tuple[Tensor, ...], dict[str, Any]]]:
    """Returns for each kernel torch's way, the compiled function, its tensors and constants."""
    shape, dtype = setting.shape, DTYPES[setting.dtype]
    tokens = (shape.seq_length, shape.batch_size)
    generator = torch.Generator().manual_seed(SEED)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(dtype)

    x, grad = random(*tokens, 4 * shape.hidden_size), random(*tokens, 4 * shape.hidden_size)
    hidden, residual = (random(*tokens, shape.hidden_size) for _ in range(2))
    w = random(shape.hidden_size)
    size = (shape.hidden_size,)
    _, mean, scale = torch.native_layer_norm(hidden, size, w, w, 1e-5)
    statistics_ = mean.float(), scale.float()
    numbers = torch.randint(-(2**15), 2**15, (hidden.numel(),), dtype=torch.int16)
    mask, constants = (numbers >= -30000).view(hidden.shape), dict(bound=-30000, scale=1.1)
    rows = shape.seq_length * shape.batch_size
    logits = random(rows, shape.vocab_size)
    column = torch.randint(shape.vocab_size, (rows,), generator=generator)
    factors = GradientFactors(*(random(rows, 1).float() for _ in range(2)), column.unsqueeze(1))
    aten = torch.ops.aten
    return {
        "gelu": (lambda: activations.tanh_gelu(x), compiled_activations.tanh_gelu, (x,), {}),
        "gelu, backward": (
            lambda: aten.gelu_backward(grad, x, approximate="tanh"),
            compiled_activations.tanh_gelu_backward,
            (grad, x),
            {},
        ),
        "LayerNorm": (
            lambda: F.layer_norm(hidden, size, w, w),
            compiled_norm.layer_norm,
            (hidden, w, w),
            dict(epsilon=1e-5),
        ),
        "LayerNorm, backward": (
            lambda: aten.native_layer_norm_backward(
                residual, hidden, size, mean, scale, w, w, [True, True, True]
            ),
            compiled_norm.layer_norm_backward,
            (residual, hidden, w, *statistics_),
            {},
        ),
        "LayerNorm from kept statistics": (
            lambda: F.layer_norm(hidden, size, w, w),
            _norm_from_statistics,
            (hidden, w, w, *statistics_),
            {},
        ),
        "dropout and addition": (
            lambda: aten.native_dropout_backward(
                hidden, (numbers >= -30000).view(hidden.shape), 1.1
            ).add_(residual),
            drop_and_add,
            (numbers, hidden, residual),
            constants,
        ),
        "dropout, backward": (
            lambda: aten.native_dropout_backward(hidden, mask, 1.1),
            drop_gradient,
            (hidden, mask),
            dict(scale=1.1, dtype=dtype),
        ),
        "loss rows": (lambda: row_statistics(logits, column), _loss_rows, (logits, column), {}),
        "loss rows, backward": (
            lambda: write_gradient_(logits.clone(), logits, factors, num_ids=shape.vocab_size),
            _loss_gradient,
            (logits, *factors),
            {},
        ),
    }


def _norm_from_statistics(x: Tensor, weight: Tensor, bias: Tensor, *of_rows: Tensor) -> Tensor:
    mean, scale = of_rows
    return ((x.float() - mean) * scale * weight + bias).to(x.dtype)


def _loss_rows(logits: Tensor, column: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = logits.float()
    maximum = wide.amax(-1)
    total = (wide - maximum.unsqueeze(-1)).exp().sum(-1)
    return maximum, total, logits.gather(-1, column.unsqueeze(-1)).squeeze(-1).float()


def _loss_gradient(logits: Tensor, softmax: Tensor, at_label: Tensor, column: Tensor) -> Tensor:
    shares = torch.softmax(logits.float(), -1) * softmax
    own = torch.arange(logits.shape[1], device=logits.device).unsqueeze(0) == column
    return (shares + torch.where(own, at_label, 0.0)).to(logits.dtype)
