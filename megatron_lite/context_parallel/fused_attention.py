"""Fused attention of some queries to some keys, forward and backward, with torch's own kernels.

The forward also returns the log-sum-exp of each row (`lse`). The backward of a kernel rebuilds the
softmax as exp(q k - lse). It needs only `lse` and rowsum(dy * y) to account for other keys. If both
cover all keys, the kernel returns the exact gradients of its own keys, and the gradients of parts
add up (2205.14135, 2310.01889).
"""

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.parallel.compiled import Pair, Tensors, applied
from megatron_lite.parallel.weight_gradient import in_autocast_dtype

from .attention_kernels import (
    PLAIN,
    CuSeqlens,
    Readable,
    causal_mask,
    cpu_attention_takes_groups,
    heads_first,
    heads_last,
)

aten = torch.ops.aten


def takes_window(query: Tensor) -> bool:
    """Returns whether the kernel of `attend` skips the keys before a window or a document."""
    if query.device.type == "cpu" or query.element_size() != 2:
        return False
    return not torch.cuda.is_available() or has_flash(query.device, query.shape[-1])


@cache
def has_flash(device: torch.device, head_dim: int) -> bool:
    """Returns whether FlashAttention 2 runs, and its backward: from Ampere on, where torch was
    built with it. Beyond 192 channels a head needs the shared memory of an A100 or H100."""
    version = torch.cuda.get_device_capability(device)
    is_small = version in ((8, 6), (8, 9), (12, 0))
    return (
        torch.backends.cuda.is_flash_attention_available()
        and version >= (8, 0)
        and not (is_small and head_dim > 192)
    )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    scale: float,
    readable: Readable = PLAIN,
) -> Tensors:
    """Returns softmax(scale q k^T) v, and the log of the sum of exponentials of each row.

    The first is [b, a, n, d] in any memory layout. The second is [b, a, n], at least float32.

    query: [b, a, n, d]. key, value: [b, g, m, d].
    causal: row i reads the columns 0 to i only; n must equal m.
    readable: needs `causal`. Documents need a kernel that knows them (`takes_window`). Where the
        kernel does not know windows, it gets a mask. The CPU's flash kernel then skips the blocks
        of later columns all the same. On CUDA only the memory-efficient kernel takes a mask, and
        it gets the mask without `causal`.
    """
    reach, documents = readable
    mask = _window_mask(query, reach)
    key, value = _for_each_head(query, key, value)
    if query.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scale
        )
    if not takes_window(query):  # the memory-efficient kernel
        bias, causal = _bias(query, mask), causal and mask is None
        output, lse, *_ = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, 0.0, causal, scale=scale
        )
        # The kernel pads the rows of lse.
        return output, lse[..., : query.shape[2]].contiguous()
    output, lse, *_ = aten._flash_attention_forward(
        *_tokens_first(documents, query, key, value),
        *_lengths(documents, query, key),
        0.0,
        causal,
        False,
        scale=scale,
        **_window(reach),
    )
    if documents is not None:  # [b n, a, d] and [a, b n]
        output = output.unflatten(0, (-1, query.shape[2]))
        lse = lse.unflatten(1, (-1, query.shape[2])).transpose(0, 1)
    return output.transpose(1, 2), lse


def attend_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
    readable: Readable = PLAIN,
) -> Tensors:
    """Returns these keys' part of the query's gradient, and the gradients of key and value.

    output, lse: the result of these queries with all of their keys, not only with these keys.
    The shapes are those of `attend`.
    """
    b, groups, m, d = key.shape
    reach, documents = readable
    mask = _window_mask(query, reach)
    key, value = _for_each_head(query, key, value)
    # The kernels for CUDA take the seed of a dropout. Dropout is 0 here, so any seed will do.
    if query.device.type == "cpu":
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_output, query, key, value, output, lse, 0.0, causal, attn_mask=mask, scale=scale
        )
    elif not takes_window(query):
        # This kernel expects the rows of lse padded to a multiple of 32. With lse = inf a padded
        # row has softmax 0.
        lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
        seed = torch.empty((), dtype=torch.int64, device=query.device)
        *grads, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad_output,
            query,
            key,
            value,
            _bias(query, mask),
            output,
            lse,
            seed,
            seed,
            0.0,
            [True, True, True, False],
            causal and mask is None,
            scale=scale,
        )
    else:
        seed = torch.empty(2, dtype=torch.uint64, device=query.device)
        if documents is not None:
            lse = lse.transpose(0, 1).flatten(1)  # [a, b n]
        grads = aten._flash_attention_backward(
            *_tokens_first(documents, grad_output, query, key, value, output),
            lse.contiguous(),
            *_lengths(documents, query, key),
            0.0,
            causal,
            seed,
            torch.empty_like(seed[0]),
            scale=scale,
            **_window(reach),
        )
        if documents is not None:
            grads = [grad.unflatten(0, (b, -1)) for grad in grads]
        grads = [grad.transpose(1, 2) for grad in grads]
    grad_query, *shared = grads
    if shared[0].shape[1] != groups:  # the key was repeated for every head
        shared = [grad.reshape(b, groups, -1, m, d).sum(2) for grad in shared]
    return grad_query, shared[0], shared[1]


def _tokens_first(documents: CuSeqlens | None, *tensors: Tensor) -> Iterable[Tensor]:
    """Returns each [b, a, n, d] as a view [b, n, a, d], or with documents as [b n, a, d]."""
    for tensor in tensors:
        tensor = tensor.transpose(1, 2)
        yield tensor if documents is None else tensor.flatten(0, 1)


def _lengths(documents: CuSeqlens | None, query: Tensor, key: Tensor) -> tuple[Any, ...]:
    """Returns the ends of queries and keys, and the most of each that belong together."""
    if documents is None:
        return None, None, query.shape[2], key.shape[2]
    return documents.ends, documents.ends, documents.longest, documents.longest


def _window_mask(query: Tensor, reach: int | None) -> Tensor | None:
    """Returns a window over the queries [.., n, d] as a mask, if the kernel needs one."""
    if reach is None or takes_window(query):
        return None
    return causal_mask(heads_last(query), Readable(reach))


def _window(reach: int | None) -> dict[str, int]:
    return {} if reach is None else dict(window_size_left=reach, window_size_right=0)


def _bias(query: Tensor, mask: Tensor | None) -> Tensor | None:
    """Returns the mask as a view [b, a, n, m] for the memory-efficient kernel.

    The kernel's loads need rows that start at multiples of 16 elements.
    """
    if mask is None:
        return None
    n, m = mask.shape[-2:]
    return torch.nn.functional.pad(mask, (0, -m % 16))[..., :m].expand(*query.shape[:2], n, m)


def _for_each_head(query: Tensor, key: Tensor, value: Tensor) -> Tensors:
    """Returns key and value, repeated for every head if the kernel has no query groups."""
    repeats = query.shape[1] // key.shape[1]
    on_cpu = query.device.type == "cpu"
    if repeats == 1 or (cpu_attention_takes_groups() if on_cpu else takes_window(query)):
        return key, value
    return key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)


def padded(tensor: Tensor, query: Tensor) -> Tensor:
    """Returns the tensor with zeros behind each head: kernels take heads of one size."""
    missing = query.shape[-1] - tensor.shape[-1]
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    forward: Callable[..., Iterable[Tensor]],
    backward: Callable[..., Iterable[Tensor]],
) -> Tensor:
    """Returns the output of `forward`, and keeps it, its lse and the three inputs.

    Both functions get a padded value. forward: returns the output and lse. backward: returns the
    gradients of the inputs, from the gradient, query, key, value, output and lse.
    """

    def cut_forward(query: Tensor, key: Tensor, value: Tensor) -> Tensors:
        output, lse = forward(query, key, padded(value, query))
        if output.shape[-1] > value.shape[-1]:  # without the channels of the padding
            output = output[..., : value.shape[-1]].contiguous()
        return output, output, lse

    def cut_backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor
    ) -> Tensors:
        others = (padded(one, query) for one in (value, output))
        grads = backward(padded(grad.contiguous(), query), query, key, *others, lse)
        grad_query, grad_key, grad_value = grads
        return grad_query, grad_key, grad_value[..., : value.shape[-1]]

    pair = Pair(cut_forward, once_differentiable(cut_backward), slice(3))
    return applied(pair, query, key, value)


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, readable: Readable, *, scale: float
) -> Tensor:
    """Returns attention to the readable keys, [s, b, a/t, d]. Needs `has_kernel(query)`.

    query: [s, b, a/t, d]. key, value: [s, b, g/t, d]. The heads of value may be smaller: they are
    padded for the kernel, which is no part of what is kept.
    Keeps five tensors for backward, as torch's own causal attention does:

        query, key, value   the arguments themselves; views of one storage stay views
        output              [s, b, a/t, d], which linear_proj keeps too
        log-sum-exp         of each row, [b, a/t, s] in float32 (float64 for float64)

    It issues no collective and draws no random number.
    """
    query, key, value = in_autocast_dtype(query, key, value)
    # A kernel that does not know documents runs for each of them.
    documents = None if takes_window(query) else readable.documents
    if documents is not None:
        readable = Readable(readable.reach)
    shared: dict[str, Any] = dict(causal=True, scale=scale, readable=readable)

    def run(function: Callable[..., Iterable[Tensor]], *tensors: Tensor) -> Any:
        run_all = partial(function, **shared)
        return run_all(*tensors) if documents is None else documents.one_by_one(run_all, *tensors)

    def forward(*tensors: Tensor) -> Tensors:
        # Calls of torch's kernel alone: an ops(attention) policy can keep their results.
        output, lse = run(attend, *map(heads_first, tensors))
        return heads_last(output), lse

    def backward(*tensors: Tensor) -> Iterable[Tensor]:
        *others, lse = tensors
        return map(heads_last, run(attend_backward, *map(heads_first, others), lse))

    return attention(query, key, value, forward, backward)
