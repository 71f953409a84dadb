"""The sizes of one micro-batch on one rank, and the bytes of the tensors that they decide.

Some bytes are the number of an operation: its largest temporary, at the fullest moment of it.

    memory at that moment = tensors kept for backward and not yet used + what a replay has rebuilt
                            + the gradient of the residual stream + the operation's number

A number counts the gradients of the operation's output and input, gathered tensors, and what its
kernels allocate. The fullest moment of an operation is in its backward, because its forward holds
no more. The exceptions are the loss in one pass, whose forward computes the gradients, and the
experts, whose forward holds a place for each choice of all tokens. Operations that never hold the
most of their layer have the number 0: dropout, the split into heads and norms of one kernel.
docs/memory.md tells how far the sum is from measured peaks. Standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.optimizer_settings import FORMATS
from megatron_lite.config.parallel import exchange_of
from megatron_lite.config.row_blocks import has_gradient_tensor, product_rows
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage

from .operations import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Collective, Parameter

CPU_RNG_STATE, CUDA_RNG_STATE, NUM_STREAMS = 5056, 16, 2
LARGE_BLOCK, BLOCK_UNIT = 10 * 2**20, 2 * 2**20  # of torch's CUDA allocator


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The model, and the values of one micro-batch that decide the bytes of its tensors.

    seq_length: the length of the whole sequence, before context parallelism splits it.
    ep_size: the ranks over which experts are spread. expert_tp_size: the TP ranks that share
        each; 0: all.
    gathers_tokens: whether these ranks gather all tokens (--moe-token-dispatcher-type allgather).
    expert_imbalance: the rows of this rank's experts over those of a balanced choice.
    expert_rows: the rows that the experts of each layer of the stage compute, and those that the
        rank sends; (): those of `expert_imbalance`.
    element_bytes: the bytes of an element of weights and activations: 4, or 2 under --bf16 or
        --fp16.
    device: "cpu" or "cuda".
    loss_chunk_size: the number of tokens that have logits at a time. None: the logits of all tokens
        are kept.
    loss_in_one_pass: whether forward computes the gradients of each loss chunk, so that backward
        computes no logits again.
    has_embedding: whether the stage holds the embedding.
    has_head: whether the stage holds the final norm, the output projection and the loss.
    first_layer: the number of the stage's first layer in the whole model, counted from 0, or of
        the first layers like those of the stage, so that alike stages share what is cached.
    sums_gradients: whether the gradient of a parameter is added to the rank's sum of gradients and
        freed as soon as it is complete, as in training. If not, it stays alive.
    adds_by_itself: whether the backward of a linear layer adds its weight's gradient to that sum by
        itself, so that autograd gets none.
    accumulates: whether a micro-batch before has left gradients, to which its own are added.
    narrow_sums: whether the sum of 16-bit gradients has 16 bits too (--main-grads-dtype bf16).
    is_float16: whether an element of 2 bytes is float16, not bfloat16.
    masks_loss: whether a micro-batch has a loss mask (--eod-mask-loss).
    resets_positions: whether it has position ids, which learned positions read
        (--reset-position-ids).
    resets_attention: whether it has the starts of its documents (--reset-attention-mask).
    compiled: whether norms, activations, rotary embedding, dropout and the loss are compiled
        (--torch-compile).
    deterministic: --deterministic-mode, in which torch's attention on CUDA is FlashAttention.
    in_step: whether tensors take what the allocator counts for them in a step.
    attends: whether FLOPs count the matmuls of attention.
    input_size: the channels that a linear layer reads, if not those of the hidden states. `whole`
        and `hidden` have as many.
    """

    model: ModelConfig
    micro_batch_size: int
    seq_length: int
    padded_vocab_size: int = 0
    tp_size: int = 1
    sequence_parallel: bool = False
    cp_size: int = 1
    cp_comm_type: str | tuple[str, ...] = "p2p"
    ep_size: int = 1
    expert_tp_size: int = 0
    gathers_tokens: bool = False
    expert_imbalance: float = 1.0
    expert_rows: tuple[tuple[int, int], ...] = ()
    element_bytes: int = 4
    device: str = "cpu"
    loss_chunk_size: int | None = None
    loss_in_one_pass: bool = False
    has_embedding: bool = True
    has_head: bool = True
    first_layer: int = 0
    sums_gradients: bool = False
    adds_by_itself: bool = False
    accumulates: bool = False
    narrow_sums: bool = False
    is_float16: bool = False
    masks_loss: bool = False
    resets_positions: bool = False
    resets_attention: bool = False
    compiled: bool = False
    deterministic: bool = False
    in_step: bool = False
    attends: bool = True
    input_size: int = 0

    @classmethod
    def of(cls, config: RunConfig, device: str, stage: Stage | None = None) -> Sizes:
        """Returns the sizes of one pipeline stage, or of the whole model if `stage` is None.

        Raises ValueError if the size of the vocabulary is not known.
        """
        parallel, training, data = config.parallel, config.training, config.data
        tp_size = parallel.tensor_model_parallel_size
        return cls(
            model=config.model,
            micro_batch_size=training.micro_batch_size,
            seq_length=data.seq_length,
            padded_vocab_size=config.tokenizer.rows(tp_size),
            tp_size=tp_size,
            sequence_parallel=parallel.sequence_parallel,
            cp_size=parallel.context_parallel_size,
            cp_comm_type=parallel.cp_comm_type,
            ep_size=parallel.expert_model_parallel_size,
            expert_tp_size=parallel.expert_tensor_parallel,
            expert_imbalance=parallel.plan_moe_imbalance,
            gathers_tokens=parallel.moe_token_dispatcher_type == "allgather",
            device=device,
            deterministic=training.deterministic_mode,
            element_bytes=FORMATS[training.precision],
            loss_chunk_size=config.loss_chunk_size,
            loss_in_one_pass=config.loss_in_one_pass,
            has_embedding=stage is None or stage.is_first,
            has_head=stage is None or stage.is_last,
            first_layer=first_like_stage(config, stage) if stage else 0,
            masks_loss=data.eod_mask_loss,
            resets_positions=data.reset_position_ids and config.model.learns_positions,
            resets_attention=data.reset_attention_mask,
            compiled=config.uses_compiler(device),
            is_float16=training.precision == "fp16",
        )

    @classmethod
    def in_training(
        cls,
        config: RunConfig,
        *,
        device: str,
        stage: Stage,
        accumulates: bool = True,
        sharded: bool = False,
    ) -> Sizes:
        """Returns the sizes of a stage in a training step, for the largest temporaries.

        sharded: whether FSDP2 shards the states. It has no sum of whole gradients: they live until
            their unit is reduced.
        """
        training = config.training
        return replace(
            cls.of(config, device=device, stage=stage),
            in_step=True,
            sums_gradients=not sharded,
            adds_by_itself=not sharded
            and training.gradient_accumulation_fusion
            and not config.compiles_layers,
            accumulates=accumulates,
            narrow_sums=config.optimizer.main_grads_dtype != "fp32",
        )

    def shared_by(self, num_ranks: int) -> Sizes:
        """Returns the sizes of a part that so many TP ranks share, each with its own tokens."""
        return replace(
            self,
            tp_size=num_ranks,
            sequence_parallel=num_ranks > 1,
            seq_length=self.seq_length * self.local_tokens // self.tokens * num_ranks,
        )

    def gloo_copy(self, num_bytes: int) -> int:
        """Returns the bytes of the copy that an all-gather or a reduce-scatter makes on a CPU.

        num_bytes: the whole tensor of all ranks. gloo copies it once; other collectives of this
            project copy nothing.
        """
        return num_bytes if self.device == "cpu" else 0

    def allocated(self, num_bytes: int) -> int:
        """Returns the bytes that torch's allocator counts for a tensor of a step."""
        return allocated(num_bytes, self.device) if self.in_step else num_bytes

    @property
    def is_rounded(self) -> bool:
        """Whether activations and gradients have 16 bits."""
        return self.element_bytes != self.accumulate_bytes

    @property
    def casts_gradients(self) -> bool:
        """Whether gradients have 16 bits, and their sums 32."""
        return self.is_rounded and not self.narrow_sums

    @property
    def tokens(self) -> int:
        """The tokens of a micro-batch on one rank: s b / c."""
        return self.own_seq_length * self.micro_batch_size

    @property
    def own_seq_length(self) -> int:
        """The tokens of each sequence on one context-parallel rank: s / c."""
        return self.seq_length // self.cp_size

    @property
    def exchanges_heads(self) -> bool:
        """Whether attention has all tokens of some heads (--cp-comm-type a2a)."""
        return self.cp_size > 1 and self.cp_comm_type == "a2a"

    @property
    def num_ranks(self) -> int:
        """The number of ranks that split the work of a layer on a micro-batch: t c."""
        return self.tp_size * self.cp_size

    @property
    def local_tokens(self) -> int:
        """The tokens of a norm or a residual on one rank.

        They are s b / (c t) under sequence parallelism, else s b / c.
        """
        return self.tokens // self.tp_size if self.sequence_parallel else self.tokens

    @property
    def accumulate_bytes(self) -> int:
        """The bytes of an element of sums and statistics, which are in float32 at least."""
        return max(4, self.element_bytes)

    @property
    def rng_state_bytes(self) -> int:
        """The bytes that a replayed unit or region keeps to repeat its draws.

        They are the state of every stream and, on CUDA, the state of the CPU's generator.
        """
        return NUM_STREAMS * self.stream_state_bytes + CPU_RNG_STATE * (self.device != "cpu")

    @property
    def stream_state_bytes(self) -> int:
        """The bytes of the state of one random-number stream."""
        return CPU_RNG_STATE if self.device == "cpu" else CUDA_RNG_STATE

    @property
    def channels(self) -> int:
        """The channels that a linear layer reads."""
        return self.input_size or self.model.hidden_size

    @cached_property
    def whole(self) -> int:
        """The bytes of the hidden states of all tokens, [s/c, b, h]."""
        return self.tokens * self.channels * self.element_bytes

    @cached_property
    def hidden(self) -> int:
        """Those of this rank, [s', b, h]: s' is s/(c t) under sequence parallelism, else s/c."""
        return self.local_tokens * self.channels * self.element_bytes

    @property
    def widened(self) -> bool:
        """Whether the dtype of the residual stream is wider than that of the branches."""
        return self.model.fp32_residual_connection and self.is_rounded

    @property
    def residual(self) -> int:
        """The bytes of the residual stream."""
        return self.wide(self.hidden) if self.widened else self.hidden

    def _of_heads(self, heads: int, channels: int) -> int:
        return self.tokens * self.element_bytes * (heads * channels // self.tp_size)

    @cached_property
    def query(self) -> int:
        """The bytes of the query: s/c b a/t d elements."""
        return self._of_heads(self.model.num_attention_heads, self.model.head_dim)

    @cached_property
    def kv(self) -> int:
        """The bytes of the key: s/c b g/t d elements."""
        return self._of_heads(self.model.query_groups, self.model.head_dim)

    @cached_property
    def attended(self) -> int:
        """The bytes of the result of attention, those of the query but in latent attention."""
        return self._of_heads(self.model.num_attention_heads, self.model.value_dim)

    @cached_property
    def value(self) -> int:
        """The bytes of the value, those of the key but in latent attention."""
        return self._of_heads(self.model.query_groups, self.model.value_dim)

    @property
    def row(self) -> int:
        """The bytes of one float32 number for each token."""
        return self.tokens * self.accumulate_bytes

    @cached_property
    def reduces(self) -> tuple[Collective, ...]:
        """The collective that sums the partial [s/c, b, h] of the ranks."""
        kind = REDUCE_SCATTER if self.sequence_parallel else ALL_REDUCE
        return (Collective(kind, self.whole),) * (self.tp_size > 1)

    @cached_property
    def gathers(self) -> tuple[Collective, ...]:
        """The all-gather of [s', b, h] to [s/c, b, h] under sequence parallelism."""
        return (Collective(ALL_GATHER, self.whole),) * self.sequence_parallel

    def wide(self, num_bytes: int) -> int:
        """Returns the bytes of a tensor of activations in float32."""
        return num_bytes // self.element_bytes * self.accumulate_bytes

    def weight_gradient(self, weight: Parameter) -> int:
        """Returns the bytes of the gradient of a linear layer's weight while it is computed.

        A product of the sum's format goes straight into it, as any 16-bit one does on CUDA.
        Elsewhere that is computed some rows at a time and then added, for which a CPU casts it. A
        gradient that autograd gets exists whole, and is cast to float32.
        """
        rows, columns = weight.shape
        wide = self.accumulate_bytes if self.casts_gradients else 0
        if not self.sums_gradients:
            return rows * columns * self.element_bytes
        if not self.adds_by_itself:
            return rows * columns * (self.element_bytes + wide)
        return self.weight_rows(rows, columns, self.accumulates)

    def weight_rows(self, rows: int, columns: int, accumulates: bool) -> int:
        """Returns the bytes of the rows of a weight's gradient that are computed at a time."""
        if not self.casts_gradients or not has_gradient_tensor(self.device):
            return 0
        cast = self.accumulate_bytes if self.device == "cpu" and accumulates else 0
        return min(rows, product_rows(columns)) * columns * (self.element_bytes + cast)

    def column_temporary(self, output: int, weight: Parameter) -> int:
        """Returns the number of a column-parallel linear layer. output: the bytes of its output.

        It holds the gradients of output and input. Under sequence parallelism it also holds the
        gathered input and this rank's part of the input's gradient. When autograd casts the
        weight's gradient, that of the output is gone.
        """
        gathered = 0
        if self.gathers:
            gathered = self.whole + self.hidden + self.gloo_copy(self.whole)
        held, gradient = output + self.whole + gathered, self.weight_gradient(weight)
        if not self.sums_gradients or self.adds_by_itself or self.compiled:
            return held + gradient
        return max(held + math.prod(weight.shape) * self.element_bytes, self.whole + gradient)


def allocated(num_bytes: int, device: str) -> int:
    """Returns the bytes that torch's allocator counts for a tensor on a device.

    The allocator of CUDA rounds blocks of 10 MiB and more up to 2 MiB, and it does not split off a
    rest of 1 MiB or less. With expandable segments it does.
    """
    if device == "cpu" or num_bytes < LARGE_BLOCK:
        return num_bytes
    rest = -num_bytes % BLOCK_UNIT
    return num_bytes + rest if rest <= BLOCK_UNIT // 2 else num_bytes


@lru_cache(256)
def alike_layers(
    model: ModelConfig, seq_length: int, exchange: str | tuple[str, ...]
) -> tuple[int, ...]:
    """Returns, for each layer of the model, the number of the first layer that computes the same.

    exchange: --cp-comm-type.
    """
    kinds = [
        (
            model.layer_reach(layer, seq_length),
            model.layer_rotates(layer),
            model.layer_is_local(layer),
            model.layer_has_experts(layer),
            exchange_of(exchange, layer),
        )
        for layer in range(model.num_layers)
    ]
    return tuple(map(kinds.index, kinds))


@lru_cache(4096)
def first_alike(alike: tuple[int, ...], first_layer: int, num_layers: int) -> int:
    """Returns the first layer of the model from which on so many layers are like these.

    alike: those of `alike_layers`.
    """
    own = alike[first_layer : first_layer + num_layers]
    return next(n for n in range(first_layer + 1) if alike[n : n + len(own)] == own)


def layers_of(config: RunConfig) -> tuple[int, ...]:
    """Returns `alike_layers` of a run."""
    return alike_layers(config.model, config.data.seq_length, config.parallel.cp_comm_type)


def first_like_stage(config: RunConfig, stage: Stage) -> int:
    """Returns the first layer from which on layers are like those of a stage."""
    return first_alike(layers_of(config), stage.first_layer, stage.num_layers)
