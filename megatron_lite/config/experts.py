"""The settings of mixture-of-experts layers, with Megatron's names. ModelConfig inherits them.

NOTATION, besides that of config/model.py:
    E  experts of a layer    k  experts that a token is sent to    n  their rows, k s b

A layer with experts has a router and E experts in place of its MLP. The router gives each token k
experts and a weight for each. The layer's output is the weighted sum of what they return.
"""

import math
from functools import partial
from typing import Any

from .layer_pattern import parse_pattern
from .setting import Settings, count, setting, switch

LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
SINKHORN = "sinkhorn"
ALONE = dict(
    excludes=f"moe_router_load_balancing_type={SINKHORN}",
    why="it chooses and weighs by its own rule",
)
of_experts = partial(setting, without="num_experts")
NOT_HERE = "is not implemented here: choose one of the others"


class ExpertSettings(Settings):
    """Which layers have experts, how tokens choose them, and what keeps the choice balanced.

    moe_layer_freq: which layers have experts: every N-th, beginning with layer 0, or a list with 1
        for each that has them.
    moe_router_load_balancing_type: over which tokens the balance is judged: those of a micro-batch,
        of each sequence, or of all micro-batches of a step so far on all ranks. With several there
        are as many factors.
    moe_expert_capacity_factor: see `capacity`. A dropped token gets nothing from that expert.
    """

    num_experts: int | None = count(
        "experts of each mixture-of-experts layer; none: every layer has a dense MLP",
        multiple_of="expert_model_parallel_size",
        why="each rank holds equally many of them",
    )
    moe_layer_freq: int | tuple[int, ...] = of_experts(
        "every N-th layer has experts, beginning with the first; or a list with 1 for each layer "
        "that has them, such as [0]*1+[1]*5",
        1,
        parse=partial(parse_pattern, "--moe-layer-freq"),
        **ALONE,
    )
    moe_ffn_hidden_size: int | None = count(
        "channels inside each expert; derived: --ffn-hidden-size",
        multiple_of="tensor_model_parallel_size",
        why="each rank holds an equal part of every expert",
        without="num_experts",
    )
    moe_shared_expert_intermediate_size: int | None = count(
        "channels inside the shared expert, which reads every token; none: no shared expert",
        multiple_of="tensor_model_parallel_size",
        why="each rank holds an equal part of it",
        without="num_experts",
    )
    moe_shared_expert_gate: bool = of_experts(
        "multiply the shared expert's output by a sigmoid of the token",
        False,
        needs="moe_shared_expert_intermediate_size",
    )
    moe_router_topk: int = count(
        "experts that each token is sent to", 2, upto="num_experts", without="num_experts"
    )
    moe_router_score_function: str = of_experts(
        "scores of the experts for a token",
        "softmax",
        choices="softmax sigmoid",
        refused={"sqrtsoftplus": NOT_HERE},
        **ALONE,
    )
    moe_router_pre_softmax: bool = switch(
        "softmax over all experts before the choice, instead of over the chosen ones",
        needs="moe_router_score_function=softmax",
        without="num_experts",
        **ALONE,
    )
    moe_router_dtype: str | None = of_experts(
        "precision of the router's matmul and scores; derived: that of the layer",
        choices="fp32 fp64",
    )
    moe_router_num_groups: int | None = count(
        "groups of experts, of which a token chooses some first", without="moe_router_group_topk"
    )
    moe_router_group_topk: int | None = of_experts(
        "groups that a token chooses",
        least=1,
        upto="moe_router_num_groups",
        needs="moe_router_num_groups",
        **ALONE,
    )
    moe_router_group_best: int | None = count(
        "best experts that judge a group, 1 in DeepSeek-V2; derived as in Megatron: "
        "--moe-router-topk / --moe-router-group-topk",
        without="moe_router_group_topk",
    )
    moe_router_topk_scaling_factor: float | None = of_experts(
        "factor on the weights of the chosen experts", above=0.0, **ALONE
    )
    moe_router_enable_expert_bias: bool = of_experts(
        "balance without a loss: a bias of each expert, which only the choice reads, moves after "
        "each step (2408.15664)",
        False,
        needs="moe_router_score_function=sigmoid",
    )
    moe_router_bias_update_rate: float = of_experts(
        "step of the experts' biases", 1e-3, least=0.0, needs="moe_router_enable_expert_bias"
    )
    moe_router_load_balancing_type: str | tuple[str, ...] = of_experts(
        "tokens over which the load-balancing loss is taken: a micro-batch, each sequence, or all "
        "of a step so far; several: a loss each; or sinkhorn, which balances the choice instead",
        "aux_loss",
        nargs="+",
        choices=(*LOSSES, SINKHORN),
        refused={"quantile_balancing": NOT_HERE},
    )
    moe_aux_loss_coeff: float | tuple[float, ...] = of_experts(
        "factor on the load-balancing loss (2101.03961), or on each",
        0.0,
        nargs="+",
        least=0.0,
        unless="moe_router_load_balancing_type=none",
        **ALONE,
    )
    moe_z_loss_coeff: float | None = of_experts(
        "factor on the loss that keeps the router's logits small (2202.08906)", least=0.0
    )
    moe_input_jitter_eps: float | None = of_experts(
        "in training, the router reads its input times uniform noise from 1 - EPS to 1 + EPS",
        above=0.0,
    )
    moe_expert_capacity_factor: float | None = of_experts(
        "drop tokens of an expert above this factor on its share of a rank's choices; none: drop "
        "no token",
        above=0.0,
    )
    moe_token_drop_policy: str = setting(
        "tokens that an expert drops: those of its lowest weights, or the last ones",
        "probs",
        choices="probs position",
        without="moe_expert_capacity_factor",
    )
    moe_pad_expert_input_to_capacity: bool = switch(
        "give each expert as many rows as its capacity, so that kept bytes depend on no choice",
        needs="moe_expert_capacity_factor",
        excludes="moe_router_enable_expert_bias",
        why="experts with equally many rows need no bias, and get none in Megatron",
    )

    @property
    def balance_losses(self) -> tuple[tuple[str, float], ...]:
        """The load-balancing losses that have an effect, and the factor on each."""
        kinds, factors = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        pairs = zip(in_tuple(kinds), in_tuple(factors), strict=True)
        return tuple((kind, factor) for kind, factor in pairs if factor and kind != "none")

    def capacity(self, tokens: int) -> int | None:
        """Returns the most rows of an expert, of the choices that a router makes for its tokens.

        Returns None if no token is dropped.
        """
        assert self.num_experts
        if self.moe_expert_capacity_factor is None:
            return None
        share = tokens * self.moe_router_topk / self.num_experts
        return min(tokens, math.ceil(share * self.moe_expert_capacity_factor))

    def chosen_rows(self, tokens: int, imbalance: float = 1.0) -> int:
        """Returns the rows of a router's choices that are computed: those of a balanced choice, or
        times the imbalance on the fullest rank. Padded experts have as many for any choice."""
        assert self.num_experts
        chosen, capacity = round(self.moe_router_topk * tokens * imbalance), self.capacity(tokens)
        if capacity is None:
            return chosen
        whole = capacity * self.num_experts
        return whole if self.moe_pad_expert_input_to_capacity else min(whole, chosen)

    @property
    def chooses_by_sinkhorn(self) -> bool:
        """Tells whether the choice is balanced over the tokens of a rank, without a loss."""
        return self.moe_router_load_balancing_type == SINKHORN

    @property
    def chooses_in_groups(self) -> bool:
        """Tells whether a token chooses groups of experts before it chooses experts."""
        return self.moe_router_group_topk is not None

    def layer_has_experts(self, layer: int) -> bool:
        """Returns whether the layer has experts. layer: its number in the whole model, from 0."""
        if self.num_experts is None:
            return False
        pattern = self.moe_layer_freq
        return layer % pattern == 0 if isinstance(pattern, int) else pattern[layer] == 1

    def check_experts(self) -> None:
        """Raises ValueError for losses without a factor each, a shared expert with a bias, or
        groups that do not divide the experts."""
        names = ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
        for name in names:  # one value in a list is that value
            if len(value := in_tuple(getattr(self, name))) == 1:
                object.__setattr__(self, name, value[0])
        kinds, factors = (in_tuple(getattr(self, name)) for name in names)
        is_mixed = SINKHORN in kinds and len(kinds) > 1
        if len(kinds) != len(factors) or len({*kinds}) < len(kinds) or is_mixed:
            raise ValueError(
                f"--moe-router-load-balancing-type {' '.join(kinds)} with --moe-aux-loss-coeff "
                f"{' '.join(map(str, factors))}: give each loss once, and a factor for each, and "
                "sinkhorn alone"
            )
        groups, chosen = self.moe_router_num_groups, self.moe_router_group_topk
        topk, experts, best = self.moe_router_topk, self.num_experts, self.moe_router_group_best
        if not (experts and groups and chosen):
            return
        judges = best or (experts if topk % chosen else topk // chosen)
        if experts % groups or max(judges, -(-topk // chosen)) > experts // groups:
            raise ValueError(
                f"--moe-router-num-groups {groups} with --moe-router-group-topk {chosen}: "
                f"--num-experts {experts} must form equal groups, and each of the chosen groups "
                f"gives an equal part of --moe-router-topk {topk}, unless --moe-router-group-best "
                "is given, which is at most the experts of a group: change one of them"
            )
        if best == topk / chosen:
            object.__setattr__(self, "moe_router_group_best", None)


def in_tuple(value: Any) -> tuple[Any, ...]:
    """Returns several values, or the only one, as a tuple."""
    return value if isinstance(value, tuple) else (value,)
