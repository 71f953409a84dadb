"""Reads the end-of-document tokens of a sample: Megatron's loss mask, positions and starts.

    --eod-mask-loss           a token that ends a document does not count in the loss
    --reset-position-ids      learned positions begin at 0 again after such a token
    --reset-attention-mask    a token reads no token of an earlier document

The results are those of `_get_ltor_masks_and_position_ids` in megatron-core. Every pipeline stage
reads the samples and computes them itself, so no stage sends them to another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.config.checks import InputError
from megatron_lite.config.run import RunConfig
from megatron_lite.data.tokenizers import build_tokenizer


@dataclass(frozen=True, kw_only=True)
class DocumentRules:
    """The id that ends a document, and which of the three flags are in force."""

    eod: int
    mask_loss: bool = False
    reset_positions: bool = False
    reset_attention: bool = False


def document_rules(config: RunConfig) -> DocumentRules | None:
    """Returns the rules of a run, or None if it treats the ends of documents like other tokens.

    Raises InputError if the tokenizer has no end-of-document token.
    """
    data = config.data
    given = [
        name
        for name, value in (
            ("--eod-mask-loss", data.eod_mask_loss),
            ("--reset-position-ids", data.reset_position_ids),
            ("--reset-attention-mask", data.reset_attention_mask),
        )
        if value
    ]
    if not given:
        return None
    try:
        eod = build_tokenizer(config.tokenizer).eod
    except InputError as error:
        raise InputError(f"{' and '.join(given)} needs the end of documents: {error}") from error
    return DocumentRules(
        eod=eod,
        mask_loss=data.eod_mask_loss,
        # Rotary tables follow the place in the sequence, as in Megatron.
        reset_positions=data.reset_position_ids and config.model.positions.learned,
        reset_attention=data.reset_attention_mask,
    )


def document_starts(tokens: Tensor, eod: int) -> Tensor:
    """Returns for each token of [b, s] the place of the first token of its document, int64."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    begins = torch.zeros_like(tokens)
    # The place of each token that begins a document, and 0 for all others. The largest number up
    # to a token is then the start of its document.
    begins[:, 1:] = places[1:] * (tokens[:, :-1] == eod)
    return begins.cummax(1).values
