"""The workspace of the MLP's activation (model/activations.py). Standard library only."""

from __future__ import annotations

from megatron_lite.config.model import ModelConfig
from megatron_lite.description.operations import Workspace, course
from megatron_lite.description.sizes import Sizes


def activation_workspace(
    model: ModelConfig, sizes: Sizes, *, intermediate: int, output: int
) -> Workspace:
    """Returns the workspace of the activation.

    intermediate: the bytes of the output of linear_fc1, which the activation keeps.
    output: the bytes of the result.
    """
    workspace = WORKSPACES.get(model.activation, _without_temporaries)
    return workspace(model, sizes, intermediate, output)


def _gelu(model: ModelConfig, sizes: Sizes, intermediate: int, output: int) -> Workspace:
    backward = course(+intermediate, -output - intermediate)
    if sizes.device != "cpu" or not model.bias_gelu_fusion:
        return Workspace(course(+output), backward)
    # tanh_gelu computes in float32: a 16-bit input and the result are cast.
    wide = output // sizes.element_bytes * sizes.accumulate_bytes if sizes.is_rounded else 0
    return Workspace(course(+wide, +wide, +output, -2 * wide), backward)


def _swiglu(model: ModelConfig, sizes: Sizes, intermediate: int, output: int) -> Workspace:
    # Backward computes silu(gate), then the gradients of silu's output and of its input.
    return Workspace(
        course(+output),
        course(
            +intermediate, +output, -output, +output, +output, -2 * output, -output - intermediate
        ),
    )


def _without_temporaries(
    model: ModelConfig, sizes: Sizes, intermediate: int, output: int
) -> Workspace:
    return Workspace(course(+output), course(+intermediate, -output - intermediate))


# The activations that allocate more than their result and its gradient.
WORKSPACES = {"gelu": _gelu, "swiglu": _swiglu}
