"""The stack of transformer layers and the norm after it."""

from __future__ import annotations

from torch import Tensor, nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.stages import Stage
from megatron_lite.model.layer import TransformerLayer
from megatron_lite.model.norm import Norm
from megatron_lite.model.rotary import RotaryTables
from megatron_lite.recompute.layer_runner import run_layers
from megatron_lite.recompute.ops import find_operators
from megatron_lite.recompute.recompute_plan import RecomputePlan
from megatron_lite.recompute.stores import Stores
from megatron_lite.tensor_parallel.rank_context import RankContext


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
        for segment in plan.segments:
            find_operators(segment.ops)
        self.context, self.plan, self.stores = context, plan, Stores(context.device)
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

    def forward(
        self,
        hidden_states: Tensor,
        rotary: RotaryTables | None,
        plan: RecomputePlan | None = None,
        document_starts: Tensor | None = None,
    ) -> Tensor:
        hidden_states = run_layers(
            plan or self.plan,
            list(self.layers),
            hidden_states,
            rotary,
            document_starts,
            rng=self.context.rng,
            tp_group=self.context.group,
            stores=self.stores,
        )
        return (
            hidden_states if self.final_layernorm is None else self.final_layernorm(hidden_states)
        )
