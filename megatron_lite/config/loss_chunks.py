"""How many tokens of a micro-batch have logits at a time: `--loss-chunk-size` and its default.

    float32, where forward can compute the gradients too    512 tokens
    all other runs                                          all tokens, whose logits are kept

In one pass, chunks save the memory of the logits and take about the same time. In two passes
backward computes the logits again, so a user has to ask for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_lite.config.run import RunConfig

DEFAULT_TOKENS = 512


def can_be_in_one_pass(config: RunConfig) -> bool:
    """Tells whether forward can compute the gradients of a loss chunk right after its losses.

    It cannot with:

    - 16-bit weights: their losses may be scaled, and their gradients are rounded to 16 bits.
    - --use-torch-fsdp2: no rank has a sum of the whole output weight's gradient.
    - --no-gradient-accumulation-fusion: autograd adds to the sum, in backward.
    - layers that are graphs of the compiler: what it keeps is not predicted.
    """
    return (
        config.training.precision == "fp32"
        and config.training.gradient_accumulation_fusion
        and not config.data_parallel.use_torch_fsdp2
        and not config.compiles_layers
    )


def default_chunk_size(tokens: int, *, in_one_pass: bool) -> int | None:
    """Returns the default for a micro-batch of so many tokens on a rank. None: no chunks.

    in_one_pass: whether forward can compute the gradients too.
    """
    return DEFAULT_TOKENS if in_one_pass and tokens > DEFAULT_TOKENS else None


def loss_chunk_size(config: RunConfig) -> int | None:
    """Returns the number of tokens that have logits at a time. None: all of them, and kept."""
    chosen = config.training.loss_chunk_size
    if chosen is not None:
        return chosen or None
    sequence = config.data.seq_length // config.parallel.context_parallel_size
    tokens = sequence * config.training.micro_batch_size
    return default_chunk_size(tokens, in_one_pass=can_be_in_one_pass(config))
