"""The experts of DeepSeek-V2 and V3: a rule of hf_rules.py. Standard library only."""

from __future__ import annotations

from typing import NamedTuple

from megatron_lite.config.hf_rules import Config, Values
from megatron_lite.config.model import ModelConfig

EPSILON = 1e-6  # of transformers' norms of latents


class DeepSeek(NamedTuple):
    """The experts, their groups, the shared ones, and the dense layers before them.

    experts, size, shared, dense, groups, chosen: the numbers if their keys are missing.
    judged: how many of its best experts a group is judged by. The router here takes an equal part
        of those that a token is sent to from each group, and judges by as many.
    by_method: whether groups count only if the key topk_method says so.
    """

    experts: int
    size: int
    shared: int
    dense: int
    groups: int
    chosen: int
    judged: int
    by_method: bool = False

    def read(self, config: Config, fields: Values) -> None:
        heads = fields["num_attention_heads"]
        if config.get("num_key_value_heads") not in (None, heads):
            raise ValueError(f"num_key_value_heads must be num_attention_heads, {heads}")
        rope = config.object("rope_scaling") or config.object("rope_parameters")
        if bool(rope.get("mscale")) != bool(rope.get("mscale_all_dim")):
            raise ValueError("mscale and mscale_all_dim need each other: give both, or none")
        if fields["norm_epsilon"] != EPSILON:
            epsilon = fields["norm_epsilon"]
            config.inexact.append(
                f"rms_norm_eps is {epsilon}, but the norms of latents have {EPSILON} there"
            )
        fields.setdefault("rope_type", "rope")
        fields["num_experts"] = config.value("n_routed_experts", int, self.experts)
        fields["moe_ffn_hidden_size"] = size = config.value("moe_intermediate_size", int, self.size)
        shared = config.value("n_shared_experts", int, self.shared)
        fields["moe_shared_expert_intermediate_size"] = shared * size
        dense = config.value("first_k_dense_replace", int, self.dense)
        layers = range(fields["num_layers"])
        fields["moe_layer_freq"] = tuple(int(layer >= dense) for layer in layers)
        groups = config.value("n_group", int, self.groups)
        chosen = config.value("topk_group", int, self.chosen)
        if self.by_method and config.get("topk_method") != "group_limited_greedy":
            return
        if chosen < groups:
            fields |= {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
            if fields["moe_router_topk"] != self.judged * chosen:
                config.inexact.append(
                    f"a group of experts is judged by its best {self.judged} there, and here by "
                    f"num_experts_per_tok / topk_group, {fields['moe_router_topk']} / {chosen}"
                )

    def write(self, model: ModelConfig) -> Values:
        size = model.expert_size
        has_experts = [model.layer_has_experts(layer) for layer in range(model.num_layers)]
        found: Values = {
            "num_key_value_heads": model.num_attention_heads,
            "n_routed_experts": model.num_experts,
            "moe_intermediate_size": size,
            "n_shared_experts": (model.moe_shared_expert_intermediate_size or 0) // size,
            "first_k_dense_replace": has_experts.index(True) if any(has_experts) else 0,
            "n_group": model.moe_router_num_groups or 1,
            "topk_group": model.moe_router_group_topk or 1,
        }
        if self.by_method:
            in_groups = model.chooses_in_groups
            found["topk_method"] = "group_limited_greedy" if in_groups else "greedy"
        return found
