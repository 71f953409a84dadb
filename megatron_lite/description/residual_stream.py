"""The operations of a layer on its residual stream: norms, dropout and additions (model/layer.py).

The gradient of the residual stream is held while a branch runs backward. It grows by the gradient
of the branch's input when the branch ends. Standard library only.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.regions import DROPOUT, LAYERNORM
from megatron_lite.description.dropout_workspace import drawn_mask, dropout_forward, masked
from megatron_lite.description.norm_statistics import (
    norm_backward,
    norm_forward,
    norm_keeps,
    norm_parameters,
    residual_norm_backward,
    residual_norm_forward,
    residual_norm_keeps,
)
from megatron_lite.description.operations import (
    Course,
    KeptTensor,
    Moved,
    Operation,
    RegionEntry,
    Workspace,
    course,
    rng_state,
)
from megatron_lite.description.sizes import (
    Sizes,
    is_widened,
    residual_bytes,
    residual_element_bytes,
)
from megatron_lite.description.weight_gradients import added_up

ATTENTION_DROPOUT, MLP_DROPOUT = "attention dropout", "mlp dropout"


def norm_before(
    name: str,
    residual: KeptTensor,
    output: str,
    statistics: str,
    *,
    model: ModelConfig,
    sizes: Sizes,
    ends_branch: bool = True,
) -> Operation:
    """Returns the norm at the beginning of a branch.

    ends_branch: whether the gradient of the norm's input is added to that of the residual stream.
        With a parallel residual the gradient that comes from the MLP waits until attention's branch
        has read the gradient of the layer's output.
    """
    vectors = norm_parameters(model, model.hidden_size, partial=sizes.sequence_parallel)
    backward = course(residual_norm_backward(model, sizes), added_up(vectors, sizes))
    operation = Operation(
        name,
        name,
        (residual, *residual_norm_keeps(statistics, model, sizes)),
        (LAYERNORM,),
        (RegionEntry(LAYERNORM, (residual,), (output,)),),
        parameters=vectors,
        # Backward reads dy and x, writes dx, and adds dx to the gradient of the residual.
        moved=Moved(2 * residual.num_bytes, 6 * residual.num_bytes),
        workspace=Workspace(residual_norm_forward(model, sizes), backward),
    )
    if not ends_branch:
        return operation
    return reads_residual(operation, residual.num_bytes, frees=residual.num_bytes)


def norm_after(
    name: str, linear: str, *, model: ModelConfig, sizes: Sizes, regions: tuple[str, ...] = ()
) -> Operation:
    """Returns the norm at the end of a branch. It keeps the output of the branch's last matmul.

    linear: the name of that row-parallel linear layer.
    """
    shape = model, sizes, sizes.local_tokens, model.hidden_size
    vectors = norm_parameters(model, model.hidden_size, partial=sizes.sequence_parallel)
    hidden = sizes.local_tokens * model.hidden_size * sizes.element_bytes
    # Several ranks add the bias to the sum, which gives a tensor of its own.
    biased = model.add_bias_linear and sizes.tp_size > 1
    branch = KeptTensor(f"{linear} output{' with its bias' if biased else ''}", hidden, True)
    # Without dropout the gradient of the norm's output is that of the residual stream.
    frees_gradient = model.hidden_dropout > 0.0
    return Operation(
        name,
        name,
        (branch, *norm_keeps(name, *shape)),
        regions,
        parameters=vectors,
        moved=Moved(2 * hidden, 3 * hidden),
        workspace=Workspace(
            norm_forward(*shape),
            course(
                norm_backward(*shape, frees_gradient=frees_gradient),
                added_up(vectors, sizes),
                -hidden,
            ),
        ),
    )


def reads_residual(operation: Operation, hidden: int, *, frees: int = 0) -> Operation:
    """Returns the first operation of a branch, which reads the residual stream, `hidden` bytes.

    frees: the bytes that are freed afterwards and that the operation's workspace leaves out.

    Autograd adds the gradient of the operation's input to that of the residual stream, in place.
    The caller of a replay holds the gradient of the residual stream, so there the sum is a tensor
    of its own.
    """
    forward, backward = operation.workspace.forward, operation.workspace.backward
    return operation._replace(
        workspace=Workspace(forward, course(backward, -hidden - frees)),
        replayed=Workspace(forward, course(backward, +hidden, -hidden - frees)),
    )


def add_branch(name: str, *, model: ModelConfig, sizes: Sizes) -> Operation:
    """Returns the dropout of a branch and its addition to the residual.

    It keeps a mask of one byte per element, unless the probability is 0. The branch is freed. The
    residual is kept by the operation that reads it. With a parallel residual nothing keeps the sum
    of the residual and attention, so that sum is freed when the MLP's branch is added.
    """
    added = residual_bytes(model, sizes)
    branch = sizes.local_tokens * model.hidden_size * sizes.element_bytes
    widened = is_widened(model, sizes)
    # In backward the gradient that came from the MLP is another tensor than that of the output.
    apart = added if model.parallel_residual and name == ATTENTION_DROPOUT else 0
    sum_freed = added if model.parallel_residual and name == MLP_DROPOUT else 0
    # A replay that leaves the addition out returns one element. The branch is freed: one element
    # too, or with a norm the whole of it.
    element = residual_element_bytes(model, sizes)
    replay_freed = sum_freed + (branch if model.norms_after else sizes.element_bytes) - element
    if not model.hidden_dropout:
        # The gradient of the sum is the gradient of both terms. A 16-bit branch gets a cast of it.
        backward = course(+branch, -apart) if widened else Course()
        return Operation(
            name,
            "",
            regions=(DROPOUT,),
            moved=Moved(2 * added + branch, added + branch if widened else 0),
            workspace=Workspace(course(+added, -branch - sum_freed), backward),
            replayed=Workspace(course(-replay_freed), backward),
        )
    mask = KeptTensor(f"{name} mask", sizes.local_tokens * model.hidden_size, True)
    state = rng_state(f"RNG state of the {mask.name}", sizes.stream_state_bytes)
    wide = replace(sizes, element_bytes=element)
    copy = added if widened else 0
    workspace = Workspace(
        course(+copy, dropout_forward(mask.num_bytes, added, sizes), -copy, -branch - sum_freed),
        course(
            masked(added, sizes), *((+branch, -added) if widened else ()), -mask.num_bytes - apart
        ),
    )
    return Operation(
        name,
        "",
        (mask,),
        (DROPOUT,),
        (RegionEntry(DROPOUT, (state,)),),
        moved=Moved(5 * added + mask.num_bytes, 2 * added + mask.num_bytes),
        workspace=workspace,
        replayed=Workspace(
            course(drawn_mask(mask.num_bytes, wide), -replay_freed), workspace.backward
        ),
    )
