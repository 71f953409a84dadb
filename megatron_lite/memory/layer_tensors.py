"""One transformer layer as data: which operation keeps which tensor for backward, and which tensors a region takes and returns.

A tensor here is a storage: views of one are one, and it is kept once, however many operations keep it. The names and sizes follow
model/layer.py, attention.py and mlp.py line by line. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage
from megatron_lite.recompute.plan import ACTIVATION, CORE_ATTENTION, DROPOUT, LAYERNORM, MLP_REGION

CPU_RNG_STATE, CUDA_RNG_STATE, NUM_STREAMS = 5056, 16, 2


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What decides the sizes besides the model: one micro-batch on one rank. seq_length: of the whole sequence.

    element_bytes: of weights and activations: 4, or 2 under --bf16 or --fp16. device: "cpu" or "cuda". loss_chunk_size: None
    where logits are kept. has_embedding, has_head: whether the layers are the model's first, and its last.
    """

    micro_batch_size: int
    seq_length: int
    padded_vocab_size: int
    tp_size: int = 1
    sequence_parallel: bool = False
    cp_size: int = 1
    cp_comm_type: str = "p2p"
    element_bytes: int = 4
    device: str = "cpu"
    loss_chunk_size: int | None = None
    has_embedding: bool = True
    has_head: bool = True

    @classmethod
    def of(cls, config: RunConfig, *, device: str, stage: Stage | None = None) -> Sizes:
        """Those of a run, whose vocabulary size must be known; of one pipeline stage, or of the whole model."""
        tp_size = config.parallel.tensor_model_parallel_size
        return cls(micro_batch_size=config.training.micro_batch_size, seq_length=config.data.seq_length,
                   padded_vocab_size=config.tokenizer.padded_vocab_size(tp_size), tp_size=tp_size,
                   sequence_parallel=config.parallel.sequence_parallel, cp_size=config.parallel.context_parallel_size,
                   cp_comm_type=config.parallel.cp_comm_type, device=device,
                   element_bytes=4 if config.training.precision == "fp32" else 2, loss_chunk_size=config.training.loss_chunk_size,
                   has_embedding=stage is None or stage.is_first, has_head=stage is None or stage.is_last)

    @property
    def tokens(self) -> int:
        """s b / c."""
        return self.own_seq_length * self.micro_batch_size

    @property
    def own_seq_length(self) -> int:
        """s / c: of each sequence on one context-parallel rank."""
        return self.seq_length // self.cp_size

    @property
    def num_ranks(self) -> int:
        """t c: ranks that share the work of a layer on a micro-batch."""
        return self.tp_size * self.cp_size

    @property
    def local_tokens(self) -> int:
        """Tokens of a norm or residual on one rank: s b / ct under sequence parallelism, else s b / c."""
        return self.tokens // self.tp_size if self.sequence_parallel else self.tokens

    @property
    def accumulate_bytes(self) -> int:
        """Of sums and statistics that are at least float32."""
        return max(4, self.element_bytes)

    @property
    def rng_state_bytes(self) -> int:
        """What one replayed unit or region keeps to repeat its draws: every stream, and on CUDA the CPU's generator."""
        if self.device == "cpu":
            return NUM_STREAMS * CPU_RNG_STATE
        return NUM_STREAMS * CUDA_RNG_STATE + CPU_RNG_STATE


class KeptTensor(NamedTuple):
    """name: unique in its layer. in_paper: one of the terms of 2205.05198 sec. 4.1."""

    name: str
    num_bytes: int
    in_paper: bool = False

    @property
    def stays(self) -> bool:
        """Whether no policy moves it to host memory: tables that all layers share; states of generators, which are there."""
        return self.name == "rotary tables" or self.name.startswith("RNG state")


class Operation(NamedTuple):
    """keeps: what stays for its backward. region: the smallest one around it, if any."""

    name: str
    keeps: tuple[KeptTensor, ...]
    region: str | None = None


class Region(NamedTuple):
    """inputs: kept in place of what its operations keep. lent: outputs that others need not keep either."""

    inputs: tuple[KeptTensor, ...]
    lent: tuple[str, ...] = ()
    draws: bool = False


@dataclass(frozen=True)
class LayerTensors:
    """The operations of one layer in order, and its regions."""

    operations: tuple[Operation, ...]
    regions: dict[str, Region]

    @property
    def input(self) -> KeptTensor:
        """The layer's input: all that a unit keeps."""
        return self.operations[0].keeps[0]


def layer_tensors(model: ModelConfig, sizes: Sizes) -> LayerTensors:
    """What every layer keeps where nothing is rebuilt. Shapes in the notation of config/model.py."""
    element, local = sizes.element_bytes, sizes.local_tokens
    hidden = local * model.hidden_size * element  # [s', b, h]
    layer_input, mlp_input = KeptTensor("layer input", hidden, True), KeptTensor("mlp residual", hidden, True)
    normed = KeptTensor("normed layer input", hidden, True)
    normed_mlp = KeptTensor("normed mlp residual", hidden, True)
    attention = _Attention(model, sizes)
    width = sizes.tokens * model.ffn_size // sizes.tp_size * element
    intermediate = KeptTensor("fc1 output", width * (2 if model.activation == "swiglu" else 1), True)
    activated = KeptTensor("activation output", width, True)
    state = CPU_RNG_STATE if sizes.device == "cpu" else CUDA_RNG_STATE
    operations = (
        Operation("input_layernorm", (layer_input, *_statistics("input norm", model, sizes, local)), LAYERNORM),
        Operation("linear_qkv", (normed,)),
        *attention.preparation,
        Operation("core_attention", attention.core, CORE_ATTENTION),
        Operation("linear_proj", (attention.attended,)),
        Operation("attention dropout", _masks(model, sizes, "attention dropout mask"), DROPOUT),
        Operation("pre_mlp_layernorm", (mlp_input, *_statistics("mlp norm", model, sizes, local)), LAYERNORM),
        Operation("linear_fc1", (normed_mlp,), MLP_REGION),
        Operation("activation", (intermediate,), MLP_REGION),
        Operation("linear_fc2", (activated,), MLP_REGION),
        Operation("mlp dropout", _masks(model, sizes, "mlp dropout mask"), DROPOUT),
    )
    return LayerTensors(operations, {
        LAYERNORM: Region((layer_input, mlp_input), lent=(normed.name, normed_mlp.name)),
        CORE_ATTENTION: Region(attention.heads, draws=True),
        MLP_REGION: Region((normed_mlp,), draws=True),
        ACTIVATION: Region((intermediate,), lent=(activated.name,)),
        DROPOUT: Region(tuple(KeptTensor(f"RNG state of the {branch} dropout mask", state) for branch in ("attention", "mlp"))
                        if model.hidden_dropout else ()),
    })


class _Attention:
    """heads: query, key and value as core attention gets them. core: what it keeps. preparation: what makes the heads."""

    def __init__(self, model: ModelConfig, sizes: Sizes) -> None:
        tokens, element = sizes.tokens, sizes.element_bytes
        channels = model.num_attention_heads * model.head_dim // sizes.tp_size  # a/t d
        kv_channels = model.query_groups * model.head_dim // sizes.tp_size
        query, kv = tokens * channels * element, tokens * kv_channels * element
        grouped = model.query_groups < model.num_attention_heads
        rotary, normed = model.position_embedding_type == "rope", model.qk_layernorm
        self.attended = KeptTensor("attention output", query, True)
        whole = KeptTensor("query, key and value", query + 2 * kv, not normed)
        value = KeptTensor("value", kv, True)
        self.preparation: tuple[Operation, ...] = ()
        if normed:
            raw = (KeptTensor("query", query), KeptTensor("key", kv)) if grouped else (whole,)
            rows = tokens * (channels + kv_channels) // model.head_dim
            self.preparation += (Operation("qk_layernorm", (*raw, *_statistics("qk norm", model, sizes, rows))),)
        if rotary:
            tables = 2 * sizes.own_seq_length * model.rotary_dim * element
            self.preparation += (Operation("rotary", (KeptTensor("rotary tables", tables),)),)
        if rotary or normed or grouped:
            prefix = "rotated " if rotary else "normed " if normed else ""
            ready = (KeptTensor(f"{prefix}query", query, True), KeptTensor(f"{prefix}key", kv, True))
            self.heads: tuple[KeptTensor, ...] = (*ready, whole if normed and not grouped else value)
        else:
            self.heads = (whole,)
        self.core = self._kept(model, sizes, grouped)

    def _kept(self, model: ModelConfig, sizes: Sizes, grouped: bool) -> tuple[KeptTensor, ...]:
        scores = sizes.micro_batch_size * model.num_attention_heads // sizes.tp_size * sizes.own_seq_length
        if not model.builds_scores(sizes.device):
            return (*self.heads, self.attended, KeptTensor("log-sum-exp", scores * sizes.accumulate_bytes))
        heads = self.heads
        repeated = self.attended.num_bytes * sizes.cp_size  # of all ranks, for every head
        if grouped:
            heads = (heads[0], KeptTensor("repeated key", repeated), KeptTensor("repeated value", repeated))
        elif sizes.cp_size > 1:
            heads = (heads[0], KeptTensor("gathered key and value", 2 * repeated))
        scores *= sizes.seq_length
        element = sizes.element_bytes
        softmax = max(4, element) if model.attention_softmax_in_fp32 else element
        kept = [KeptTensor("softmax", scores * softmax, True)]
        if model.attention_dropout > 0.0:
            kept += [KeptTensor("softmax dropout mask", scores, True), KeptTensor("dropped softmax", scores * element, True)]
        elif softmax != element:
            kept += [KeptTensor("cast softmax", scores * element)]
        return (*heads, *kept)


def _statistics(name: str, model: ModelConfig, sizes: Sizes, rows: int) -> tuple[KeptTensor, ...]:
    """Mean and reciprocal deviation of each row; RMSNorm has no mean. CPU kernels of LayerNorm keep them in the rows' dtype."""
    if model.normalization == "RMSNorm":
        return (KeptTensor(f"{name} statistics", rows * sizes.accumulate_bytes),)
    element = sizes.element_bytes if sizes.device == "cpu" else sizes.accumulate_bytes
    return (KeptTensor(f"{name} statistics", 2 * rows * element),)


def _masks(model: ModelConfig, sizes: Sizes, name: str) -> tuple[KeptTensor, ...]:
    """Of a branch's dropout: one byte per element."""
    return (KeptTensor(name, sizes.local_tokens * model.hidden_size, True),) if model.hidden_dropout else ()
