"""LayerNorm and RMSNorm over the last dim."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.parallel.collectives import Group, all_reduce
from megatron_lite.parallel.compiled import Pair, Tensors, applied, at_least_float32, passing_on
from megatron_lite.tensor_parallel.rank_context import RankContext

aten = torch.ops.aten


class Norm(nn.Module):
    """LayerNorm or RMSNorm: [..., n] -> [..., n]. Weight [n], and for LayerNorm a bias [n].

    Both parameters are whole on every TP rank.
    partial_grad: each TP rank sees other tokens (sequence parallelism) or other heads
        (qk-layernorm). The parameter's gradient is then the sum over the ranks.
    Keeps the input and its statistics, and under --apply-layernorm-1p the tensor 1 + weight, which
    has the weight's dtype. Compiled kernels keep statistics of at least float32.
    reads_residual: whether the input is the residual stream. Under --fp32-residual-connection the
        norm runs in float32 then, keeps its weight in float32, and returns the weight's dtype.
    also: what else compiled kernels do if the norm is in the dtype of its input (`does_more`).
        PASSING_ON: they also return the input. What else reads the input takes the returned one, so
        that the norm's kernel adds both gradients. rotary.rotating: they also rotate the output, by
        tables that `forward` gets.
    all_heads: the input is the queries, or keys, of this rank's heads, [s, b, heads / t, d], and
        a row is the channels of all heads of all ranks (OLMo 2). size: the number of these
        channels. Each rank has the part of the weight for its own heads. The norm is an RMSNorm.
        Forward and backward issue an all-reduce each, of one float32 number for each token.
    """

    def __init__(
        self,
        size: int,
        config: ModelConfig,
        context: RankContext,
        *,
        partial_grad: bool = False,
        reads_residual: bool = False,
        also: Callable[[str], Pair] | None = None,
        all_heads: bool = False,
    ) -> None:
        super().__init__()
        self.shifts = config.apply_layernorm_1p
        self.widens = reads_residual and config.fp32_residual_connection
        self.does_more = False
        kernels, epsilon = None if all_heads else context.kernels, config.norm_epsilon
        pair = NORMS[config.normalization]
        if all_heads:
            forward, backward = (
                partial(function, group=context.tp_group)
                for function in (rms_norm, rms_norm_backward)
            )
            pair = Pair(forward, backward, INPUT_AND_WEIGHT)
        elif also is not None and kernels is not None and not self.widens:
            self.does_more, pair = True, also(config.normalization)
        self.normalize: Callable[..., Tensor] = partial(
            applied, pair, kernels=kernels, epsilon=epsilon
        )
        if pair is NORMS["RMSNorm"] and kernels is None and context.device.type == "cuda":
            # torch has a fused kernel for CUDA. On a CPU it composes the norm from operations that
            # keep four tensors.
            self.normalize = lambda x, weight: F.rms_norm(x, weight.shape, weight, epsilon)
        vector = partial(
            context.new_parameter,
            size,
            tp_dim=0 if all_heads else None,
            sum_grad_over_tp=partial_grad,
        )
        self.weight = vector(init_value=float(not self.shifts))
        self.bias = vector() if config.norm_vectors == 2 and not all_heads else None

    def forward(self, hidden_states: Tensor, *tables: Tensor) -> Any:
        vectors: list[Tensor] = [self.weight] if self.bias is None else [self.weight, self.bias]
        if self.widens:
            vectors = [vector.to(hidden_states.dtype) for vector in vectors]
        if self.shifts:
            vectors[0] = vectors[0] + 1
        output = self.normalize(hidden_states, *vectors, *tables)
        return output.to(self.weight.dtype) if self.widens else output


def layer_norm(hidden_states: Tensor, weight: Tensor, bias: Tensor, *, epsilon: float) -> Tensors:
    """Returns LayerNorm over the last dim, and for each row the mean and 1 / deviation, [.., 1]."""
    return aten.native_layer_norm(hidden_states, weight.shape, weight, bias, epsilon)


def layer_norm_backward(
    grad_output: Tensor, hidden_states: Tensor, weight: Tensor, mean: Tensor, scale: Tensor
) -> Tensors:
    """Returns the gradients of the input [.., n], the weight [n] and the bias [n]."""
    # The operator reads of the bias only that there is one.
    return aten.native_layer_norm_backward(
        grad_output, hidden_states, weight.shape, mean, scale, weight, weight, [True] * 3
    )


def fused_layer_norm_backward(
    grad_output: Tensor, hidden_states: Tensor, weight: Tensor, mean: Tensor, scale: Tensor
) -> Tensors:
    # With n the normed row and g = dy w: dx = scale (g - mean(g) - n mean(g n)).
    normed, grad_normed = (hidden_states - mean) * scale, grad_output * weight
    grad_input = scale * (
        grad_normed
        - grad_normed.mean(-1, keepdim=True)
        - normed * (grad_normed * normed).mean(-1, keepdim=True)
    )
    grad_weight = (grad_output * normed).flatten(0, -2).sum(0)
    return grad_input, grad_weight, grad_output.flatten(0, -2).sum(0)


def rms_norm(
    hidden_states: Tensor, weight: Tensor, *, epsilon: float, group: Group = None
) -> Tensors:
    """Returns x / rms(x) * weight over rows of n channels (arXiv 1910.07467), and 1 / rms of each.

    The arithmetic is in float32. hidden_states: x, whose last dims have n elements together.
    weight: [n]. group: the ranks that split each row; one all-reduce. Backward issues one too.
    """
    rows = hidden_states.reshape(-1, weight.numel())
    x = rows.to(at_least_float32(rows.dtype))
    scale = _mean(x.square(), group).add_(epsilon).rsqrt_()
    return (x * scale).mul_(weight).to(rows.dtype).view(hidden_states.shape), scale


def rms_norm_backward(
    grad_output: Tensor,
    hidden_states: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    group: Group = None,
) -> Tensors:
    """Returns the gradients of the input and of the weight."""
    rows, grad_rows = (x.reshape(-1, weight.numel()) for x in (hidden_states, grad_output))
    # With n = x * scale and g = dy * weight: dx = scale (g - n mean(g n)), dweight = sum(dy n).
    grad, normed = grad_rows.to(scale.dtype), rows * scale
    grad_normed = grad * weight
    grad_weight = (grad * normed).sum(0)
    mean = _mean(grad_normed * normed, group)
    grad_input = grad_normed.sub_(normed.mul_(mean)).mul_(scale).to(rows.dtype)
    return grad_input.view(hidden_states.shape), grad_weight.to(weight.dtype)


def _mean(rows: Tensor, group: Group) -> Tensor:
    """Returns the mean of each row, [.., 1]; a group's ranks hold equal parts of it."""
    mean = rows.mean(-1, keepdim=True)
    # Out of place: a policy may keep the result of the all-reduce.
    return mean if group is None else all_reduce(mean, group) / group.size()


INPUT_AND_WEIGHT = slice(0, 2)
NORMS = {
    "LayerNorm": Pair(layer_norm, layer_norm_backward, INPUT_AND_WEIGHT, fused_layer_norm_backward),
    "RMSNorm": Pair(rms_norm, rms_norm_backward, INPUT_AND_WEIGHT),
    "BiaslessLayerNorm": Pair(
        lambda x, weight, epsilon: layer_norm(x, weight, torch.zeros_like(weight), epsilon=epsilon),
        lambda *kept: layer_norm_backward(*kept)[:2],
        INPUT_AND_WEIGHT,
        lambda *kept: fused_layer_norm_backward(*kept)[:2],
    ),
}


PASSING_ON = {name: passing_on(pair) for name, pair in NORMS.items()}.__getitem__
