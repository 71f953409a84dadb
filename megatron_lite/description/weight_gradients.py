"""The course of parameters' gradients from the backward that computes them to the rank's sums.

                            computed          then
    matmul, float32 run     -                 (the matmul adds it to the float32 sum)
    other, float32 run      float32           added to the float32 sum, and freed
    16-bit run              16 bits           cast to float32, added to the float32 sum, and freed

Standard library only.
"""

from __future__ import annotations

from megatron_lite.config.large_products import gradient_parts, is_large
from megatron_lite.description.operations import Course, Parameter, course
from megatron_lite.description.sizes import Sizes


def gradient_bytes(parameters: tuple[Parameter, ...], sizes: Sizes) -> int:
    """Returns the bytes of the gradients of parameters, which have the parameters' dtype."""
    return sum(parameter.num_elements for parameter in parameters) * sizes.element_bytes


def apart(parameters: tuple[Parameter, ...], sizes: Sizes) -> tuple[Parameter, ...]:
    """Returns the parameters of a linear layer whose gradients are tensors of their own."""
    if not sizes.adds_in_matmul:
        return parameters
    return tuple(one for one in parameters if len(one.shape) == 1)


def weight_product(weight: Parameter, sizes: Sizes) -> Course:
    """Returns the course of the product that computes a weight's gradient.

    It ends with the gradient, if that is a tensor of its own.
    """
    outputs, inputs = weight.shape
    own = gradient_bytes(apart((weight,), sizes), sizes)
    return course(+own, product_parts(sizes, sizes.tokens, outputs, inputs))


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
    if sizes.element_bytes == sizes.accumulate_bytes:
        return Course()
    wide = parameter.num_elements * sizes.accumulate_bytes
    return course(+wide, -parameter.num_elements * sizes.element_bytes)
