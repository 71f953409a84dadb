"""The router of a mixture-of-experts layer: which experts a token is sent to, and their weights.

    logits [T, E] = x W^T              T tokens of this rank, E experts
    choice [T, k] = top-k of the scores, plus a bias of each expert if there is one
    weights [T, k] from the scores of the chosen experts

    scores          weights
    softmax         softmax of the k logits (Megatron's default), or --moe-router-pre-softmax: the
                    chosen k of the softmax over all experts
    sigmoid         sigmoid of each logit, divided by the sum of the chosen (2412.19437, sec. 2.1)
    sinkhorn        as with --moe-router-pre-softmax, or the sigmoid if k is 1. Training chooses by
                    the logits' doubly normalised exponentials over the rank's tokens (2202.01169)

Losses keep the choice balanced and the logits small. Only their gradients exist: backward adds them
to the gradient of the logits, as Megatron's MoEAuxLossAutoScaler does. The formulas of weights
and losses are plain torch operations. Backward runs them again on the kept logits, so a layer keeps
the logits, the choice, and counts, and no other tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from megatron_lite.config.model import ModelConfig
from megatron_lite.parallel.collectives import all_reduce_
from megatron_lite.parallel.compiled import Gradients, Pair, Tensors, applied, at_least_float32
from megatron_lite.parallel.parameter_spec import ParameterSpec, mark
from megatron_lite.parallel.state import ParallelState
from megatron_lite.parallel.torch_internals import is_fake
from megatron_lite.recompute.phase import is_recomputing
from megatron_lite.recompute.region_runner import Regions
from megatron_lite.tensor_parallel.rank_context import RankContext

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
OF_SEQUENCES, OF_STEP = "seq_aux_loss", "global_aux_loss"
SMALL = 1e-20  # Megatron's, in the sum of sigmoid scores
SINKHORN_SMALL, SINKHORN_TOLERANCE = 1e-8, 1e-4  # Megatron's too
SINKHORN_ROUNDS = 300  # rounding alone may change the factors of an expert that no token wants


class Routing(NamedTuple):
    """The experts of each token, [T, k] int64, and their weights [T, k] in the router's dtype.

    An expert that drops the token has its number plus E.
    received: what `Router.exchange` returned for the experts.
    """

    experts: Tensor
    weights: Tensor
    received: Tensor | None = None


class Router(nn.Module):
    """Chooses the experts of each token: [s/t under sequence parallelism else s, b, h] -> Routing.

    weight: [E, h], the same on every TP rank. bias: [E], or None, as Megatron's router has it.
    expert_bias: [E] float32, part of the state.
    tokens_per_expert: [E] float32, how many tokens this rank has sent to each expert since the step
        began. loss_sums: the sums of the load-balancing loss and of the z-loss over the
        micro-batches of the step, without their coefficients. Of several load-balancing losses it
        is the mean, each by its coefficient.
    tokens_group: the TP ranks, if each of them has other tokens (sequence parallelism).
    exchange: returns how many rows this rank receives, for the experts that it has chosen; None if
        it receives those of its own tokens, or as many from each.
    gradient_scale: the factor on the gradients of both losses, which the step sets: that of one
        micro-batch in the mean over micro-batches and data-parallel ranks, times the loss scale.

    Keeps its input, its noise, the logits, the choice, and the counts that each load-balancing loss
    needs. Forward issues one all-reduce of these counts over each group that splits the tokens.
    """

    expert_bias: Tensor | None
    tokens_per_expert: Tensor
    global_tokens: Tensor
    loss_sums: Tensor
    num_calls: Tensor
    gradient_scale: Tensor
    exchange: Callable[[Tensor], Tensor] | None = None

    def __init__(self, config: ModelConfig, context: RankContext) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.config, self.context = config, context
        of_experts = partial(
            context.new_parameter,
            config.num_experts,
            sum_grad_over_tp=context.sequence_parallel,
            init_std=config.init_method_std,
        )
        self.weight = of_experts(config.hidden_size)
        self.bias = of_experts() if config.add_bias_linear else None

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=context.device)

        biased = config.moe_router_enable_expert_bias
        self.register_buffer("expert_bias", zeros(config.num_experts) if biased else None)
        if self.expert_bias is not None:
            mark(self.expert_bias, ParameterSpec(global_shape=(config.num_experts,)))
        for name, value in {
            "tokens_per_expert": zeros(config.num_experts),
            "global_tokens": zeros(config.num_experts),
            "loss_sums": zeros(2),
            "num_calls": zeros(),
            "gradient_scale": zeros() + 1.0,
        }.items():
            self.register_buffer(name, value, persistent=False)
        self.tokens_group = context.tp_group if context.sequence_parallel else None

    def forward(self, hidden_states: Tensor, regions: Regions) -> Routing:
        """Returns the routing of this rank's tokens, T = s b, or s b / t."""
        config = self.config
        dtype, kind = hidden_states.dtype, hidden_states.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        dtype = DTYPES.get(config.moe_router_dtype or "", dtype)
        tokens, noise, width = hidden_states.flatten(0, 1), None, config.moe_input_jitter_eps
        if width is not None and self.training:
            with regions.rng.fork(self.context.residual_stream):
                noise = torch.empty_like(tokens).uniform_(1.0 - width, 1.0 + width)
        logits = _logits(tokens, self.weight, self.bias, noise, dtype)
        columns = hidden_states.shape[1]
        experts, *counts = regions.choose(lambda: self._choice(logits.detach(), columns))
        received = None if self.exchange is None else counts.pop()
        trains = self.training

        def backward(grad: Tensor, saved: Tensor, experts: Tensor, *counts: Tensor) -> Tensor:
            with torch.enable_grad():
                logits = saved.detach().requires_grad_()
                outputs, grads = [_weights(logits, experts, config)], [grad]
                for one in self._losses(logits, counts) if trains else ():
                    outputs.append(one.loss)
                    grads.append((self.gradient_scale * one.coefficient).to(one.loss.dtype))
                return torch.autograd.grad(outputs, logits, grads)[0]

        # The counts are among the saved tensors, so that hooks see them.
        pair = Pair(
            lambda logits, experts, *_: _weights(logits, experts, config), backward, slice(None)
        )
        weights = applied(pair, logits, experts, *counts)
        if trains and not is_recomputing():
            with torch.no_grad():
                num_experts = logits.shape[1]
                chosen = _counts(experts, 1, 2 * num_experts)
                self.tokens_per_expert.add_(chosen[0, :num_experts])
                for one in self._losses(logits, counts):
                    self.loss_sums[one.place].add_(one.loss * one.share)
        return Routing(experts, weights, received)

    def start_step(self, gradient_scale: Tensor | float) -> None:
        """Clears what a step counts. gradient_scale: see the class."""
        self.gradient_scale.fill_(gradient_scale)
        for tensor in (self.tokens_per_expert, self.global_tokens, self.num_calls, self.loss_sums):
            tensor.zero_()

    @torch.no_grad()
    def update_bias(self, skipped: Tensor) -> None:
        """Moves each expert's bias by one step towards balance, after a step (2408.15664, alg. 1).

        skipped: 0-d, 1 if the step was skipped, so that no bias moves.

        Issues an all-reduce of the counts over the data- and context-parallel ranks, and under
        sequence parallelism over the TP group.
        """
        if self.expert_bias is None:
            return
        counts = all_reduce_(self.tokens_per_expert.clone(), self.context.dp_cp_group)
        counts = all_reduce_(counts, self.tokens_group)
        error = (counts.mean() - counts) * (1.0 - skipped)
        self.expert_bias.add_(error.sign(), alpha=self.config.moe_router_bias_update_rate)

    def _losses(self, logits: Tensor, counts: Sequence[Tensor]) -> Iterator[_Term]:
        """Yields this rank's parts of the losses of one call that have an effect.

        counts: those of each load-balancing loss: [1, E], or [b, E] for the loss of each sequence.
        """
        config, own = self.config, self.context
        num_ranks = (own.tp_size if own.sequence_parallel else 1) * own.cp_size
        all_coefficients = sum(coefficient for _, coefficient in config.balance_losses)
        for (kind, coefficient), chosen in zip(config.balance_losses, counts, strict=True):
            # E sum_e f_e P_e (2101.03961, eq. 4): the share of tokens sent to an expert, times its
            # mean score. For sequences it is the mean over them.
            columns, num_experts = chosen.shape
            total: Any = len(logits) // columns * num_ranks
            parts = 1
            if kind == OF_STEP:
                # A part of the loss of all ranks, of which the step takes the mean. Megatron leaves
                # it at that, so that its coefficient means less the more ranks there are.
                total, parts = chosen.sum() / config.moe_router_topk, own.dp_size
            scores = _balance_scores(logits, config).view(-1, columns, num_experts).sum(0)
            factor = parts * num_experts / (config.moe_router_topk * columns * total * total)
            loss = (scores * chosen).sum() * factor
            yield _Term(0, loss, coefficient, coefficient / all_coefficients)
        if config.moe_z_loss_coeff:  # the mean square of logsumexp (2202.08906, eq. 5)
            loss = logits.logsumexp(-1).square().mean() / num_ranks
            yield _Term(1, loss, config.moe_z_loss_coeff)

    @torch.no_grad()
    def _choice(self, logits: Tensor, columns: int) -> Tensors:
        """Returns what a replay may not choose again: the experts [T, k], the counts that each
        load-balancing loss needs, and what `exchange` returns.

        columns: how many sequences the tokens are of.
        """
        config = self.config
        scores = logits
        if config.moe_router_score_function == "sigmoid" or config.moe_router_pre_softmax:
            scores = _scores(logits, config)
        if self.expert_bias is not None:
            scores = scores + self.expert_bias
        if config.chooses_by_sinkhorn and self.training:
            scores = _sinkhorn(logits)
        if config.chooses_in_groups:
            scores = _without_other_groups(scores, config)
        experts = scores.topk(config.moe_router_topk, dim=-1).indices
        # The loss judges the choice that the scores alone would make, as Megatron's does.
        judged = experts
        if self.expert_bias is not None or config.chooses_in_groups:
            judged = _balance_scores(logits, config).topk(config.moe_router_topk, dim=-1).indices
        found = [_within_capacity(experts, logits, config)]
        for kind, _ in config.balance_losses if self.training else ():
            counts = _counts(judged, columns if kind == OF_SEQUENCES else 1, logits.shape[1])
            for group in (self.tokens_group, self.context.cp_group):
                counts = all_reduce_(counts, group)
            if kind == OF_STEP:  # the mean of the step's micro-batches so far, over all ranks
                counts = all_reduce_(counts, self.context.dp_group)
                mean = self.global_tokens.add_(counts[0]) / self.num_calls.add_(1.0)
                counts = mean.unsqueeze(0)
            found.append(counts)
        if self.exchange is not None:
            found.append(self.exchange(found[0]))
        return tuple(found)


class _Term(NamedTuple):
    """A loss that has an effect. place: in `loss_sums`. share: of its coefficient in those of the
    losses there."""

    place: int
    loss: Tensor
    coefficient: float
    share: float = 1.0


def _logits(
    tokens: Tensor, weight: Tensor, bias: Tensor | None, noise: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """x [T, h], W [E, h], b [E] or None -> (x noise) W^T + b [T, E], computed in `dtype`.

    noise: [T, h], or None for 1. Keeps x, the noise and W as they are.
    """
    has_bias = bias is not None

    def forward(
        tokens: Tensor, weight: Tensor, noise: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        read = tokens if noise is None else tokens * noise
        with torch.autocast(tokens.device.type, enabled=False):
            if bias is None:
                return read.to(dtype) @ weight.to(dtype).t()
            return torch.addmm(bias.to(dtype), read.to(dtype), weight.to(dtype).t())

    def backward(grad: Tensor, tokens: Tensor, weight: Tensor, noise: Tensor | None) -> Gradients:
        grad_tokens = (grad @ weight.to(grad.dtype)).to(tokens.dtype)
        if noise is not None:
            grad_tokens, tokens = grad_tokens * noise, tokens * noise
        grad_weight = (grad.t() @ tokens.to(grad.dtype)).to(weight.dtype)
        grad_bias = grad.sum(0).to(weight.dtype) if has_bias else None
        return grad_tokens, grad_weight, None, grad_bias

    return applied(Pair(forward, backward, slice(3)), tokens, weight, noise, bias)


def _scores(logits: Tensor, config: ModelConfig) -> Tensor:
    """Returns the score of every expert, in the dtype of the logits."""
    if config.moe_router_score_function == "sigmoid":
        return _wide(logits).sigmoid().to(logits.dtype)
    return _wide(logits).softmax(-1).to(logits.dtype)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(at_least_float32(tensor.dtype))


def _weights(logits: Tensor, experts: Tensor, config: ModelConfig) -> Tensor:
    """Returns the weights of the chosen experts, [T, k], as Megatron computes them.

    Those that drop the token count as well, and nothing reads their weights.
    """
    if config.moe_expert_capacity_factor is not None:
        experts = experts % logits.shape[1]
    is_sigmoid = config.moe_router_score_function == "sigmoid"
    if config.chooses_by_sinkhorn and config.moe_router_topk == 1:
        weights = logits.sigmoid().gather(-1, experts)
    elif is_sigmoid or config.moe_router_pre_softmax or config.chooses_by_sinkhorn:
        weights = _scores(logits, config).gather(-1, experts)
    else:
        weights = _scores(logits.gather(-1, experts), config)
    if is_sigmoid and config.moe_router_topk > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + SMALL)
    factor = config.moe_router_topk_scaling_factor
    return weights if factor is None else weights * factor


def _balance_scores(logits: Tensor, config: ModelConfig) -> Tensor:
    """Returns the scores of the load-balancing loss, which add up to 1 for each token."""
    if config.moe_router_score_function == "sigmoid":
        scores = logits.sigmoid()
        return scores / (scores.sum(-1, keepdim=True) + SMALL)
    return _wide(logits).softmax(-1)


def _sinkhorn(logits: Tensor) -> Tensor:
    """Returns exp(logits) [T, E], float32, with the rows and the columns scaled until each adds up
    to about the same. The host waits for the end of every round."""
    scores = logits.float().exp()
    columns = torch.ones_like(scores[0])
    for _ in range(SINKHORN_ROUNDS):
        rows = 1.0 / (len(scores) * ((columns * scores).sum(1) + SINKHORN_SMALL))
        scaled = 1.0 / (scores.shape[1] * ((rows.unsqueeze(1) * scores).sum(0) + SINKHORN_SMALL))
        columns, change = scaled, (columns - scaled).abs().mean()
        if is_fake(change) or change <= SINKHORN_TOLERANCE:  # a fake tensor has no value
            break
    return columns * scores * rows.unsqueeze(1)


def _without_other_groups(scores: Tensor, config: ModelConfig) -> Tensor:
    """Returns the scores, with -inf for the experts outside the chosen groups (2405.04434, 2.1.2).

    A group's score is the sum of its best experts.
    """
    groups, chosen = config.moe_router_num_groups, config.moe_router_group_topk
    assert groups is not None and chosen is not None
    grouped = scores.unflatten(-1, (groups, -1))
    judges = config.moe_router_group_best or config.moe_router_topk // chosen
    best = grouped.topk(judges, dim=-1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(chosen).indices, True)
    return grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)


def _within_capacity(experts: Tensor, logits: Tensor, config: ModelConfig) -> Tensor:
    """Returns the choice [T, k], with E added where an expert has no room for the token.

    It takes the tokens with the highest weights first, or the first tokens.
    """
    num_experts, capacity = logits.shape[1], config.capacity(len(experts))
    if capacity is None:
        return experts
    chosen = experts.flatten()
    first = torch.arange(len(chosen), device=chosen.device)
    order = first
    if config.moe_token_drop_policy == "probs":
        weights = _weights(logits, experts, config).flatten()
        order = weights.argsort(descending=True, stable=True)
    order = order[chosen[order].argsort(stable=True)]  # by expert, and then by what it takes first
    ranked = chosen[order]
    is_above = first - torch.searchsorted(ranked, ranked) >= capacity
    return chosen.index_add(0, order, is_above * num_experts).view_as(experts)


def _counts(experts: Tensor, columns: int, num_experts: int) -> Tensor:
    """Returns how many tokens each expert gets, [columns, E] float32.

    experts: [T, k] of the tokens [s, b]. columns: b for each sequence by itself, or 1.
    """
    chosen = experts.view(-1, columns, experts.shape[-1]).transpose(0, 1).flatten(1)
    counts = torch.zeros(columns, num_experts, dtype=torch.float32, device=experts.device)
    return counts.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.float32))


def router_figures(
    routers: Sequence[Router], parallel: ParallelState, config: ModelConfig, num_microbatches: int
) -> dict[str, Tensor]:
    """Returns the figures of a step's routers, 0-d and the same on every rank.

    load_balancing_loss, z_loss: the means over layers and micro-batches, without coefficients; of
        losses in use.
    expert_imbalance: the tokens of the fullest expert of any layer over those of the mean expert.
    expert_rank_imbalance: the same of expert-parallel ranks, if there are several.
    Issues an all-reduce over each group of ranks with other tokens, and two over `pp_group`.
    """
    losses = torch.zeros(2, dtype=torch.float32, device=parallel.device)
    ep_size = (parallel.experts or parallel).ep_size
    imbalance = losses.new_ones(2)
    if routers:  # else the stage has no layer with experts
        sums = torch.stack([one.loss_sums for one in routers]).sum(0)
        counts = torch.stack([one.tokens_per_expert for one in routers])
        both = torch.cat([sums, counts.flatten()])
        for group in (routers[0].tokens_group, parallel.dp_cp_group):
            both = all_reduce_(both, group)
        num_calls = (config.num_layers - config.num_dense_layers) * num_microbatches
        losses, counts = both[:2] / (num_calls * parallel.dp_size), both[2:].view_as(counts)
        of_ranks = counts.view(len(routers), ep_size, -1).sum(-1)
        imbalance = torch.stack([(one.amax(1) / one.mean(1)).max() for one in (counts, of_ranks)])
    losses = all_reduce_(losses, parallel.pp_group)
    imbalance = all_reduce_(imbalance, parallel.pp_group, ReduceOp.MAX)
    figures = {"expert_imbalance": imbalance[0]}
    if config.balance_losses:
        figures["load_balancing_loss"] = losses[0]
    if config.moe_z_loss_coeff:
        figures["z_loss"] = losses[1]
    if ep_size > 1:
        figures["expert_rank_imbalance"] = imbalance[1]
    return figures
