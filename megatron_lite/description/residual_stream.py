"""The operations of a layer on its residual stream: norms, dropout and additions (model/layer.py).

The gradient of the residual stream is held while a branch runs backward. It grows by the gradient
of the branch's input when the branch ends. Standard library only.
"""

from __future__ import annotations

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.regions import DROPOUT, LAYERNORM
from megatron_lite.description.norm_statistics import (
    norm_keeps,
    norm_parameters,
    residual_norm_keeps,
)
from megatron_lite.description.operations import (
    KeptTensor,
    Moved,
    Operation,
    RegionEntry,
    rng_state,
)
from megatron_lite.description.sizes import Sizes, is_widened, residual_bytes

ATTENTION_DROPOUT, MLP_DROPOUT = "attention dropout", "mlp dropout"


def norm_before(
    name: str,
    residual: KeptTensor,
    output: str,
    statistics: str,
    *,
    model: ModelConfig,
    sizes: Sizes,
) -> Operation:
    """Returns the norm at the beginning of a branch."""
    return Operation(
        name,
        name,
        (residual, *residual_norm_keeps(statistics, model, sizes)),
        (LAYERNORM,),
        (RegionEntry(LAYERNORM, (residual,), (output,)),),
        parameters=norm_parameters(model, model.hidden_size, partial=sizes.sequence_parallel),
        # Backward reads dy and x, writes dx, and adds dx to the gradient of the residual.
        moved=Moved(2 * residual.num_bytes, 6 * residual.num_bytes),
    )


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
    return Operation(
        name,
        name,
        (branch, *norm_keeps(name, *shape)),
        regions,
        parameters=vectors,
        moved=Moved(2 * hidden, 3 * hidden),
    )


def add_branch(name: str, *, model: ModelConfig, sizes: Sizes) -> Operation:
    """Returns the dropout of a branch and its addition to the residual.

    It keeps a mask of one byte per element, unless the probability is 0.
    """
    added = residual_bytes(model, sizes)
    branch = sizes.local_tokens * model.hidden_size * sizes.element_bytes
    if not model.hidden_dropout:
        # The gradient of the sum is the gradient of both terms. A 16-bit branch gets a cast of it.
        cast = added + branch if is_widened(model, sizes) else 0
        return Operation(name, "", regions=(DROPOUT,), moved=Moved(2 * added + branch, cast))
    mask = KeptTensor(f"{name} mask", sizes.local_tokens * model.hidden_size, True)
    state = rng_state(f"RNG state of the {mask.name}", sizes.stream_state_bytes)
    return Operation(
        name,
        "",
        (mask,),
        (DROPOUT,),
        (RegionEntry(DROPOUT, (state,)),),
        moved=Moved(5 * added + mask.num_bytes, 2 * added + mask.num_bytes),
    )
