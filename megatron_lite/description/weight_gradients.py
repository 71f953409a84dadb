"""The course of parameters' gradients from the backward that computes them to the rank's sums.

                            computed          then
    matmul, float32 run     -                 (the matmul adds it to the float32 sum)
    matmul, 16-bit run      16 bits, some     added to the float32 sum, and freed
                            rows at a time
    lookup, on a CPU        -                 (each token's row is added to the float32 sum)
    other, float32 run      float32           added to the float32 sum, and freed
    other, 16-bit run       16 bits           cast to float32, added to the float32 sum, and freed

Standard library only.
"""

from __future__ import annotations

from megatron_lite.config.row_blocks import product_rows
from megatron_lite.description.operations import Course, Parameter, course
from megatron_lite.description.sizes import Sizes


def gradient_bytes(parameters: tuple[Parameter, ...], sizes: Sizes) -> int:
    """Returns the bytes of the gradients of parameters, which have the parameters' dtype."""
    return sum(parameter.num_elements for parameter in parameters) * sizes.element_bytes


def apart(parameters: tuple[Parameter, ...], sizes: Sizes) -> tuple[Parameter, ...]:
    """Returns the parameters of a linear layer whose gradients autograd gets."""
    if not sizes.adds_by_itself:
        return parameters
    return tuple(one for one in parameters if len(one.shape) == 1)


def weight_product(weight: Parameter, sizes: Sizes) -> Course:
    """Returns the course of the product that computes a weight's gradient.

    It ends with the gradient, if autograd gets it.
    """
    if adds_rounded(sizes):
        return rounded_product(weight, sizes, adds=sizes.accumulates)
    return course(+gradient_bytes(apart((weight,), sizes), sizes))


def adds_rounded(sizes: Sizes) -> bool:
    """Whether a layer's backward adds 16-bit gradients to the float32 sum by itself."""
    return sizes.adds_by_itself and sizes.is_rounded


def rounded_product(weight: Parameter, sizes: Sizes, *, adds: bool) -> Course:
    """Returns the course of a 16-bit product that goes into a float32 sum and is freed.

    The product has parts, which follow one another in the same memory.
    adds: whether it is added. If not, it overwrites the sum.
    """
    outputs, inputs = weight.shape
    part = weight._replace(shape=(min(outputs, product_rows(inputs)), inputs))
    return course(+gradient_bytes((part,), sizes), added_rounded(part, sizes, adds=adds))


def added_rounded(weight: Parameter, sizes: Sizes, *, adds: bool) -> Course:
    """Returns the course of such a gradient until it is freed.

    On a CPU an addition of two dtypes casts its second operand. A copy does not.
    """
    casts = adds and sizes.inside_operators and sizes.device == "cpu"
    wide = weight.num_elements * sizes.accumulate_bytes if casts else 0
    return course(+wide, -wide, -gradient_bytes((weight,), sizes))


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
