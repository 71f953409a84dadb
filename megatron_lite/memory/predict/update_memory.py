"""The memory that the end of a step needs besides the states: after the last backward.

    AdamW                          none: it updates in place
    Muon                           temporaries of the largest matrix (optim/muon_update.py)
    --grad-reduce-in-bf16          a bfloat16 copy of the gradients
    --use-distributed-optimizer    over gloo: a copy of what is reduced, then one of the weights

Standard library only.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from megatron_lite.config.optimizer_settings import FLOAT32, MUON
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.transformer_layer import describe_layer
from megatron_lite.memory.predict.states import RankStates

BFLOAT16 = 2


class UpdateMemory(NamedTuple):
    """The most bytes besides the states, and what needs them.

    is_exact: whether it is to the byte. Otherwise it depends on where pieces of matrices end.
    """

    where: str
    num_bytes: int
    is_exact: bool


def update_memory(
    config: RunConfig, stage: Stage, states: RankStates, *, dp_cp_size: int, device: str
) -> UpdateMemory:
    """Returns the memory of the end of a step. stage: one of the rank's stages."""
    found = [UpdateMemory("update", 0, True)]
    sharding = config.data_parallel
    in_bf16 = sharding.grad_reduce_in_bf16
    sent = states.gradients // FLOAT32 * BFLOAT16 if in_bf16 else states.gradients
    if dp_cp_size > 1 and not sharding.use_torch_fsdp2:
        copied = sharding.use_distributed_optimizer and device == "cpu"
        reduced = sent * in_bf16 + sent * copied
        name = "reduction of gradients" + " in bfloat16" * in_bf16
        found.append(UpdateMemory(name, reduced, True))
        found.append(UpdateMemory("gather of weights", states.weights * copied, True))
    if config.optimizer.optimizer == MUON:
        most = _muon(config, stage, dp_cp_size)
        found.append(UpdateMemory("update of a matrix", most, False))
    return max(found, key=lambda one: one.num_bytes)


def _muon(config: RunConfig, stage: Stage, dp_cp_size: int) -> int:
    """Returns the bytes of Muon's temporaries for the largest matrix, as one part.

    They are the iterates in bfloat16, and the result, first unscaled and then scaled, in float32.
    """
    sizes, optimizer = Sizes.of(config, device="cpu", stage=stage), config.optimizer
    layer = describe_layer(config.model, sizes, stage.first_layer)
    parameters = [one for operation in layer.operations for one in operation.parameters]
    rows, columns = max((one.shape for one in parameters if len(one.shape) == 2), key=math.prod)
    elements, whole = rows * columns, FLOAT32 * rows * columns
    if optimizer.muon_fp32_matmul_prec == "medium":
        iterates = 2 * BFLOAT16 * elements
    else:
        iterates = 2 * FLOAT32 * min(rows, columns) ** 2
    if optimizer.muon_tp_mode == "duplicated":
        iterates += 3 * BFLOAT16 * elements * (sizes.tp_size - 1)
    direction = whole if optimizer.muon_nesterov else 0
    alone = iterates + 2 * whole + direction
    sharding = config.data_parallel
    if dp_cp_size == 1 or not (sharding.use_distributed_optimizer or sharding.use_torch_fsdp2):
        return alone
    # The direction is gathered: padded, as a part for every rank, and joined.
    part = whole // dp_cp_size if sharding.use_torch_fsdp2 else whole
    return max(part + dp_cp_size * part + whole + direction, alone + whole)
