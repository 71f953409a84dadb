"""A mixture-of-experts layer in place of an MLP (arXiv 2101.03961, 2401.04088).

    tokens [T, h] --router--> experts [T, k], weights [T, k]
        | each token k times, sorted by expert
    rows [n, h] --fc1--> [n, f] --activation x weight--> [n, f] --fc2--> [n, h]
        | summed over the k rows of each token
    output [T, h], plus that of the shared expert

Without --moe-expert-capacity-factor there are n = k T rows, however they are spread over the
experts. With it, an expert takes at most C rows of each router, or exactly C, of which some are
padding: rows of any token with the weight 0. Under sequence
parallelism each rank chooses for its own tokens. Then the tokens are gathered, every rank computes
its part of each expert's channels, and the partial sums are scattered again. Expert-parallel ranks
hold different experts: see dispatch.py.
"""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.regions import MOE_ACTIVATION, SHARED_EXPERTS
from megatron_lite.parallel.compiled import Pair, Tensors, applied
from megatron_lite.recompute.region_runner import Regions
from megatron_lite.tensor_parallel.grouped_linear import GroupedLinear
from megatron_lite.tensor_parallel.mappings import (
    copy_to_tensor_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron_lite.tensor_parallel.rank_context import RankContext

from .activations import activation_pair
from .dispatch import Dispatcher, RowOrder
from .layer import MLP
from .router import Router, Routing


class MixtureOfExperts(nn.Module):
    """Router, experts and shared expert: [s/t under sequence parallelism else s, b, h] -> the same.

    Forward all-gathers tokens and routing over the experts' TP group and reduce-scatters the output
    under sequence parallelism; else it all-reduces the output. Backward issues the conjugates.
    num_rows: how many rows the experts of this rank computed last, and how many it sent.
    Keeps: see the router; the order of the rows, the rows, their weights, and the inputs of the
    activation and of fc2.
    """

    def __init__(self, config: ModelConfig, context: RankContext) -> None:
        super().__init__()
        self.config, self.context = config, context
        self.num_rows = (0, 0)
        self.router = Router(config, context)
        self.shared_experts: SharedExperts | None = None
        if config.moe_shared_expert_intermediate_size is not None:
            self.shared_experts = SharedExperts(config, context)
        self.experts = Experts(config, context)
        self._dispatcher = Dispatcher(context, config)
        if self._dispatcher.asks:
            self.router.exchange = self._dispatcher.exchange

    def forward(self, hidden_states: Tensor, regions: Regions, skip_tail: bool = False) -> Tensor:
        """Runs the layer. skip_tail: the output's values are never read; the last products of the
        experts are skipped."""
        hidden_states = _gathering(hidden_states)
        routing = self.router(hidden_states, regions)
        if self.shared_experts is None:
            return self._routed(hidden_states, routing, regions, skip_tail)
        shared = regions.run(SHARED_EXPERTS, self.shared_experts, hidden_states, regions)
        return shared + self._routed(hidden_states, routing, regions, skip_tail)

    def _routed(
        self, hidden_states: Tensor, routing: Routing, regions: Regions, skip_tail: bool
    ) -> Tensor:
        group, over = self._dispatcher.tp_group, self._dispatcher.gathered_over
        # tokens and weights: each rank's gradients of them are partial
        enter: Callable[..., Tensor] = copy_to_tensor_parallel_region
        leave: Callable[..., Tensor] = reduce_from_tensor_parallel_region
        if self.context.sequence_parallel:
            enter = gather_from_sequence_parallel_region
            leave = reduce_scatter_to_sequence_parallel_region
        tokens, weights = (enter(one, group) for one in (hidden_states, routing.weights))
        order = self._dispatcher.order(routing.experts, routing.received)
        rows = gather_from_sequence_parallel_region(tokens.flatten(0, 1), over)
        weights = gather_from_sequence_parallel_region(weights, over)
        partial_sums = self.experts(rows, weights, order, regions, skip_tail)
        self.num_rows = self.experts.num_rows
        partial_sums = reduce_scatter_to_sequence_parallel_region(partial_sums, over, skip_tail)
        return leave(partial_sums.view(tokens.shape), group, skip_tail)


def _gathering(hidden_states: Tensor) -> Tensor:
    """Returns the tensor as a node of its own, at which the gradients of a region's readers add up.

    A replay adds them up before they leave the region. Sums in another order have other bits.
    """
    return hidden_states.view_as(hidden_states)


class SharedExperts(MLP):
    """The MLP that reads every token: [s/t under sequence parallelism else s, b, h] -> the same.

    gate_weight: [1, h], or None. Each token's output is multiplied by sigmoid(x gate_weight^T).
    """

    def __init__(self, config: ModelConfig, context: RankContext) -> None:
        super().__init__(
            config,
            context,
            ffn_size=config.moe_shared_expert_intermediate_size,
            activation=MOE_ACTIVATION,
            output_is_read=True,  # the experts follow
        )
        self.gate_weight: nn.Parameter | None = None
        if config.moe_shared_expert_gate:
            self.gate_weight = context.new_parameter(
                1,
                config.hidden_size,
                sum_grad_over_tp=context.sequence_parallel,
                init_std=config.init_method_std,
            )

    def forward(self, hidden_states: Tensor, regions: Regions, skip_tail: bool = False) -> Tensor:
        """Runs the whole MLP. skip_tail: makes no difference, since operations follow."""
        if self.gate_weight is None:
            return super().forward(hidden_states, regions)
        hidden_states = _gathering(hidden_states)
        gate = F.linear(hidden_states, self.gate_weight).sigmoid()
        return gate * super().forward(hidden_states, regions)


class Experts(nn.Module):
    """The experts' MLPs: tokens [T, h] and their routing -> [T, h], partial over the TP group."""

    def __init__(self, config: ModelConfig, context: RankContext) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.output_is_read = config.norms_after
        self.activation = partial(applied, _weighted(activation_pair(config)))
        linear = partial(
            GroupedLinear, config.num_experts, bias=config.add_bias_linear, context=context
        )
        self.linear_fc1 = linear(
            config.hidden_size,
            config.fc1_blocks * config.expert_size,
            tp_dim=1,
            tp_blocks=config.fc1_blocks,
            init_std=config.init_method_std,
        )
        self.linear_fc2 = linear(
            config.expert_size, config.hidden_size, tp_dim=2, init_std=config.output_init_std
        )

    def forward(
        self, tokens: Tensor, weights: Tensor, order: RowOrder, regions: Regions, skip_tail: bool
    ) -> Tensor:
        """Returns the sum of the k rows of each token. weights: [T, k]."""
        rows, row_weights = order.sent(tokens, weights)
        num_sent = rows.shape[0]
        if order.journey is not None:
            rows, row_weights = map(order.journey.moved, (rows, row_weights))
        self.num_rows = rows.shape[0], num_sent
        # The name is taken again, so that nothing keeps rows alive that backward does not save.
        rows = self.linear_fc1(rows, order.ends)
        rows = regions.run_discarding(MOE_ACTIVATION, self.activation, rows, row_weights)
        if not self.output_is_read:
            regions.enter_tail()
        rows = self.linear_fc2(rows, order.ends, skip_tail, row_weights)
        if order.journey is not None:
            rows = order.journey.moved(rows, is_back=True, skip_tail=skip_tail)
        return order.summed(rows, weights.shape, skip_tail)


def _weighted(pair: Pair) -> Pair:
    """x [n, blocks f], w [n] -> activation(x) w [n, f]. Keeps x and w."""

    def forward(intermediate: Tensor, weights: Tensor) -> Tensor:
        return (pair.forward(intermediate) * weights.unsqueeze(-1)).to(intermediate.dtype)

    def backward(grad: Tensor, intermediate: Tensor, weights: Tensor) -> Tensors:
        grad_weights = (grad * pair.forward(intermediate)).sum(-1, dtype=weights.dtype)
        grad_activated = (grad * weights.unsqueeze(-1)).to(intermediate.dtype)
        return pair.backward(grad_activated, intermediate), grad_weights

    return Pair(forward, backward, slice(0, 2))
