"""The description of a norm: its parameters, its courses of memory, and the tensors that it keeps.

Its input, which it keeps too, is described where the norm is used.

Standard library only.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_lite.config.checks import chosen
from megatron_lite.config.model import ModelConfig
from megatron_lite.description.operations import Course, KeptTensor, Parameter, course
from megatron_lite.description.sizes import Sizes, is_widened


def norm_statistics(name: str, model: ModelConfig, sizes: Sizes, rows: int) -> KeptTensor:
    """Returns the statistics that a norm of `rows` rows keeps for backward."""
    return KeptTensor(
        f"{name} statistics",
        chosen("--normalization", model.normalization, STATISTICS)(rows, model, sizes),
    )


def norm_keeps(
    name: str, model: ModelConfig, sizes: Sizes, rows: int, width: int
) -> tuple[KeptTensor, ...]:
    """Returns the tensors that a norm of rows of `width` elements keeps besides its input."""
    statistics = norm_statistics(name, model, sizes, rows)
    return statistics, *shifted_weight(name, model, sizes, width)


def shifted_weight(
    name: str, model: ModelConfig, sizes: Sizes, width: int
) -> tuple[KeptTensor, ...]:
    """Returns 1 + weight, which a norm keeps under --apply-layernorm-1p, or nothing."""
    if not model.apply_layernorm_1p:
        return ()
    return (KeptTensor(f"{name} weight plus 1", width * sizes.element_bytes),)


def residual_norm_keeps(name: str, model: ModelConfig, sizes: Sizes) -> tuple[KeptTensor, ...]:
    """Returns the tensors that a norm of the residual stream keeps besides its input."""
    if not is_widened(model, sizes):
        return norm_keeps(name, model, sizes, sizes.local_tokens, model.hidden_size)
    wide = replace(sizes, element_bytes=sizes.accumulate_bytes)
    return (
        norm_statistics(name, model, wide, sizes.local_tokens),
        *(
            KeptTensor(f"{name} {kind} in float32", _vector(model, sizes))
            for kind in ("weight", "bias")[: _kept_vectors(model, sizes)]
        ),
    )


def residual_norm_forward(model: ModelConfig, sizes: Sizes) -> Course:
    """Returns the course of the forward of a norm of the residual stream."""
    rows, width = sizes.local_tokens, model.hidden_size
    if not is_widened(model, sizes):
        return norm_forward(model, sizes, rows, width)
    plain, wide = _widened(model, sizes)
    vectors, one = model.norm_vectors * _vector(model, sizes), _vector(model, sizes)
    shift = (+one, -one) if model.apply_layernorm_1p else ()
    return course(
        +vectors,
        *shift,
        norm_forward(plain, wide, rows, width),
        +rows * width * sizes.element_bytes,
        -rows * width * wide.element_bytes,
        one * _kept_vectors(model, sizes) - vectors,
    )


def residual_norm_backward(model: ModelConfig, sizes: Sizes) -> Course:
    """Returns the course of the backward of a norm of the residual stream, as `norm_backward`."""
    rows, width = sizes.local_tokens, model.hidden_size
    if not is_widened(model, sizes):
        return norm_backward(model, sizes, rows, width)
    plain, wide = _widened(model, sizes)
    vectors = model.norm_vectors * _vector(model, sizes)
    return course(
        +rows * width * wide.element_bytes,
        -rows * width * sizes.element_bytes,
        norm_backward(plain, wide, rows, width),
        # The gradients of the parameters are cast, and the float32 parameters are freed.
        +model.norm_vectors * width * sizes.element_bytes,
        -vectors - _vector(model, sizes) * _kept_vectors(model, sizes),
    )


def _widened(model: ModelConfig, sizes: Sizes) -> tuple[ModelConfig, Sizes]:
    """Returns the norm inside one that reads a float32 residual stream in a 16-bit run."""
    return (
        replace(model, apply_layernorm_1p=False),
        replace(sizes, element_bytes=sizes.accumulate_bytes),
    )


def _kept_vectors(model: ModelConfig, sizes: Sizes) -> int:
    """Returns how many parameters a norm keeps. Compiled kernels do not keep the bias."""
    return 1 if sizes.compiled_kernels else model.norm_vectors


def _vector(model: ModelConfig, sizes: Sizes) -> int:
    return model.hidden_size * sizes.accumulate_bytes


def norm_parameters(
    model: ModelConfig, width: int, prefix: str = "", *, partial: bool
) -> tuple[Parameter, ...]:
    """Returns the weight of a norm and, for LayerNorm, the bias. Each has `width` elements.

    partial: whether each TP rank normalizes other tokens or other heads.
    """
    return tuple(
        Parameter(f"{prefix}{name}", (width,), partial)
        for name in ("weight", "bias")[: model.norm_vectors]
    )


def _layer_norm_statistics(rows: int, model: ModelConfig, sizes: Sizes) -> int:
    """Returns the bytes of the mean and the reciprocal deviation of each row.

    torch's CPU kernel keeps them in the dtype of the rows. All other kernels, also compiled ones,
    keep at least float32.
    """
    in_rows_dtype = (
        sizes.device == "cpu" and model.norm_impl == "torch" and not sizes.compiled_kernels
    )
    return 2 * rows * (sizes.element_bytes if in_rows_dtype else sizes.accumulate_bytes)


def _rms_norm_statistics(rows: int, model: ModelConfig, sizes: Sizes) -> int:
    """Returns the bytes of the reciprocal root mean square of each row. RMSNorm has no mean."""
    return rows * sizes.accumulate_bytes


def norm_forward(model: ModelConfig, sizes: Sizes, rows: int, width: int) -> Course:
    """Returns the course of a norm's forward. It ends with the output and all that it keeps."""
    output, statistics = (
        rows * width * sizes.element_bytes,
        norm_statistics("", model, sizes, rows).num_bytes,
    )
    shifted = sum(one.num_bytes for one in shifted_weight("", model, sizes, width))
    if not _is_composed(model, sizes):
        return course(+shifted, +output, +statistics)
    wide = rows * width * sizes.accumulate_bytes
    if not sizes.is_rounded:  # the squares, then the normed rows, which are the output
        return course(+shifted, +wide, +statistics, -wide, +output)
    # the input and its squares in float32, then the normed rows
    squares = (+wide, +wide, +statistics, -wide)
    return course(+shifted, *squares, +wide, +output, -2 * wide)


def norm_backward(
    model: ModelConfig,
    sizes: Sizes,
    rows: int,
    width: int,
    *,
    copies: bool = False,
    frees_gradient: bool = True,
) -> Course:
    """Returns the course of a norm's backward. It ends with the gradients of input and parameters.

    All that the norm keeps is freed, except the input. The input is left to the caller.
    frees_gradient: whether the gradient of the output is freed.
    copies: whether the gradient of the output has a layout that RMSNorm on a CPU must copy.
    """
    hidden = rows * width * sizes.element_bytes
    statistics = sum(one.num_bytes for one in norm_keeps("", model, sizes, rows, width))
    gradients = width * model.norm_vectors
    used = hidden * frees_gradient + statistics
    if not _is_composed(model, sizes):
        return course(+hidden + gradients * sizes.element_bytes, -used)
    copied = hidden if copies else 0
    wide, means = rows * width * sizes.accumulate_bytes, rows * sizes.accumulate_bytes
    weight = gradients * sizes.accumulate_bytes
    grad = wide if sizes.is_rounded else 0  # the gradient of the output in float32
    inside = grad if sizes.inside_operators else 0  # a product of two dtypes casts an operand
    changes = [+copied, +grad, +inside, +wide, -inside]  # the normed rows
    changes += [+wide]  # the gradient of the normed rows, over which that of the input is written
    changes += [+wide, +weight, -wide]  # the gradient of the weight
    changes += [+wide, +means, -wide]
    left = copied + grad + wide + means
    if sizes.is_rounded:
        changes += [+hidden, +gradients * sizes.element_bytes]
        left += wide + weight
    return course(*changes, -left - used)


def _is_composed(model: ModelConfig, sizes: Sizes) -> bool:
    """Returns whether the norm is composed of torch operators (model/norm.py), not one kernel."""
    return sizes.device == "cpu" and model.norm_impl == "torch" and model.normalization == "RMSNorm"


STATISTICS = {"LayerNorm": _layer_norm_statistics, "RMSNorm": _rms_norm_statistics}
