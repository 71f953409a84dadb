"""The description of the sharded linear layers as operations.

It describes tensor_parallel/layers.py. With t > 1 they issue:

                          forward              backward
    column (qkv, fc1)     -                    all-reduce of dx
    row    (proj, fc2)    all-reduce           -
    under sequence parallelism
    column                all-gather of x      all-gather of x again, reduce-scatter of dx
    row                   reduce-scatter       all-gather of dy

Each collective moves a whole [s, b, h], or [s/c, b, h] under context parallelism. Standard library
only.
"""

from collections.abc import Iterator
from typing import Any

from megatron_lite.config.model import ACTIVATIONS
from megatron_lite.config.regions import ACTIVATION

from .operations import NOTHING_MOVED, KeptTensor, Matmul, Moved, Operation, OperatorCall, Parameter
from .sizes import Sizes


def column_linear(
    of: Sizes,
    name: str,
    module: str,
    matmul: str,
    output: str,
    *,
    width: int,
    bias: bool,
    skips_bias: bool = False,
    moved: Moved = NOTHING_MOVED,
    **others: Any,
) -> Operation:
    """Returns a linear layer whose weight is split by output features: [s', b, h] -> [s, b, width].

    s' is s/t under sequence parallelism, else s.

    width: the number of output features on one rank.
    output: the name of the result.
    skips_bias: whether the next kernel adds the bias, and sums its gradient.
    moved: the bytes that the kernels behind the matmul move.
    others: further fields of the operation.
    """
    result = KeptTensor(output, of.tokens * width * of.element_bytes)
    product = Matmul(matmul, of.tokens, width, of.channels)
    weight = Parameter("weight", (width, of.channels), is_matrix=True)
    return Operation(
        name,
        module,
        calls=(
            *(one.call(f"gathered input of {name}") for one in of.gathers),
            OperatorCall(_linear(bias and not skips_bias), (result,), (product,)),
        ),
        backward=of.gathers + of.reduces,
        runs_beside=True,
        parameters=(weight, *[Parameter("bias", (width,))] * bias),
        # The gradient of the bias is a sum over the gradient of the output.
        moved=moved + (0, result.num_bytes * (bias and not skips_bias)),
        temporary=of.column_temporary(result.num_bytes, weight),
        **others,
    )


def row_linear(
    of: Sizes,
    name: str,
    module: str,
    matmul: str,
    *,
    width: int,
    bias: bool,
    own_gradient: bool = False,
    output_is_read: bool = False,
    **others: Any,
) -> Operation:
    """Returns a linear layer whose weight is split by input features: [s, b, width] -> [s', b, h].

    s' is s/t under sequence parallelism, else s. With several ranks the bias is added after the
    collective that sums the ranks' partial results. A compiled kernel adds it with the branch.

    width: the number of input features on one rank.
    own_gradient: whether the gradient of its output is another tensor than that of the residual
        stream, also in a model that neither changes nor drops what a branch adds.
    output_is_read: whether an operation keeps the output, so that no replay can leave it out.
    """
    model = of.model
    product = (Matmul(matmul, of.tokens, model.hidden_size, width),)
    several, last = of.tp_size > 1, not output_is_read
    adds = bias and not (of.compiled and not model.changes_branches)
    # One rank adds the bias in the matmul (addmm). Several ranks add it after the sum, so that it
    # counts once: their matmul is an mm, and its partial result is a storage of its own.
    result = KeptTensor(f"{'partial ' * several}{name} output", of.whole)
    weight = Parameter("weight", (model.hidden_size, width), is_matrix=True)
    vector = Parameter("bias", (model.hidden_size,), of.sequence_parallel)
    inside = of.tokens * width * of.element_bytes + of.weight_gradient(weight)
    if of.gathers:
        inside = of.whole + max(inside, of.gloo_copy(of.whole))
    changes = model.changes_branches or model.hidden_dropout > 0.0 or of.widened
    return Operation(
        name,
        module,
        calls=(
            OperatorCall(_linear(adds and not several), (result,), product, output_only=last),
            *(one.call(f"{name} output", of.hidden, output_only=last) for one in of.reduces),
        ),
        backward=of.gathers,
        parameters=(weight, *[vector] * bias),
        moved=Moved(2 * of.hidden * several, of.hidden) if adds else NOTHING_MOVED,
        temporary=inside + (own_gradient or changes) * of.hidden,
        **others,
    )


def _linear(bias: bool) -> str:
    return "aten.addmm.default" if bias else "aten.mm.default"


def dense_mlp(
    of: Sizes,
    normed: KeptTensor,
    *,
    ffn_size: int,
    regions: tuple[str, ...],
    output_is_read: bool,
    name: str = "linear",
    module: str = "mlp",
    activation: str = ACTIVATION,
    enters: bool = True,
) -> Iterator[Operation]:
    """Yields an MLP (model/layer.py).

    normed: its input. name: how the names of its operations begin. activation: the region of its
    activation. enters: whether the last of the regions begins with it.
    """
    model = of.model
    prefix = "" if name == "linear" else f"{name} "
    fc2_width = ffn_size // of.tp_size
    fc1_width = model.fc1_blocks * fc2_width
    intermediate = KeptTensor(f"{prefix}fc1 output", of.tokens * fc1_width * of.element_bytes)
    activated = KeptTensor(f"{prefix}activation output", of.tokens * fc2_width * of.element_bytes)
    facts = ACTIVATIONS[model.activation]
    forward, backward = facts.fused if of.compiled else facts.moved
    yield column_linear(
        of,
        f"{name}_fc1",
        f"{module}.linear_fc1",
        f"{prefix}fc1",
        intermediate.name,
        width=fc1_width,
        bias=model.add_bias_linear,
        skips_bias=of.compiled,
        keeps=(normed,),
        regions=regions,
        enters=(normed,) * enters,
    )
    yield Operation(
        f"{prefix}activation",
        module,
        (intermediate,),
        (*regions, activation),
        (intermediate,),
        (activated.name,),
        moved=Moved(forward * activated.num_bytes, backward * activated.num_bytes),
        temporary=_activation_temporary(of, intermediate.num_bytes, activated.num_bytes),
    )
    yield row_linear(
        of,
        f"{name}_fc2",
        f"{module}.linear_fc2",
        f"{prefix}fc2",
        width=fc2_width,
        keeps=(activated,),
        regions=regions,
        bias=model.add_bias_linear,
        output_is_read=output_is_read,
    )


def _activation_temporary(of: Sizes, inside: int, output: int) -> int:
    """Returns the number of an MLP's activation. inside, output: the bytes of input and output."""
    if not of.compiled:
        return eager_activation(of, inside, output)
    # One kernel, which has no tensor inside. The compiler for a CPU keeps a sigmoid that two halves
    # of a result need, in float32.
    gated_on_cpu = of.model.fc1_blocks == 2 and of.device == "cpu"
    return inside + output + of.wide(output) * gated_on_cpu


def eager_activation(of: Sizes, inside: int, output: int) -> int:
    """Returns the number of an activation of torch's operators, from the bytes of its input and its
    output."""
    model = of.model
    # A CPU computes a GELU in float32: its 16-bit input and result are cast.
    cast = of.wide(output) * of.is_rounded * (of.device == "cpu")
    if model.fc1_blocks == 2:
        # backward holds the activated gate and two gradients of that size
        inside += 2 * output + cast * (model.activation == "geglu")
    elif model.activation == "gelu" and model.bias_gelu_fusion:
        inside = max(inside, 2 * cast)
    return inside + output
