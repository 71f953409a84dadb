"""The configuration of the model: what a layer computes, not how ranks split it or run it.

NOTATION, used in every docstring of the project:
    s  sequence length          b  micro-batch size        h  hidden size
    f  ffn hidden size          V  vocabulary              L  layers
    a  attention heads          g  query groups (GQA)      d  head dim
    r  rotated channels of a head
    t  tensor-parallel size     c  context-parallel size   p  pipeline-parallel size
    m  micro-batches per step   v  virtual stages of a pipeline rank
Activations have the layout [s, b, h]: sequence first, as in Megatron. Sequence parallelism shards
dim 0.
"""

from functools import partial
from typing import NamedTuple

from .checks import MOST_LAYERS, flag
from .experts import ExpertSettings
from .layer_pattern import (
    LARGEST_NUMBER,
    check_pattern,
    marks,
    parse_pattern,
    parse_window,
    reach,
    spelled,
)
from .setting import count, required, resolve, setting, share, switch
from .variants import ALL_HEADS, OF_ROPE, LatentSettings, RotarySettings, Variants, yarn_magnitude


class ActivationFacts(NamedTuple):
    """One activation of the MLP.

    Every activation except the first has a boolean field of ModelConfig with its name.

    fc1_blocks: the number of outputs of the MLP's first matmul, each f wide. A gated activation
        has two.
    moved: the bytes that its forward and its backward read and write, as multiples of the bytes of
        its output. fused: the same of a compiled kernel for each.
    """

    fc1_blocks: int
    moved: tuple[int, int]
    fused: tuple[int, int]


# The facts about each choice, for the code that builds the model, predicts its memory and counts
# its parameters.
NORM_VECTORS = {"LayerNorm": 2, "RMSNorm": 1, "BiaslessLayerNorm": 1}
GATED = ActivationFacts(fc1_blocks=2, moved=(5, 13), fused=(3, 5))
ACTIVATIONS = {
    "gelu": ActivationFacts(fc1_blocks=1, moved=(2, 3), fused=(2, 3)),
    "swiglu": GATED,
    "squared_relu": ActivationFacts(fc1_blocks=1, moved=(4, 7), fused=(2, 3)),
    "geglu": GATED,
}
DEFAULT_ACTIVATION, *SWITCHED_ACTIVATIONS = ACTIVATIONS
OF_RANKS = "tensor_model_parallel_size"
ROPE, UNFUSED = "rope", "unfused"


class ModelConfig(ExpertSettings, LatentSettings, RotarySettings, Variants):
    """The shape of one GPT.

    ffn_hidden_size: f. None: Megatron's default, 4 h. With a gated activation it is 8/3 h, rounded
        down to a multiple of 64.
    kv_channels: d. None: h / a, as in Megatron.
    apply_layernorm_1p: a norm multiplies by 1 + its weight, and the weight starts at zero.
    fp32_residual_connection: the residual stream is float32 in a 16-bit run.
    window_size: how many tokens (before, after) its own a query reads. None: all tokens before.
    window_attn_skip_freq: which layers have the window. None: all layers.
    no_rope_freq: which layers have no rotary embedding. None: no layer.
    use_rope_scaling, rope_scaling_factor, rotary_seq_len_interpolation_factor: how a rotary
        embedding reaches longer sequences than it was trained on (config/variants.py).

    config/layer_pattern.py defines window_attn_skip_freq and no_rope_freq.
    kv_channels: under multi-latent attention those of queries and keys, both parts.
    """

    num_layers: int = required("transformer layers", least=1, most=MOST_LAYERS)
    hidden_size: int = required("channels of the residual stream", least=1)
    num_attention_heads: int = required(
        "attention heads", least=1, multiple_of=OF_RANKS, why="each rank holds an equal part"
    )
    max_position_embeddings: int = required("longest sequence that the model can read", least=1)
    ffn_hidden_size: int | None = count(
        "channels inside the MLP; derived: 4 x hidden, or 8/3 x hidden with --swiglu",
        multiple_of=OF_RANKS,
        why="each rank holds an equal part",
    )
    kv_channels: int | None = count("channels of one head; derived: hidden / heads")
    group_query_attention: bool = switch("share keys and values among groups of heads")
    num_query_groups: int = count(
        "groups of --group-query-attention", 1, needs="group_query_attention"
    )
    position_embedding_type: str = setting(
        "position embedding", "learned_absolute", choices=f"learned_absolute {ROPE} none"
    )
    rotary_base: int = count("base of the rotary frequencies", 10000, without=OF_ROPE)
    rotary_percent: float = setting(
        "share of a head's channels that is rotated", 1.0, without=OF_ROPE
    )
    use_rope_scaling: bool = switch(
        "scale the rotary frequencies by Llama 3.1's rule",
        without=OF_ROPE,
        excludes="rope_type=yarn/longrope",
        why="each of them scales the frequencies by its own rule",
    )
    rope_scaling_factor: float = setting(
        "factor of --use-rope-scaling", 8.0, least=1.0, without="use_rope_scaling"
    )
    rotary_seq_len_interpolation_factor: int | None = count(
        "divide the positions of the rotary embedding by N, for sequences N times as long",
        without=OF_ROPE,
    )
    no_rope_freq: int | tuple[int, ...] | None = setting(
        "every N-th layer does not rotate queries and keys; or a list with 1 for each layer that "
        "does not, such as ([0]*3+[1])*2",
        parse=partial(parse_pattern, "--no-rope-freq"),
        needs=OF_ROPE,
    )
    normalization: str = setting("norm of every layer", "LayerNorm", choices=NORM_VECTORS)
    norm_epsilon: float = setting("added to the variance in a norm", 1e-5, least=0.0)
    apply_layernorm_1p: bool = switch(
        "norms multiply by 1 + their weight, and the weight starts at zero"
    )
    qk_layernorm: bool = switch("norm of queries and keys, per head")
    swiglu: bool = switch("gated linear unit with SiLU in the MLP, instead of GELU")
    squared_relu: bool = switch(
        "squared ReLU in the MLP, instead of GELU",
        excludes="swiglu",
        why="an MLP has one activation",
    )
    bias_gelu_fusion: bool = setting(
        "exact (erf) GELU instead of its tanh form",
        True,
        name="--no-bias-gelu-fusion",
        unless="swiglu|squared_relu|geglu",
    )
    add_bias_linear: bool = setting(
        "no bias in the linear layers", True, name="--disable-bias-linear"
    )
    add_qkv_bias: bool = switch("bias in the QKV projection, also with --disable-bias-linear")
    untie_embeddings_and_output_weights: bool = switch(
        "an output matrix of its own instead of the word embeddings"
    )
    attention_backend: str = setting(
        "core attention: flash is FlashAttention, fused cuDNN's kernel, auto what torch takes of "
        "them; unfused builds the scores",
        "auto",
        choices=f"auto flash fused {UNFUSED}",
        megatron={"local": UNFUSED},
    )
    attention_softmax_in_fp32: bool = switch(
        "softmax of unfused attention in float32",
        without="attention_backend=unfused: flash attention works in float32 inside",
    )
    window_size: tuple[int, int] | None = setting(
        "LEFT,0: a query reads the LEFT tokens before its own, and its own; else all before",
        parse=parse_window,
    )
    window_attn_skip_freq: int | tuple[int, ...] | None = setting(
        "every N-th layer has no window; or a list with 1 for each layer that has it, "
        "such as ([1]*3+[0])*2",
        parse=partial(parse_pattern, "--window-attn-skip-freq"),
        needs="window_size",
    )
    fp32_residual_connection: bool = switch(
        "residual stream in float32 under --bf16 and --fp16",
        needs="norm_position=before",
        without="bf16|fp16: all of the run is in float32",
    )
    hidden_dropout: float = share("dropout of embeddings and of what each layer adds", 0.1)
    attention_dropout: float = share("dropout of attention probabilities", 0.1)
    init_method_std: float = setting("standard deviation of the initial weights", 0.02, least=0.0)

    def check_rules(self) -> None:
        if self.multi_latent_attention:
            rotated, usual = self.qk_pos_emb_head_dim, self.hidden_size // self.num_attention_heads
            whole = self.qk_head_dim + rotated
            if rotated % 2:
                raise ValueError(
                    f"--qk-pos-emb-head-dim {rotated} is odd: channels are rotated in pairs"
                )
            if self.v_head_dim > whole:
                raise ValueError(
                    f"--v-head-dim {self.v_head_dim} is above --qk-head-dim {self.qk_head_dim} "
                    f"plus --qk-pos-emb-head-dim {rotated}: attention pads values to the size of "
                    "keys"
                )
            if self.kv_channels not in (None, whole, usual, self.v_head_dim):
                raise ValueError(
                    f"--kv-channels {self.kv_channels} has no effect under "
                    f"--multi-latent-attention, whose keys have {whole} channels: leave it out"
                )
            object.__setattr__(self, "kv_channels", whole)
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"--hidden-size {self.hidden_size} is not divisible by --num-attention-heads "
                f"{self.num_attention_heads}: change one of them, or set --kv-channels"
            )
        if self.group_query_attention and self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"--num-attention-heads {self.num_attention_heads} is not divisible by "
                f"--num-query-groups {self.num_query_groups}: each group needs the same number "
                "of heads"
            )
        resolve(self, "rope_type", "yarn" if self.multi_latent_attention else "rope")
        resolve(self, "kv_channels", self.hidden_size // self.num_attention_heads)
        # Megatron's rule. A gated MLP has three matrices instead of two: at 2/3 of the width it has
        # about as many parameters.
        default_ffn = (
            int((4 * self.hidden_size * 2 / 3) / 64) * 64
            if self.fc1_blocks == 2
            else 4 * self.hidden_size
        )
        if self.ffn_hidden_size is None and default_ffn == 0:
            raise ValueError(
                f"--{self.activation} rounds the default ffn size down to a multiple of 64: to 0 "
                f"at --hidden-size {self.hidden_size}: set --ffn-hidden-size"
            )
        resolve(self, "ffn_hidden_size", default_ffn)
        if self.rotates and (
            not 0.0 < self.rotary_percent <= 1.0 or self.rotary_dim < 2 or self.rotary_dim % 2
        ):
            raise ValueError(
                f"--rotary-percent {self.rotary_percent} of --kv-channels {self.head_dim} gives "
                f"{self.rotary_dim} rotated channels: it must be an even number of at least 2, in "
                "(0, 1]"
            )
        if self.rope_type != ROPE and not self.rotates:
            raise ValueError(
                f"--rope-type {self.rope_type} changes rotary embeddings, and "
                f"--position-embedding-type is {self.position_embedding_type}: give it as rope"
            )
        frequencies = self.rotary_dim // 2
        if self.rope_type == "longrope" and {frequencies} != {
            len(self.short_factor),
            len(self.long_factor),
        }:
            raise ValueError(
                f"--rope-type longrope needs --short-factor and --long-factor, each with a number "
                f"for each of {frequencies} frequencies"
            )
        window, unrotated = self.window_size, self.no_rope_freq
        if window is not None and (
            len(window) != 2 or not 0 <= window[0] <= LARGEST_NUMBER or window[1] != 0
        ):
            raise ValueError(
                f"--window-size {spelled(window)}: give LEFT,0, the tokens before a query that it "
                "reads, and 0 since the model is causal; without a limit leave it out"
            )
        self.check_experts()
        shared = self.num_experts and self.moe_shared_expert_intermediate_size
        if shared and self.add_bias_linear:
            raise ValueError(
                f"--moe-shared-expert-intermediate-size {shared} needs --disable-bias-linear: "
                "Megatron's shared expert has no bias"
            )
        for field, pattern, is_marked, fault in (
            (
                "window_attn_skip_freq",
                self.window_attn_skip_freq,
                self.layer_window,
                f"leaves no layer with --window-size {window and spelled(window)}: leave both out",
            ),
            (
                "no_rope_freq",
                unrotated,
                self.layer_rotates,
                "leaves no layer that rotates: give --position-embedding-type none instead",
            ),
            (
                "moe_layer_freq",
                self.num_experts and self.moe_layer_freq,
                self.layer_has_experts,
                "gives no layer experts: leave --num-experts out",
            ),
        ):
            if pattern is not None:
                name = f"{flag(field)} {spelled(pattern)}"
                check_pattern(name, pattern, self.num_layers)
                if not any(map(is_marked, range(self.num_layers))):
                    raise ValueError(f"{name} {fault}")
        if isinstance(unrotated, int) and self.num_layers % unrotated:
            raise ValueError(
                f"--no-rope-freq {unrotated} does not divide --num-layers {self.num_layers}: give "
                "a divisor, or a list with one number for each layer"
            )

    @property
    def head_dim(self) -> int:
        """d, the channels of one head (`--kv-channels`); of queries and keys if values differ."""
        assert self.kv_channels is not None
        return self.kv_channels

    @property
    def value_dim(self) -> int:
        """The channels of one head of values."""
        return self.v_head_dim if self.multi_latent_attention else self.head_dim

    @property
    def attention_scale(self) -> float:
        """The number that multiplies the scores.

        With yarn multi-latent attention has its magnitude here, for all channels of a head.
        """
        stretches = self.multi_latent_attention and self.rope_type == "yarn"
        magnitude = yarn_magnitude(self.rotary_scaling_factor, self.mscale_all_dim)
        scale = (magnitude**2 if stretches else 1.0) * self.head_dim**-0.5
        return self.softmax_scale or scale

    @property
    def has_proj_bias(self) -> bool:
        """Tells whether the projection after attention has a bias."""
        return self.add_bias_linear or self.add_proj_bias

    @property
    def ffn_size(self) -> int:
        """f, the width of the MLP after its activation (`--ffn-hidden-size`)."""
        assert self.ffn_hidden_size is not None
        return self.ffn_hidden_size

    @property
    def expert_size(self) -> int:
        """The width of an expert."""
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def query_groups(self) -> int:
        """g, the number of key/value heads. It equals a without `--group-query-attention`."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    def builds_scores(self, device: str) -> bool:
        """Returns whether core attention builds its scores in training on the device.

        device: "cpu" or "cuda". torch's flash kernel for CPUs has no dropout (model/attention.py),
        nor has the one that takes values of another size than keys.
        """
        draws = self.attention_dropout > 0.0
        return self.always_unfused or (draws and (device == "cpu" or self.multi_latent_attention))

    def layer_window(self, layer: int) -> tuple[int, int] | None:
        """Returns how many tokens (before, after) its own a query reads, or None for all before.

        layer: the number of the layer in the whole model, counted from 0.
        """
        skipped = self.window_attn_skip_freq
        if skipped is None:
            return self.window_size
        # A number marks the layers without the window. A list marks the layers with it.
        return self.window_size if marks(skipped, layer) != isinstance(skipped, int) else None

    def layer_reach(self, layer: int, seq_length: int) -> int | None:
        """Returns how many tokens before its own a query reads in a sequence of that length.

        Returns None if the layer has no window, or a window that covers the whole sequence.
        """
        return reach(self.layer_window(layer), seq_length)

    @property
    def num_dense_layers(self) -> int:
        """The number of layers with a dense MLP."""
        return sum(not self.layer_has_experts(layer) for layer in range(self.num_layers))

    @property
    def num_expert_biases(self) -> int:
        """The number of the experts' biases, which are saved beside the weights."""
        biased = (self.num_experts or 0) * self.moe_router_enable_expert_bias
        return biased * (self.num_layers - self.num_dense_layers)

    def layer_rotates(self, layer: int) -> bool:
        """Returns whether the layer rotates queries and keys.

        layer: the number of the layer in the whole model, counted from 0.
        """
        return self.rotates and (self.no_rope_freq is None or not marks(self.no_rope_freq, layer))

    def layer_is_local(self, layer: int) -> bool:
        """Returns whether the layer has the rotary embedding of `--rotary-base-local`."""
        return bool(self.rotary_base_local and self.layer_window(layer))

    @property
    def always_unfused(self) -> bool:
        """Tells whether core attention builds its scores on every device."""
        return self.attention_backend == UNFUSED or self.attn_logit_softcapping is not None

    @property
    def learns_positions(self) -> bool:
        """Tells whether each position has a learned embedding."""
        return self.position_embedding_type == "learned_absolute"

    @property
    def rotates(self) -> bool:
        """Tells whether attention rotates queries and keys, at least in some layers."""
        return self.position_embedding_type == ROPE

    @property
    def norms_all_heads(self) -> bool:
        """Tells whether the norms of queries and keys run over the channels of all heads
        together."""
        return self.qk_layernorm and self.qk_layernorm_scope == ALL_HEADS

    @property
    def norm_vectors(self) -> int:
        """The number of parameters of a norm, each as wide as its input.

        RMSNorm has a weight. LayerNorm has a weight and a bias.
        """
        return NORM_VECTORS[self.normalization]

    @property
    def fc1_blocks(self) -> int:
        """The number of outputs of the MLP's first matmul, each f wide.

        A gated activation has two, any other activation one.
        """
        return ACTIVATIONS[self.activation].fc1_blocks

    @property
    def rotary_dim(self) -> int:
        """r, the number of channels of a head that are rotated."""
        if self.multi_latent_attention:
            return self.qk_pos_emb_head_dim
        return int(self.head_dim * self.rotary_percent)

    @property
    def output_init_std(self) -> float:
        """The standard deviation of the initial weights of linear_proj and linear_fc2.

        Both write to the residual stream, so it is init_method_std / sqrt(2 L), as in Megatron.
        """
        return self.init_method_std / (2.0 * self.num_layers) ** 0.5

    @property
    def activation(self) -> str:
        """The name of the MLP's activation."""
        return next(
            (name for name in SWITCHED_ACTIVATIONS if getattr(self, name)), DEFAULT_ACTIVATION
        )
