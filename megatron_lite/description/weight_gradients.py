"""The course of parameters' gradients from the backward that computes them to the rank's sums.

                            computed          then
    matmul, float32 run     -                 (the matmul adds it to the float32 sum)
    matmul, 16-bit run      16 bits, some     added to the float32 sum, on a CPU a few rows at a
                            rows at a time    time, and freed
    lookup, on a CPU        -                 (each token's row is added to the float32 sum)
    other, float32 run      float32           added to the float32 sum, and freed
    other, 16-bit run       16 bits           cast to float32, added to the float32 sum, and freed

Standard library only.
"""

from __future__ import annotations

from megatron_lite.config.large_products import gradient_parts, is_large
from megatron_lite.config.row_blocks import product_rows, rows_at_a_time
from megatron_lite.description.operations import Course, Parameter, course
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.wide_workspace import inside_product


def gradient_bytes(parameters: tuple[Parameter, ...], sizes: Sizes) -> int:
    """Returns the bytes of the gradients of parameters, which have the parameters' dtype."""
    return sum(parameter.num_elements for parameter in parameters) * sizes.element_bytes


def apart(parameters: tuple[Parameter, ...], sizes: Sizes) -> tuple[Parameter, ...]:
    """Returns the parameters of a linear layer whose gradients autograd gets."""
    if not sizes.adds_by_itself:
        return parameters
    return tuple(one for one in parameters if len(one.shape) == 1)


def weight_product(weight: Parameter, sizes: Sizes, tokens: int | None = None) -> Course:
    """Returns the course of the product that computes a weight's gradient.

    It ends with the gradient, if autograd gets it. tokens: by default all of a micro-batch.
    """
    outputs, inputs = weight.shape
    tokens = sizes.tokens if tokens is None else tokens
    if adds_rounded(sizes):
        rows = min(outputs, product_rows(inputs, sizes.device))
        part = weight._replace(shape=(rows, inputs))  # the others follow in the same memory
        inside = inside_product(sizes, rows, inputs, tokens)
        return course(+gradient_bytes((part,), sizes), inside, added_rounded(part, sizes))
    own = gradient_bytes(apart((weight,), sizes), sizes)
    return course(
        +own,
        product_parts(sizes, tokens, outputs, inputs),
        inside_product(sizes, outputs, inputs, tokens),
    )


def chunk_product(weight: Parameter, sizes: Sizes, tokens: int) -> Course:
    """Returns the course of a product for some of the tokens, which is added to a float32 sum."""
    if adds_rounded(sizes):
        return weight_product(weight, sizes, tokens)
    return product_parts(sizes, tokens, *weight.shape)


def adds_rounded(sizes: Sizes) -> bool:
    """Whether a layer's backward adds 16-bit gradients to the float32 sum by itself."""
    return sizes.adds_by_itself and sizes.is_rounded


def added_rounded(weight: Parameter, sizes: Sizes) -> Course:
    """Returns the course of such a gradient until it is freed. On a CPU some rows are cast at a
    time."""
    outputs, inputs = weight.shape
    wide = widened_rows(outputs, inputs, sizes) if sizes.device == "cpu" else 0
    return course(+wide, -wide, -gradient_bytes((weight,), sizes))


def widened_rows(rows: int, width: int, sizes: Sizes) -> int:
    """Returns the bytes of the rows that are cast to float32 at a time, of so many rows."""
    if not sizes.is_rounded:
        return 0
    return min(rows, rows_at_a_time(width, sizes.device)) * width * sizes.accumulate_bytes


def product_parts(sizes: Sizes, tokens: int, outputs: int, inputs: int) -> Course:
    """Returns the course inside a product dy^T x of oneDNN, else nothing.

    dy: [tokens, outputs]. x: [tokens, inputs].
    """
    if not (sizes.onednn_linears and sizes.inside_operators and is_large(tokens, outputs, inputs)):
        return Course()
    parts = gradient_parts(tokens, outputs, inputs)
    return course(*parts, -sum(parts))


def added_up(parameters: tuple[Parameter, ...], sizes: Sizes) -> Course:
    """Returns the course of complete gradients, one after the other, until they are freed.

    Nothing happens if the gradients stay alive.
    """
    if not sizes.sums_gradients:
        return Course()
    return course(
        *(
            change
            for one in parameters
            for change in (cast(one, sizes), -one.num_elements * sizes.accumulate_bytes)
        )
    )


def cast(parameter: Parameter, sizes: Sizes) -> Course:
    """Returns the course of the cast of a complete gradient to the dtype of the sum."""
    if not sizes.is_rounded:
        return Course()
    wide = parameter.num_elements * sizes.accumulate_bytes
    return course(+wide, -parameter.num_elements * sizes.element_bytes)
