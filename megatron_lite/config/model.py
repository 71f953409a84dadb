"""The model's shape: what a layer computes, never how it is split or run.

NOTATION, used in every docstring of the project:
    s  sequence length          b  micro-batch size       h  hidden size          f  ffn hidden size
    a  attention heads          g  query groups (GQA)     d  head dim             V  vocabulary
    L  layers                   t  tensor-parallel size   m  micro-batches per step      c  context-parallel size
Activations are laid out [s, b, h] (sequence first, as Megatron does), so that sequence parallelism shards dim 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_lite.config.checks import require_at_least, require_one_of, require_within, resolve

POSITION_EMBEDDING_TYPES = ("learned_absolute", "rope", "none")
NORMALIZATIONS = ("LayerNorm", "RMSNorm")
ATTENTION_BACKENDS = ("auto", "flash", "unfused")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of one GPT. `ffn_hidden_size` and `kv_channels` may be None: they are derived as Megatron does."""

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
    normalization: str = "LayerNorm"
    norm_epsilon: float = 1e-5
    qk_layernorm: bool = False
    swiglu: bool = False
    squared_relu: bool = False
    bias_gelu_fusion: bool = True
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    untie_embeddings_and_output_weights: bool = False
    attention_backend: str = "auto"
    attention_softmax_in_fp32: bool = False
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    init_method_std: float = 0.02

    def __post_init__(self) -> None:
        require_at_least(self, 1, "num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings",
                         "ffn_hidden_size", "kv_channels", "num_query_groups")
        require_at_least(self, 0.0, "init_method_std", "norm_epsilon")
        require_within(self, 0.0, 1.0, "hidden_dropout", "attention_dropout")
        require_one_of(self, "position_embedding_type", POSITION_EMBEDDING_TYPES)
        require_one_of(self, "normalization", NORMALIZATIONS)
        require_one_of(self, "attention_backend", ATTENTION_BACKENDS)
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(f"--hidden-size {self.hidden_size} is not divisible by --num-attention-heads "
                             f"{self.num_attention_heads}: change one of them, or set --kv-channels")
        if self.group_query_attention and self.num_attention_heads % self.num_query_groups:
            raise ValueError(f"--num-attention-heads {self.num_attention_heads} is not divisible by "
                             f"--num-query-groups {self.num_query_groups}: each group needs the same number of heads")
        if self.num_query_groups != 1 and not self.group_query_attention:
            raise ValueError(f"--num-query-groups {self.num_query_groups} needs --group-query-attention")
        if self.swiglu and self.squared_relu:
            raise ValueError("--swiglu and --squared-relu are two activations: choose one")
        resolve(self, "kv_channels", self.hidden_size // self.num_attention_heads)
        default_ffn = int((4 * self.hidden_size * 2 / 3) / 64) * 64 if self.swiglu else 4 * self.hidden_size
        if self.ffn_hidden_size is None and default_ffn == 0:
            raise ValueError(f"--swiglu rounds the default ffn size down to a multiple of 64, which is 0 at --hidden-size "
                             f"{self.hidden_size}: set --ffn-hidden-size")
        resolve(self, "ffn_hidden_size", default_ffn)
        if self.position_embedding_type == "rope":
            require_at_least(self, 1, "rotary_base")
            if not 0.0 < self.rotary_percent <= 1.0 or self.rotary_dim < 2 or self.rotary_dim % 2:
                raise ValueError(f"--rotary-percent {self.rotary_percent} of --kv-channels {self.head_dim} gives "
                                 f"{self.rotary_dim} rotated channels: it must be an even number of at least 2, in (0, 1]")

    @property
    def head_dim(self) -> int:
        """d, channels of one head (`--kv-channels`)."""
        assert self.kv_channels is not None
        return self.kv_channels

    @property
    def ffn_size(self) -> int:
        """f, width of the MLP after its activation (`--ffn-hidden-size`)."""
        assert self.ffn_hidden_size is not None
        return self.ffn_hidden_size

    @property
    def query_groups(self) -> int:
        """g, number of key/value heads: a without `--group-query-attention`."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    def builds_scores(self, device: str) -> bool:
        """Whether core attention in training is unfused on a "cpu" or "cuda" device (see model/attention.py)."""
        return self.attention_backend == "unfused" or (device == "cpu" and self.attention_dropout > 0.0)

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are rotated."""
        return int(self.head_dim * self.rotary_percent)

    @property
    def output_init_std(self) -> float:
        """Standard deviation of layers that write to the residual stream: scaled down by sqrt(2 L), as Megatron does."""
        return self.init_method_std / (2.0 * self.num_layers) ** 0.5

    @property
    def activation(self) -> Literal["gelu", "swiglu", "squared_relu"]:
        """The MLP's activation, by name."""
        return "swiglu" if self.swiglu else "squared_relu" if self.squared_relu else "gelu"
