"""The sizes of one micro-batch on one rank, which decide the bytes of every tensor.

Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_lite.config.checks import chosen
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
CPU_RNG_STATE, CUDA_RNG_STATE, NUM_STREAMS = 5056, 16, 2
# The elements that each thread computes at a time in RMSNorm and GELU on a CPU. Their float32
# copies stay in its cache.
CPU_BLOCK = 2**16
# The queries that causal attention computes at a time on a CPU (model/causal_blocks.py), in
# sequences of these lengths. In longer ones the kernel skips enough keys by itself.
QUERY_BLOCK = 128
SHORTEST_IN_BLOCKS, LONGEST_IN_BLOCKS = 256, 512


class Processor(NamedTuple):
    """What a run computes with, which no setting tells.

    onednn: whether faster products replace torch's (parallel/products.py), also those of 16-bit
        attention (model/causal_products.py).
    threads: the threads of one rank on a CPU.
    widens: whether 16-bit products are computed in float32 (parallel/wide_products.py): those of
        Muon, and with `onednn` those of layers and attention too.
    """

    onednn: bool = False
    threads: int = 1
    widens: bool = False


ANY_PROCESSOR = Processor()


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The values that decide the bytes of tensors, besides the shape of the model.

    seq_length: the length of the whole sequence, before context parallelism splits it.
    element_bytes: the bytes of an element of weights and activations: 4, or 2 under --bf16 or
        --fp16.
    device: "cpu" or "cuda".
    loss_chunk_size: the number of tokens that have logits at a time. None: the logits of all tokens
        are kept.
    loss_in_one_pass: whether forward computes the gradients of each loss chunk, so that backward
        computes no logits again.
    has_embedding: whether the stage holds the embedding.
    has_head: whether the stage holds the final norm, the output projection and the loss.
    first_layer: the number of the stage's first layer in the whole model, counted from 0.
    sums_gradients: whether the gradient of a parameter is added to the rank's sum of gradients and
        freed as soon as it is complete, as in training. If not, it stays alive.
    adds_by_itself: whether the backward of a linear layer adds its weight's gradient to that sum by
        itself, so that autograd gets none.
    inside_operators: whether the courses count memory that torch allocates and frees inside one
        call of an operator.
    onednn, threads: see Processor.
    widens: whether 16-bit products of this run are computed in float32.
    has_padding: whether some of a rank's logits are those of padded ids.
    masks_loss: whether a micro-batch has a loss mask (--eod-mask-loss).
    resets_positions: whether it has position ids, which learned positions read
        (--reset-position-ids).
    resets_attention: whether it has the starts of its documents (--reset-attention-mask).
    compiled_kernels: whether norms, activations, rotary embedding and dropout are compiled
        (--torch-compile).
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
    loss_in_one_pass: bool = False
    has_embedding: bool = True
    has_head: bool = True
    first_layer: int = 0
    sums_gradients: bool = False
    adds_by_itself: bool = False
    inside_operators: bool = False
    onednn: bool = False
    threads: int = 1
    widens: bool = False
    has_padding: bool = False
    masks_loss: bool = False
    resets_positions: bool = False
    resets_attention: bool = False
    compiled_kernels: bool = False

    @classmethod
    def of(cls, config: RunConfig, *, device: str, stage: Stage | None = None) -> Sizes:
        """Returns the sizes of one pipeline stage, or of the whole model if `stage` is None.

        Raises ValueError if the size of the vocabulary is not known.
        """
        tp_size = config.parallel.tensor_model_parallel_size
        return cls(
            micro_batch_size=config.training.micro_batch_size,
            seq_length=config.data.seq_length,
            padded_vocab_size=config.tokenizer.padded_vocab_size(tp_size),
            tp_size=tp_size,
            sequence_parallel=config.parallel.sequence_parallel,
            cp_size=config.parallel.context_parallel_size,
            cp_comm_type=config.parallel.cp_comm_type,
            device=device,
            element_bytes=chosen("the precision", config.training.precision, ELEMENT_BYTES),
            loss_chunk_size=config.loss_chunk_size,
            loss_in_one_pass=config.loss_in_one_pass,
            has_embedding=stage is None or stage.is_first,
            has_head=stage is None or stage.is_last,
            first_layer=0 if stage is None else stage.first_layer,
            masks_loss=config.data.eod_mask_loss,
            resets_positions=config.data.reset_position_ids and config.model.positions.learned,
            resets_attention=config.data.reset_attention_mask,
            compiled_kernels=config.compiles_kernels,
        )

    @classmethod
    def in_training(
        cls, config: RunConfig, *, device: str, stage: Stage, processor: Processor = ANY_PROCESSOR
    ) -> Sizes:
        """Returns the sizes of a stage whose courses count all that a training step allocates."""
        sizes = cls.of(config, device=device, stage=stage)
        training = config.training
        return replace(
            sizes,
            sums_gradients=True,
            adds_by_itself=training.gradient_accumulation_fusion and not config.compiles_layers,
            inside_operators=True,
            onednn=processor.onednn,
            threads=processor.threads,
            widens=processor.onednn and processor.widens and sizes.element_bytes == 2,
            has_padding=sizes.padded_vocab_size != config.tokenizer.true_vocab_size,
        )

    @property
    def cpu_block(self) -> int:
        """The elements that RMSNorm and GELU compute at a time on a CPU."""
        return CPU_BLOCK * self.threads

    @property
    def onednn_linears(self) -> bool:
        """Whether oneDNN computes the large products of linear layers. They are float32."""
        return self.onednn and self.element_bytes == ELEMENT_BYTES["fp32"]

    @property
    def is_rounded(self) -> bool:
        """Whether gradients have 16 bits, and their sums 32."""
        return self.element_bytes != self.accumulate_bytes

    @property
    def tokens(self) -> int:
        """The tokens of a micro-batch on one rank: s b / c."""
        return self.own_seq_length * self.micro_batch_size

    @property
    def own_seq_length(self) -> int:
        """The tokens of each sequence on one context-parallel rank: s / c."""
        return self.seq_length // self.cp_size

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
        if self.device == "cpu":
            return NUM_STREAMS * CPU_RNG_STATE
        return NUM_STREAMS * CUDA_RNG_STATE + CPU_RNG_STATE

    @property
    def stream_state_bytes(self) -> int:
        """The bytes of the state of one random-number stream."""
        return CPU_RNG_STATE if self.device == "cpu" else CUDA_RNG_STATE


def residual_element_bytes(model: ModelConfig, sizes: Sizes) -> int:
    """Returns the bytes of an element of the residual stream."""
    return sizes.accumulate_bytes if model.fp32_residual_connection else sizes.element_bytes


def residual_bytes(model: ModelConfig, sizes: Sizes) -> int:
    """Returns the bytes of the residual stream of a micro-batch on one rank."""
    return sizes.local_tokens * model.hidden_size * residual_element_bytes(model, sizes)


def is_widened(model: ModelConfig, sizes: Sizes) -> bool:
    """Returns whether the residual stream has a wider dtype than the branches."""
    return residual_element_bytes(model, sizes) != sizes.element_bytes


class Heads(NamedTuple):
    """The bytes of the query and of the key on one rank. The value has the bytes of the key.

    query: s/c b a/t d elements.
    kv: s/c b g/t d elements.
    """

    query: int
    kv: int

    @classmethod
    def of(cls, model: ModelConfig, sizes: Sizes) -> Heads:
        """Returns the bytes for one micro-batch of a model."""
        per_channel = sizes.tokens * sizes.element_bytes
        return cls(
            per_channel * (model.num_attention_heads * model.head_dim // sizes.tp_size),
            per_channel * (model.query_groups * model.head_dim // sizes.tp_size),
        )


def query_blocks(seq_length: int, element_bytes: int, device: str) -> list[slice]:
    """Returns the ranges of queries that causal attention computes one after the other.

    The result is one range, for the kernel's own causal attention, unless the tensors are float32
    on a CPU and the sequence has a length that gains from blocks.
    """
    fits = SHORTEST_IN_BLOCKS <= seq_length <= LONGEST_IN_BLOCKS
    step = QUERY_BLOCK if fits and device == "cpu" and element_bytes == 4 else max(1, seq_length)
    return [slice(start, min(start + step, seq_length)) for start in range(0, seq_length, step)]
