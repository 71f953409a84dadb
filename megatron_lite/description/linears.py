"""The description of the sharded linear layers as operations.

It describes tensor_parallel/linear.py. With t > 1 they issue:

                          forward              backward
    column (qkv, fc1)     -                    all-reduce of dx
    row    (proj, fc2)    all-reduce           -
    under sequence parallelism
    column                all-gather of x      all-gather of x again, reduce-scatter of dx
    row                   reduce-scatter       all-gather of dy

Each collective moves a whole [s, b, h], or [s/c, b, h] under context parallelism. Standard library
only.
"""

from __future__ import annotations

from typing import Any

from megatron_lite.config.model import ModelConfig
from megatron_lite.description import temporaries
from megatron_lite.description.operations import (
    ALL_GATHER,
    ALL_REDUCE,
    NOTHING_MOVED,
    REDUCE_SCATTER,
    Collective,
    KeptTensor,
    Matmul,
    Moved,
    Operation,
    OperatorCall,
    Parameter,
)
from megatron_lite.description.sizes import Sizes

OPERATORS = {
    ALL_REDUCE: "_c10d_functional.all_reduce.default",
    ALL_GATHER: "_c10d_functional.all_gather_into_tensor.default",
    REDUCE_SCATTER: "_c10d_functional.reduce_scatter_tensor.default",
}


def column_linear(
    name: str,
    module: str,
    matmul: str,
    output: str,
    *,
    width: int,
    bias: bool,
    model: ModelConfig,
    sizes: Sizes,
    moved: Moved = NOTHING_MOVED,
    **others: Any,
) -> Operation:
    """Returns a linear layer whose weight is split by output features: [s', b, h] -> [s, b, width].

    s' is s/t under sequence parallelism, else s.

    width: the number of output features on one rank.
    output: the name of the result.
    moved: the bytes that the kernels around the matmul move.
    others: further fields of the operation.
    """
    result = KeptTensor(output, sizes.tokens * width * sizes.element_bytes)
    product = Matmul(matmul, sizes.tokens, width, model.hidden_size)
    calls: tuple[OperatorCall, ...] = (OperatorCall(_linear(bias), (result,), (product,)),)
    parameters = (
        Parameter("weight", (width, model.hidden_size)),
        *((Parameter("bias", (width,)),) if bias else ()),
    )
    if sizes.tp_size > 1 and sizes.sequence_parallel:
        gather = hidden_collective(ALL_GATHER, model, sizes)
        gathered = KeptTensor(f"gathered input of {name}", gather.num_bytes)
        calls = (OperatorCall(OPERATORS[ALL_GATHER], (gathered,), collectives=(gather,)), *calls)
    return Operation(
        name,
        module,
        calls=calls,
        backward=column_backward(model, sizes),
        beside=column_beside(sizes),
        parameters=parameters,
        # The gradient of the bias is a sum over the gradient of the output.
        moved=moved + ((0, result.num_bytes) if bias else (0, 0)),
        temporary=temporaries.column_linear(model, sizes, result.num_bytes, parameters[0]),
        **others,
    )


def row_linear(
    name: str,
    module: str,
    matmul: str,
    *,
    width: int,
    bias: bool,
    model: ModelConfig,
    sizes: Sizes,
    own_gradient: bool,
    output_is_read: bool = False,
    **others: Any,
) -> Operation:
    """Returns a linear layer whose weight is split by input features: [s, b, width] -> [s', b, h].

    s' is s/t under sequence parallelism, else s. With several ranks the bias is added after the
    collective that sums the ranks' partial results.

    width: the number of input features on one rank.
    own_gradient: see `temporaries.row_linear`.
    output_is_read: whether an operation keeps the output, so that no replay can leave it out.
    """
    hidden = sizes.tokens * model.hidden_size * sizes.element_bytes
    product = (Matmul(matmul, sizes.tokens, model.hidden_size, width),)
    # One rank adds the bias in the matmul (addmm). Several ranks add it after the sum, so that it
    # counts once: their matmul is an mm, and its partial result is a storage of its own.
    summed = KeptTensor(f"{name} output", hidden)
    calls: tuple[OperatorCall, ...] = (
        OperatorCall(_linear(bias), (summed,), product, output_only=True),
    )
    if sizes.tp_size > 1:
        (collective,) = row_forward(model, sizes)
        if sizes.sequence_parallel:
            summed = summed._replace(num_bytes=hidden // sizes.tp_size)
        calls = (
            OperatorCall(
                _linear(False),
                (KeptTensor(f"partial {name} output", hidden),),
                product,
                output_only=True,
            ),
            OperatorCall(
                OPERATORS[collective.kind], (summed,), collectives=(collective,), output_only=True
            ),
        )
    if output_is_read:
        calls = tuple(call._replace(output_only=False) for call in calls)
    parameters = (
        Parameter("weight", (model.hidden_size, width)),
        *((Parameter("bias", (model.hidden_size,), sizes.sequence_parallel),) if bias else ()),
    )
    return Operation(
        name,
        module,
        calls=calls,
        backward=row_backward(model, sizes),
        parameters=parameters,
        # One rank adds the bias in the matmul, and several add it to the sum.
        moved=Moved(
            2 * summed.num_bytes if bias and sizes.tp_size > 1 else 0,
            summed.num_bytes if bias else 0,
        ),
        temporary=temporaries.row_linear(
            model, sizes, width, parameters[0], own_gradient=own_gradient
        ),
        **others,
    )


def column_backward(model: ModelConfig, sizes: Sizes) -> tuple[Collective, ...]:
    """Returns the collectives of the backward of a column-parallel linear layer."""
    if sizes.tp_size == 1:
        return ()
    if not sizes.sequence_parallel:
        return (hidden_collective(ALL_REDUCE, model, sizes),)
    return hidden_collective(ALL_GATHER, model, sizes), hidden_collective(
        REDUCE_SCATTER, model, sizes
    )


def column_beside(sizes: Sizes) -> tuple[str, ...]:
    """Returns the gradient whose matmul runs beside each collective of `column_backward`."""
    if sizes.tp_size == 1:
        return ()
    return ("input", "weight") if sizes.sequence_parallel else ("weight",)


def row_forward(model: ModelConfig, sizes: Sizes) -> tuple[Collective, ...]:
    """Returns the collective that sums the partial [s, b, h] of the ranks in the forward."""
    if sizes.tp_size == 1:
        return ()
    return (
        hidden_collective(REDUCE_SCATTER if sizes.sequence_parallel else ALL_REDUCE, model, sizes),
    )


def row_backward(model: ModelConfig, sizes: Sizes) -> tuple[Collective, ...]:
    """Returns the collective of the backward of a row-parallel linear layer."""
    return (
        (hidden_collective(ALL_GATHER, model, sizes),)
        if sizes.tp_size > 1 and sizes.sequence_parallel
        else ()
    )


def hidden_collective(kind: str, model: ModelConfig, sizes: Sizes) -> Collective:
    """Returns a collective that moves a whole [s, b, h], or [s/c, b, h]."""
    return Collective(kind, sizes.tokens * model.hidden_size * sizes.element_bytes)


def _linear(bias: bool) -> str:
    return "aten.addmm.default" if bias else "aten.mm.default"
