"""The transformer layers of a stage: the MLP, the layer, and the stack with the norm after it.

A layer has dropout before each addition:

default                y = x + attention(norm(x)),  output = y + mlp(norm(y))
--parallel-residual    y = x + attention(norm(x)),  output = y + mlp(norm(x))
--norm-position after  y = x + norm(attention(x)),  output = y + norm(mlp(y))
--norm-position both   y = x + norm(attention(norm(x))),  output = y + norm(mlp(norm(y)))

With --shared-norm the parallel residual has one norm of x.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.regions import ACTIVATION, LAYERNORM, MLP_REGION, MOE
from megatron_lite.config.stages import Stage
from megatron_lite.context_parallel.attention_kernels import CuSeqlens
from megatron_lite.parallel.compiled import Tensors
from megatron_lite.recompute.layer_runner import run_layers
from megatron_lite.recompute.recompute_plan import RecomputePlan
from megatron_lite.recompute.region_runner import Regions
from megatron_lite.tensor_parallel.layers import ColumnParallelLinear
from megatron_lite.tensor_parallel.rank_context import RankContext

from .activations import activation_function, adds_bias
from .attention import SelfAttention, branch_end
from .dropout import add_dropped_out
from .norm import PASSING_ON, Norm

if TYPE_CHECKING:
    from megatron_lite.recompute.stores import Stores

    from .latent_attention import LatentAttention

# The MLP of a layer: two linear layers with an activation between them.


class MLP(nn.Module):
    """The MLP: [s/t under sequence parallelism else s, b, h] -> the same shape.

    The activation's output is [s, b, f/t]. With a gated activation linear_fc1 computes [gate; up].
    Its 2f rows form two blocks, and each block is split over the TP ranks.
    ffn_size: f, if it is not the model's.
    activation: the region of the activation.
    output_is_read: whether backward reads the output, or the layer has operations after it.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: RankContext,
        *,
        ffn_size: int | None = None,
        activation: str = ACTIVATION,
        output_is_read: bool,
    ) -> None:
        super().__init__()
        ffn_size = ffn_size or config.ffn_size
        self.activation_region = activation
        self.activation = activation_function(config, context.kernels)
        self.output_is_read = output_is_read
        blocks = config.fc1_blocks
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size,
            blocks * ffn_size,
            bias=config.add_bias_linear,
            init_std=config.init_method_std,
            context=context,
            tp_blocks=blocks,
            skip_bias_add=adds_bias(config, context.kernels),
        )
        self.linear_fc2 = branch_end(ffn_size, config, context, bias=config.add_bias_linear)

    def forward(self, hidden_states: Tensor, regions: Regions, skip_tail: bool = False) -> Tensor:
        """Runs the MLP. skip_tail: the output's values are never read; linear_fc2 is skipped."""
        activated = regions.run_discarding(
            self.activation_region, self._activate, self.linear_fc1(hidden_states)
        )
        if not self.output_is_read:
            regions.enter_tail()
        return self.linear_fc2(activated, skip_tail)

    def _activate(self, intermediate: Tensor) -> Tensor:
        bias = self.linear_fc1.skipped_bias
        return self.activation(intermediate, *(() if bias is None else (bias,)))


class TransformerLayer(nn.Module):
    """One transformer layer: [s/t under sequence parallelism else s, b, h] -> the same shape.

    number: the layer's number in the whole model, counted from 0.
    """

    def __init__(self, config: ModelConfig, context: RankContext, number: int) -> None:
        super().__init__()
        self.config, self.context = config, context
        self.residual_stream = context.residual_stream

        def norm(*, after: bool) -> Norm | None:
            if not (config.norms_after if after else config.norms_before):
                return None
            return Norm(
                config.hidden_size,
                config,
                context,
                partial_grad=context.sequence_parallel,
                reads_residual=not after,
                also=None if after or config.parallel_residual else PASSING_ON,
            )

        self.input_layernorm = norm(after=False)
        attention: type[SelfAttention | LatentAttention] = SelfAttention
        if config.multi_latent_attention:
            # late: few models have it
            from .latent_attention import LatentAttention

            attention = LatentAttention
        self.self_attention = attention(config, context, number)
        self.post_self_attn_layernorm = norm(after=True)
        self.pre_mlp_layernorm = None if config.shared_norm else norm(after=False)
        self.mlp_region = MOE if config.layer_has_experts(number) else MLP_REGION
        self.mlp: nn.Module
        if config.layer_has_experts(number):
            # late: a dense model does not need it
            from .experts import MixtureOfExperts

            self.mlp = MixtureOfExperts(config, context)
        else:
            # by the backward of the norm after the MLP
            self.mlp = MLP(config, context, output_is_read=config.norms_after)
        self.post_mlp_layernorm = norm(after=True)

    def forward(
        self,
        hidden_states: Tensor,
        rotary: Tensors | None,
        documents: CuSeqlens | None,
        regions: Regions,
    ) -> Tensor:
        normed, hidden_states = _normed(self.input_layernorm, hidden_states, regions)
        branch = self.self_attention(normed, rotary, regions, documents)
        if self.post_self_attn_layernorm is not None:
            branch = self.post_self_attn_layernorm(branch)
        bias = self.self_attention.linear_proj.skipped_bias
        attended = self._add(hidden_states, branch, bias, regions)
        del branch  # which would live on while the MLP runs
        if not self.config.parallel_residual:
            normed, attended = _normed(self.pre_mlp_layernorm, attended, regions)
        elif self.pre_mlp_layernorm is not None:
            normed, _ = _normed(self.pre_mlp_layernorm, hidden_states, regions)
        skip_tail = regions.skip_layer_tail
        branch = regions.run(
            self.mlp_region,
            self._mlp,
            normed,
            regions,
            skip_tail=skip_tail,
            modules=(self.mlp, self.post_mlp_layernorm),
        )
        bias = self.mlp.linear_fc2.skipped_bias if isinstance(self.mlp, MLP) else None
        return self._add(attended, branch, bias, regions, skip_tail=skip_tail)

    def _mlp(self, hidden_states: Tensor, regions: Regions, skip_tail: bool) -> Tensor:
        """Runs the MLP and the norm after it. The norm's backward reads the output of the MLP.

        A replay can therefore leave out linear_fc2 only if no norm follows.
        """
        if self.post_mlp_layernorm is None:
            return self.mlp(hidden_states, regions, skip_tail)
        return self.post_mlp_layernorm(self.mlp(hidden_states, regions))

    def _add(
        self,
        residual: Tensor,
        branch: Tensor,
        bias: Tensor | None,
        regions: Regions,
        *,
        skip_tail: bool = False,
    ) -> Tensor:
        if self.config.residual_multiplier != 1.0:
            branch = branch * self.config.residual_multiplier
        return add_dropped_out(
            residual,
            branch,
            self.config.hidden_dropout if self.training else 0.0,
            regions,
            self.residual_stream,
            bias=bias,
            skip_tail=skip_tail,
            kernels=self.context.kernels,
        )


def _normed(norm: Norm | None, tensor: Tensor, regions: Regions) -> Tensors:
    """Returns the norm of a tensor, and the tensor for what else reads it."""
    if norm is None:
        return tensor, tensor
    found = regions.run_discarding(LAYERNORM, norm, tensor)
    return found if norm.does_more else (found, tensor)


class TransformerBlock(nn.Module):
    """The layers of one stage: [s/t under sequence parallelism else s, b, h] -> the same shape.

    plan: what backward rebuilds.
    stage: which layers these are. They keep their numbers in the whole model. Only the last stage
        has the norm after its layers.
    InputError: the plan names operators that torch does not have, or whose results cannot be kept.
    """

    def __init__(
        self, config: ModelConfig, context: RankContext, plan: RecomputePlan, stage: Stage
    ) -> None:
        super().__init__()
        if any(segment.ops for segment in plan.segments):
            from megatron_lite.recompute.ops import find_operators

            for segment in plan.segments:
                find_operators(segment.ops)
        self.context, self.plan = context, plan
        self.layers = nn.ModuleList()
        for number in range(stage.first_layer, stage.first_layer + stage.num_layers):
            self.layers.add_module(str(number), TransformerLayer(config, context, number))
        self.final_layernorm = (
            Norm(
                config.hidden_size,
                config,
                context,
                partial_grad=context.sequence_parallel,
                reads_residual=True,
            )
            if stage.is_last
            else None
        )

    @cached_property
    def stores(self) -> Stores:
        """The memory for what the layers keep on the host."""
        from megatron_lite.recompute.stores import Stores

        return Stores(self.context.device)

    def forward(
        self,
        hidden_states: Tensor,
        rotary: Tensors | None,
        plan: RecomputePlan | None = None,
        documents: CuSeqlens | None = None,
    ) -> Tensor:
        plan = plan or self.plan
        hidden_states = run_layers(
            plan,
            list(self.layers),
            hidden_states,
            rotary,
            documents,
            rng=self.context.rng,
            tp_group=self.context.tp_group,
            stores=self.stores if plan.uses_stores else None,
        )
        return (
            hidden_states if self.final_layernorm is None else self.final_layernorm(hidden_states)
        )
