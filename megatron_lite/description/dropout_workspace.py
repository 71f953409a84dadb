"""The course of a dropout's memory (model/dropout.py). Standard library only."""

from __future__ import annotations

from megatron_lite.description.operations import Course, course
from megatron_lite.description.sizes import Sizes


def dropout_forward(elements: int, output: int, sizes: Sizes) -> Course:
    """Returns the course of a dropout's forward. It ends with the output and the mask.

    elements: the number of elements, and so the bytes of the mask. output: its bytes.
    """
    if sizes.device != "cpu":
        return course(+output + elements)
    # Each 64-bit draw gives the numbers of four elements.
    numbers = 8 * -(-elements // 4)
    return course(+numbers, +elements, -numbers, masked(output, sizes))


def masked(output: int, sizes: Sizes) -> Course:
    """Returns the course of the product with a mask and the scale. It ends with the result.

    torch's operator for a CPU multiplies by the one and then by the other.
    """
    product = output if sizes.device == "cpu" and sizes.inside_operators else 0
    return course(+product, +output, -product)


def drawn_mask(elements: int, sizes: Sizes) -> Course:
    """Returns the course of a second draw of a dropout's mask. It ends with the mask."""
    if sizes.device != "cpu":
        whole = elements * sizes.element_bytes  # the kernel drops out a tensor of no meaning
        return course(+whole, +whole + elements, -2 * whole)
    numbers = 8 * -(-elements // 4)
    return course(+numbers, +elements, -numbers)
