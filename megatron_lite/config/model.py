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

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatron_lite.config.checks import (
    chosen,
    require_at_least,
    require_one_of,
    require_within,
    resolve,
)
from megatron_lite.config.layer_pattern import check_layers, marks, reach
from megatron_lite.config.layer_variants import check_variants
from megatron_lite.config.rotary_scaling import RotaryScaling

POSITION_EMBEDDING_TYPES = ("learned_absolute", "rope", "none")
NORMALIZATIONS = ("LayerNorm", "RMSNorm")
NORM_POSITIONS = ("before", "after")
QK_LAYERNORM_SCOPES = ("head", "all-heads")
NORM_IMPLS = ("torch", "apex")
ATTENTION_BACKENDS = ("auto", "flash", "unfused")


class Positions(NamedTuple):
    """The ways in which a model encodes positions.

    learned: whether each position has a learned embedding.
    rotated: whether attention rotates queries and keys.
    """

    learned: bool
    rotated: bool


class ActivationFacts(NamedTuple):
    """One activation of the MLP.

    Every activation except the first has a boolean field of ModelConfig with its name.

    fc1_blocks: the number of outputs of the MLP's first matmul, each f wide. A gated activation
        has two.
    moved: the bytes that its forward and its backward read and write, as multiples of the bytes of
        its output.
    help: the help text of its flag.
    """

    fc1_blocks: int
    moved: tuple[int, int]
    help: str = ""


# The facts about each choice, for the code that builds the model, predicts its memory and counts
# its parameters. A choice without an entry raises ValueError wherever it is read (`chosen`).
POSITIONS = {
    "learned_absolute": Positions(learned=True, rotated=False),
    "rope": Positions(learned=False, rotated=True),
    "none": Positions(learned=False, rotated=False),
}
NORMS_AFTER = {"before": False, "after": True}
NORMS_ALL_HEADS = {"head": False, "all-heads": True}
NORM_VECTORS = {"LayerNorm": 2, "RMSNorm": 1}
ACTIVATIONS = {
    "gelu": ActivationFacts(fc1_blocks=1, moved=(2, 3)),
    "swiglu": ActivationFacts(
        fc1_blocks=2, moved=(5, 13), help="gated linear unit with SiLU in the MLP, instead of GELU"
    ),
    "squared_relu": ActivationFacts(
        fc1_blocks=1, moved=(4, 7), help="squared ReLU in the MLP, instead of GELU"
    ),
}
DEFAULT_ACTIVATION, *SWITCHED_ACTIVATIONS = ACTIVATIONS
ALWAYS_UNFUSED = {"auto": False, "flash": False, "unfused": True}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of one GPT.

    ffn_hidden_size: f. None: Megatron's default, 4 h. With a gated activation it is 8/3 h, rounded
        down to a multiple of 64.
    kv_channels: d. None: h / a, as in Megatron.
    parallel_residual: attention and the MLP read the same input, each through its own norm, and the
        layer adds both to it: x + attention(norm(x)) + mlp(norm(x)), as in GPT-NeoX.
    norm_position: "before": a norm before attention and one before the MLP. "after": instead, the
        output of each is normalised before it is added to the residual, as in OLMo 2.
    qk_layernorm_scope: "head": queries and keys are normalised head by head. "all-heads": over the
        channels of all heads together, as in OLMo 2.
    apply_layernorm_1p: a norm multiplies by 1 + its weight, and the weight starts at zero.
    fp32_residual_connection: the residual stream is float32 in a 16-bit run.
    norm_impl: "torch" or "apex", the library whose kernel computes the norms.
    window_size: how many tokens (before, after) its own a query reads. None: all tokens before.
    window_attn_skip_freq: which layers have the window. None: all layers.
    no_rope_freq: which layers have no rotary embedding. None: no layer.
    use_rope_scaling, rope_scaling_factor, rotary_seq_len_interpolation_factor: how a rotary
        embedding reaches longer sequences than it was trained on (config/rotary_scaling.py).

    config/layer_pattern.py defines window_attn_skip_freq and no_rope_freq.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    max_position_embeddings: int
    ffn_hidden_size: int | None = None
    kv_channels: int | None = None
    group_query_attention: bool = False
    num_query_groups: int = 1
    position_embedding_type: str = "learned_absolute"
    rotary_base: int = 10000
    rotary_percent: float = 1.0
    use_rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    rotary_seq_len_interpolation_factor: int | None = None
    no_rope_freq: int | tuple[int, ...] | None = None
    parallel_residual: bool = False
    norm_position: str = "before"
    normalization: str = "LayerNorm"
    norm_impl: str = "torch"
    norm_epsilon: float = 1e-5
    apply_layernorm_1p: bool = False
    qk_layernorm: bool = False
    qk_layernorm_scope: str = "head"
    swiglu: bool = False
    squared_relu: bool = False
    bias_gelu_fusion: bool = True
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    untie_embeddings_and_output_weights: bool = False
    attention_backend: str = "auto"
    attention_softmax_in_fp32: bool = False
    window_size: tuple[int, int] | None = None
    window_attn_skip_freq: int | tuple[int, ...] | None = None
    fp32_residual_connection: bool = False
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    init_method_std: float = 0.02

    def __post_init__(self) -> None:
        require_at_least(
            self,
            1,
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "max_position_embeddings",
            "ffn_hidden_size",
            "kv_channels",
            "num_query_groups",
            "rotary_seq_len_interpolation_factor",
        )
        require_at_least(self, 1.0, "rope_scaling_factor")
        require_at_least(self, 0.0, "init_method_std", "norm_epsilon")
        require_within(self, 0.0, 1.0, "hidden_dropout", "attention_dropout")
        require_one_of(self, "position_embedding_type", POSITION_EMBEDDING_TYPES)
        require_one_of(self, "normalization", NORMALIZATIONS)
        require_one_of(self, "norm_position", NORM_POSITIONS)
        require_one_of(self, "qk_layernorm_scope", QK_LAYERNORM_SCOPES)
        require_one_of(self, "norm_impl", NORM_IMPLS)
        require_one_of(self, "attention_backend", ATTENTION_BACKENDS)
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
        if self.num_query_groups != 1 and not self.group_query_attention:
            raise ValueError(
                f"--num-query-groups {self.num_query_groups} needs --group-query-attention"
            )
        switched = [
            f"--{name.replace('_', '-')}" for name in SWITCHED_ACTIVATIONS if getattr(self, name)
        ]
        if len(switched) > 1:
            raise ValueError(f"{' and '.join(switched)} are two activations: choose one")
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
                f"{switched[0]} rounds the default ffn size down to a multiple of 64, which is 0 "
                f"at --hidden-size {self.hidden_size}: set --ffn-hidden-size"
            )
        resolve(self, "ffn_hidden_size", default_ffn)
        if POSITIONS.get(self.position_embedding_type, POSITIONS["none"]).rotated:
            require_at_least(self, 1, "rotary_base")
            if not 0.0 < self.rotary_percent <= 1.0 or self.rotary_dim < 2 or self.rotary_dim % 2:
                raise ValueError(
                    f"--rotary-percent {self.rotary_percent} of --kv-channels {self.head_dim} "
                    f"gives {self.rotary_dim} rotated channels: it must be an even number of at "
                    "least 2, in (0, 1]"
                )
        check_layers(self)
        check_variants(self)

    @property
    def head_dim(self) -> int:
        """d, the channels of one head (`--kv-channels`)."""
        assert self.kv_channels is not None
        return self.kv_channels

    @property
    def ffn_size(self) -> int:
        """f, the width of the MLP after its activation (`--ffn-hidden-size`)."""
        assert self.ffn_hidden_size is not None
        return self.ffn_hidden_size

    @property
    def query_groups(self) -> int:
        """g, the number of key/value heads. It equals a without `--group-query-attention`."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    def builds_scores(self, device: str) -> bool:
        """Returns whether core attention builds its scores in training on the device.

        device: "cpu" or "cuda". torch's flash kernel for CPUs has no dropout (model/attention.py).
        """
        return self.always_unfused or (device == "cpu" and self.attention_dropout > 0.0)

    def layer_window(self, layer: int) -> tuple[int, int] | None:
        """Returns how many tokens (before, after) its own a query reads, or None for all before.

        layer: the number of the layer in the whole model, counted from 0.
        """
        assert 0 <= layer < self.num_layers, (layer, self.num_layers)
        skipped = self.window_attn_skip_freq
        if self.window_size is None or skipped is None:
            return self.window_size
        # A number marks the layers without the window. A list marks the layers with it.
        return self.window_size if marks(skipped, layer) != isinstance(skipped, int) else None

    def layer_reach(self, layer: int, seq_length: int) -> int | None:
        """Returns how many tokens before its own a query reads in a sequence of that length.

        Returns None if the layer has no window, or a window that covers the whole sequence.
        """
        return reach(self.layer_window(layer), seq_length)

    def layer_rotates(self, layer: int) -> bool:
        """Returns whether the layer rotates queries and keys.

        layer: the number of the layer in the whole model, counted from 0.
        """
        assert 0 <= layer < self.num_layers, (layer, self.num_layers)
        return self.positions.rotated and (
            self.no_rope_freq is None or not marks(self.no_rope_freq, layer)
        )

    @property
    def always_unfused(self) -> bool:
        """Tells whether core attention builds its scores on every device."""
        return chosen("--attention-backend", self.attention_backend, ALWAYS_UNFUSED)

    @property
    def positions(self) -> Positions:
        """The ways in which the model encodes positions."""
        return chosen("--position-embedding-type", self.position_embedding_type, POSITIONS)

    @property
    def norms_after(self) -> bool:
        """Tells whether a layer normalises the outputs of attention and the MLP, not their
        inputs."""
        return chosen("--norm-position", self.norm_position, NORMS_AFTER)

    @property
    def norms_all_heads(self) -> bool:
        """Tells whether the norms of queries and keys run over the channels of all heads
        together."""
        scope = chosen("--qk-layernorm-scope", self.qk_layernorm_scope, NORMS_ALL_HEADS)
        return self.qk_layernorm and scope

    @property
    def norm_vectors(self) -> int:
        """The number of parameters of a norm, each as wide as its input.

        RMSNorm has a weight. LayerNorm has a weight and a bias.
        """
        return chosen("--normalization", self.normalization, NORM_VECTORS)

    @property
    def fc1_blocks(self) -> int:
        """The number of outputs of the MLP's first matmul, each f wide.

        A gated activation has two, any other activation one.
        """
        return chosen("the activation", self.activation, ACTIVATIONS).fc1_blocks

    @property
    def rotary_dim(self) -> int:
        """r, the number of channels of a head that are rotated."""
        return int(self.head_dim * self.rotary_percent)

    @property
    def rotary_scaling(self) -> RotaryScaling:
        """The scaling of the rotary embedding's frequencies and positions."""
        return RotaryScaling(
            frequency_factor=self.rope_scaling_factor if self.use_rope_scaling else None,
            position_factor=self.rotary_seq_len_interpolation_factor,
        )

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
