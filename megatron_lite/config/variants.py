"""Settings of a layer that few families have. ModelConfig inherits them.

    DeepSeek  multi-latent attention, with Megatron's names
    Gemma     embeddings times sqrt(h), GeGLU, a scale and a cap of the scores, norms around both
              branches, a cap of the logits
    Granite   four multipliers
    Cohere    one norm for attention and MLP, which read the same input; divided logits
    Llama     attention_bias: biases of attention alone

Megatron-LM has no flag for the others.

`RotarySettings`: how a rotary embedding reaches longer sequences than it was trained on. The rules
`yarn` and `longrope` have settings with Megatron's names where it has them.

    rope      each frequency as it is, or by --use-rope-scaling (Llama 3.1), or of divided positions
    yarn      slow frequencies are divided by the factor, fast ones stay (arXiv 2309.00071)
    longrope  each frequency has a factor of its own that divides it (arXiv 2402.13753): one list
              for sequences up to the original length, and another for longer ones

Both rules also multiply queries and keys by a number, the `magnitude`.
"""

import math
from functools import partial

from .setting import Settings, count, setting, several, switch

ALL_HEADS = "all-heads"
OF_ROPE = "position_embedding_type=rope"


class Variants(Settings):
    """What Megatron-LM has no flag for.

    parallel_residual: attention and the MLP read the same input, each through its own norm, and the
        layer adds both to it: x + attention(norm(x)) + mlp(norm(x)), as in GPT-NeoX.
    shared_norm: both read it through one norm, as in Cohere's models.
    norm_position: "before": a norm before attention and one before the MLP. "after": instead, the
        output of each is normalised before it is added to the residual, as in OLMo 2. "both": four
        norms, as in Gemma 2.
    qk_layernorm_scope: "head": queries and keys are normalised head by head. "all-heads": over the
        channels of all heads together, as in OLMo 2.
    embedding_multiplier: its value in the dtype of the weights multiplies, as in Gemma.
    attn_logit_softcapping, final_logit_softcapping: a cap c makes c tanh(x / c) of each
        score, before the mask, and of each logit. torch has no flash kernel that caps scores.
    """

    parallel_residual: bool = switch(
        "attention and the MLP read the same input, and the layer adds both to it, as in GPT-NeoX",
        needs="norm_position=before",
    )
    shared_norm: bool = switch(
        "attention and the MLP read their input through one norm", needs="parallel_residual"
    )
    norm_position: str = setting(
        "norms before attention and the MLP, after each and before the residual is added as in "
        "OLMo 2, or both as in Gemma 2",
        "before",
        choices="before after both",
    )
    qk_layernorm_scope: str = setting(
        "channels of each norm of --qk-layernorm: those of one head, or of all heads as in OLMo 2",
        "head",
        choices=f"head {ALL_HEADS}",
        needs="qk_layernorm normalization=RMSNorm",
        why="it norms queries and keys, and only RMSNorm sums over the ranks",
    )
    geglu: bool = switch(
        "gated linear unit with GELU's tanh form in the MLP, as in Gemma",
        excludes="swiglu squared_relu",
        why="an MLP has one activation",
    )
    add_proj_bias: bool = switch(
        "bias in the projection after attention, also with --disable-bias-linear"
    )
    embedding_multiplier: float = setting("multiply the embeddings", 1.0, above=0.0)
    residual_multiplier: float = setting("multiply what attention and the MLP add", 1.0)
    logits_scaling: float = setting("divide the logits", 1.0, above=0.0)
    softmax_scale: float | None = setting(
        "multiply the scores of attention; derived: 1 / sqrt(channels of a head)", above=0.0
    )
    attn_logit_softcapping: float | None = setting(
        "cap the scores: C tanh(score / C), in unfused attention", above=0.0
    )
    final_logit_softcapping: float | None = setting(
        "cap the logits: C tanh(logit / C)", above=0.0, alias="--output-logit-softcapping"
    )

    @property
    def norms_before(self) -> bool:
        """Tells whether a layer normalises the inputs of attention and the MLP."""
        return self.norm_position != "after"

    @property
    def norms_after(self) -> bool:
        """Tells whether a layer normalises the outputs of attention and the MLP."""
        return self.norm_position != "before"

    @property
    def changes_branches(self) -> bool:
        """Tells whether an operation lies between a branch's last linear layer and its addition."""
        return self.norms_after or self.residual_multiplier != 1.0


LATENT = "multi_latent_attention"
of_latents = partial(setting, without=LATENT)


class LatentSettings(Settings):
    """The sizes of multi-latent attention, with Megatron's names.

    A token's keys and values are made from a latent vector of a few channels (2405.04434, section
    2.1). A head of the query and of the key has two parts: one that is made from the latent and not
    rotated, and a rotated one, which all heads share for the key. The heads of the value have a
    size of their own.

    q_lora_rank: None: queries are made from the hidden states, without a latent.
    """

    multi_latent_attention: bool = switch(
        "keys and values of all heads from one latent vector a token, as in DeepSeek-V2",
        needs=f"{OF_ROPE} rotary_percent=1.0",
        excludes="group_query_attention add_qkv_bias no_rope_freq use_rope_scaling "
        "rotary_seq_len_interpolation_factor rotary_base_local qk_layernorm_scope=all-heads",
        why="its heads share a rotated part, and its values are smaller than its keys",
    )
    q_lora_rank: int | None = count(
        "channels of the queries' latent; none: queries come from the hidden states", without=LATENT
    )
    kv_lora_rank: int = count("channels of the latent of keys and values", 32, without=LATENT)
    qk_head_dim: int = count(
        "channels of a head of queries and keys that are not rotated", 128, without=LATENT
    )
    qk_pos_emb_head_dim: int = of_latents(
        "channels of a head of queries and keys that are rotated", 64, least=2
    )
    v_head_dim: int = count("channels of a head of values", 128, without=LATENT)
    latent_norm_epsilon: float | None = of_latents(
        "of latents (default: --norm-epsilon)", least=0.0
    )


# The constants of Llama 3.1, which Megatron has as well. A frequency whose wave is longer than the
# original length is slow. One whose wave is shorter than a quarter of it is fast.
ORIGINAL_LENGTH = 8192
SLOW_TURNS, FAST_TURNS = 1.0, 4.0
of_both = partial(setting, without="rope_type=yarn/longrope")
of_yarn = partial(setting, without="rope_type=yarn")
factors = partial(several, above=0.0, needs="rope_type=longrope")


def yarn_magnitude(factor: float, mscale: float) -> float:
    """Returns 0.1 m ln(factor) + 1, by which yarn multiplies queries and keys; 1 up to factor 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


class RotarySettings(Settings):
    """The settings of yarn and longrope.

    mscale, mscale_all_dim: yarn's magnitude is that of the first divided by that of the second.
    rope_attention_factor: the magnitude itself. None: by the formula of the rule.
    """

    rope_type: str | None = setting(
        "rotary frequencies as they are, or changed for longer sequences by yarn or longrope; "
        "derived: rope, or yarn with --multi-latent-attention, as in Megatron",
        choices="rope yarn longrope",
    )
    rotary_interleaved: bool = switch(
        "rotate pairs of neighbouring channels of a head, not one of each half",
        without=OF_ROPE,
        excludes="multi_latent_attention",
        why="multi-latent attention has pairs of neighbours in any case",
    )
    rotary_base_local: int | None = count(
        "base of the rotary frequencies of layers with a window, which are not scaled, as in "
        "Gemma 3; none: as those of the others",
        needs="window_size",
        without=OF_ROPE,
    )
    rotary_scaling_factor: float = of_both(
        "how many times as long sequences yarn or longrope is for", 1.0, above=0.0
    )
    original_max_position_embeddings: int = of_both(
        "length of sequences before yarn or longrope", 4096, least=2
    )
    rope_attention_factor: float | None = of_both(
        "number that multiplies queries and keys; derived: by the rule", above=0.0
    )
    beta_fast: float = of_yarn("turns of yarn's frequencies that stay", 32.0, above=0.0)
    beta_slow: float = of_yarn("turns of yarn's frequencies that are divided", 1.0, above=0.0)
    mscale: float = of_yarn("scale of yarn's magnitude", 1.0)
    mscale_all_dim: float = of_yarn("scale of the magnitude that divides yarn's", 0.0)
    short_factor: tuple[float, ...] = factors("longrope's divisors, up to the original length")
    long_factor: tuple[float, ...] = factors("longrope's divisors, beyond the original length")

    @property
    def rotary_magnitude(self) -> float:
        """The number that multiplies cosines and sines; 1 without yarn and longrope."""
        length, factor = self.original_max_position_embeddings, self.rotary_scaling_factor
        if self.rope_type == "yarn":
            magnitude = yarn_magnitude(factor, self.mscale)
            magnitude /= yarn_magnitude(factor, self.mscale_all_dim)
        elif self.rope_type == "longrope":
            magnitude = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(length))
        else:
            return 1.0
        return self.rope_attention_factor or magnitude
