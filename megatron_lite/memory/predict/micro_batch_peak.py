"""The most bytes that a rank holds for one micro-batch, with every gradient and temporary.

It is for a forward and a backward of one stage that recomputes nothing. The workspaces of the
description's operations follow one another, first in the order of the forward and then in the
reverse order:

    peak = max over operations of (bytes held when it begins + `most` of its course)

The figure counts tensor storages, as memory/measure/live_storages.py does. peak.py predicts the
tensors kept for backward alone, under every recompute policy. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lite.config.model import ModelConfig
from megatron_lite.description.model_ends import embedding_operations, head_operations, loss_mask
from megatron_lite.description.operations import (
    ID_BYTES,
    LayerDescription,
    Operation,
    Workspace,
    course,
    document_starts,
)
from megatron_lite.description.sizes import Sizes, residual_bytes
from megatron_lite.description.transformer_layer import describe_layers


def micro_batch_peak(model: ModelConfig, sizes: Sizes, num_layers: int) -> int:
    """Returns the peak of one micro-batch's forward and backward on one stage.

    It counts the micro-batch itself: token ids and labels, or the hidden states that the stage
    before sent. It counts the rotary tables, though the model keeps them from step to step. It does
    not count the parameters.

    The gradient of every parameter counts as a fresh tensor that stays alive to the end, in the
    parameter's dtype. A run that adds it to a buffer of gradients frees it at once instead. On a
    stage without the head the gradient of the output replaces the output, which is freed once it
    has been sent. The buffers of messages between stages do not count.
    """
    layers = describe_layers(model, sizes, num_layers)
    workspaces = [one.workspace for one in _operations(model, sizes, layers)]
    if sizes.has_head:
        workspaces.append(mean_of_losses(sizes))
    forward = course(*(one.forward for one in workspaces))
    backward = course(*(one.backward for one in reversed(workspaces)))
    return course(_given(model, sizes, layers), forward, backward).most


def _operations(
    model: ModelConfig, sizes: Sizes, layers: tuple[LayerDescription, ...]
) -> Iterator[Operation]:
    if sizes.has_embedding:
        yield from embedding_operations(model, sizes)
    for layer in layers:
        yield from layer.operations
    if sizes.has_head:
        yield from head_operations(model, sizes)


def _given(model: ModelConfig, sizes: Sizes, layers: tuple[LayerDescription, ...]) -> int:
    """Returns the bytes of the tensors that are there before the forward begins."""
    ids = ID_BYTES * sizes.tokens
    hidden = residual_bytes(model, sizes)
    tables = {name: num_bytes for layer in layers for name, num_bytes in layer.tables().items()}
    ends = embedding_operations(model, sizes) if sizes.has_embedding else ()
    ends += head_operations(model, sizes) if sizes.has_head else ()
    return (
        (0 if sizes.has_embedding else hidden)
        + sum(tensor.num_bytes for one in ends for tensor in one.keeps if tensor.given)
        + (ids if sizes.has_head else 0)
        + (document_starts(sizes).num_bytes if sizes.resets_attention else 0)
        + sum(tables.values())
    )


def mean_of_losses(sizes: Sizes) -> Workspace:
    """Returns the workspace of the loss: the mean of the token losses, times a factor.

    With a loss mask it is the sum of the losses times the mask. The loss and its gradient, one
    number each, live until backward has ended.
    """
    losses, number = sizes.accumulate_bytes * sizes.tokens, sizes.accumulate_bytes
    if sizes.masks_loss:
        return Workspace(
            course(+losses, -losses, +number, -losses),
            course(+number, +number, +losses, -number - loss_mask(sizes).num_bytes),
        )
    return Workspace(
        course(+number, -losses, +number, -number), course(+number, +number, +losses, -number)
    )
