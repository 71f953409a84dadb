"""The settings of multi-latent attention, with Megatron's names. ModelConfig inherits them.

A token's keys and values are made from a latent vector of a few channels (2405.04434, section 2.1).
A head of the query and of the key has two parts: one that is made from the latent and not rotated,
and a rotated one, which all heads share for the key. The heads of the value have a size of their
own.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.setting import setting, switch

LATENT = "multi_latent_attention"


@dataclass(frozen=True, kw_only=True)
class LatentSettings:
    """The sizes of multi-latent attention.

    q_lora_rank: None: queries are made from the hidden states, without a latent.
    """

    multi_latent_attention: bool = switch(
        "keys and values of all heads from one latent vector a token, as in DeepSeek-V2",
        needs=("position_embedding_type=rope", "rotary_percent=1.0"),
        excludes=(
            *("group_query_attention", "add_qkv_bias", "no_rope_freq", "use_rope_scaling"),
            *("rotary_seq_len_interpolation_factor", "rotary_base_local"),
            "context_parallel_size>1",
        ),
        why="its heads share a rotated part, and its values are smaller than its keys",
    )
    q_lora_rank: int | None = setting(
        "channels of the queries' latent; none: queries come from the hidden states",
        least=1,
        without=LATENT,
    )
    kv_lora_rank: int = setting(
        "channels of the latent of keys and values", 32, least=1, without=LATENT
    )
    qk_head_dim: int = setting(
        "channels of a head of queries and keys that are not rotated", 128, least=1, without=LATENT
    )
    qk_pos_emb_head_dim: int = setting(
        "channels of a head of queries and keys that are rotated", 64, least=2, without=LATENT
    )
    v_head_dim: int = setting("channels of a head of values", 128, least=1, without=LATENT)

    def check_latent_heads(self) -> None:
        """Raises ValueError for sizes of heads that attention cannot have."""
        rotated, whole = self.qk_pos_emb_head_dim, self.qk_head_dim + self.qk_pos_emb_head_dim
        if rotated % 2:
            raise ValueError(
                f"--qk-pos-emb-head-dim {rotated} is odd: channels are rotated in pairs"
            )
        if self.v_head_dim > whole:
            raise ValueError(
                f"--v-head-dim {self.v_head_dim} is above --qk-head-dim {self.qk_head_dim} plus "
                f"--qk-pos-emb-head-dim {rotated}: attention pads values to the size of keys"
            )
