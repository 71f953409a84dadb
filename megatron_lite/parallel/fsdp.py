"""Shards weights over data-parallel ranks with torch's FSDP2.

This module decides which modules of a model are gathered together, and when.

    a unit    Rank i holds the i-th rows of each parameter. The rows of all ranks are gathered
              before the unit's forward and freed after it. They are gathered again for its
              backward, and freed when its gradients have been reduced to rows.
    units     By default each layer is a unit, and the root holds the rest. The root is whole from
              the start of forward to the end of backward.

Memory-efficient wrapping (after torchtune) makes the token embedding and the output projection, the
largest parts of the root, units too. They are whole only while they are used.

Two collectives of FSDP2 are replaced to bound the memory that a unit holds meanwhile:

    gather     FSDP2 gathers a unit into one buffer and copies the parameters out of it. Here the
               gather has ended before the copy.
    reduce     FSDP2 copies a unit's gradients into one buffer, often in a wider dtype, and reduces
               that buffer. Here the gradients that have been copied are freed first. torch's
               `foreach_reduce` is meant to free them, but its loop variable still holds the last
               one (seen in torch 2.13). In a unit of one large parameter, a token embedding, the
               last one is all of them: a bf16 [V, h] beside the float32 one.

The model has plain parameters, tensor-parallel or not. FSDP2 does not know tensor parallelism. A
sum of torch over such parameters, as in torch.nn.utils.clip_grad_norm_, covers only one TP rank's
part. optim/layouts.py updates the rows.
"""

import sys
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_lite.config.parallel import DataParallelConfig

from .collectives import start_all_gather_into_, start_reduce_scatter_into_
from .compiled import Pair, applied
from .parameter_spec import mark, spec_of
from .torch_internals import address_of, base_of, num_users_of_storage, num_users_of_tensor
from .weights import GATHERED_DTYPE, READER, STAND_INS


def fully_shard_(model: Any, mesh: DeviceMesh, config: DataParallelConfig) -> None:
    """Shards every parameter of a GPTModel over the d ranks of the last axis of the mesh.

    Each rank keeps 1/d of every parameter, as DTensors. Gradients are summed over the mesh, not
    averaged. If the mesh has two axes, rows are summed over the first one too.

    Each layer is a unit. With memory-efficient wrapping the token embedding is one, whose backward
    needs no weight, since it is a lookup; and so is the output projection. A model without it reads
    the tied weight with `weight_of`.
    The gathered weights have the dtype of the model. If it has 16 bits, the rows are float32.
    """
    dtype, output = model.context.params_dtype, model.output_layer
    rounded = dtype in (torch.bfloat16, torch.float16)
    reduce_dtype = torch.float32 if rounded else None
    if config.grad_reduce_in_bf16:
        reduce_dtype = torch.bfloat16
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if rounded else None, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    unit = partial(_unit, mesh=mesh, mp_policy=policy)
    # The root comes last: fully_shard gives a module the parameters that no unit inside it has.
    for layer in model.decoder.layers:
        unit(layer, reshard_after_forward=config.torch_fsdp2_reshard_after_forward)
    own_units = config.fsdp_memory_efficient_wrapping
    if own_units and model.embedding is not None:
        embedding = model.embedding.word_embeddings
        unit(embedding, reshard_after_forward=True).set_unshard_in_backward(False)
        if output is None:
            embedding.__dict__[READER] = partial(_read_for_output, embedding)
    if own_units and output is not None:
        unit(output, reshard_after_forward=False)  # backward begins with it
    unit(model, reshard_after_forward=None)
    model.register_forward_hook(_reshard_unless_backward_follows)


def _unit(
    module: Any,
    *,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    reshard_after_forward: bool | None,
) -> FSDPModule:
    """Makes `module` one FSDP2 unit. Each sharded parameter gets its parameter's spec."""
    # fully_shard makes the rows in the parameters' dtype, and replaces the parameter objects. The
    # dtype is therefore set before it, and the specs are attached again after it.
    before = _whole_parameters(module)
    if mp_policy.param_dtype is not None:
        for parameter in before.values():
            parameter.data = parameter.data.float()
    # This hook runs before FSDP2's, because it is registered first: FSDP2 sees no view.
    module.register_forward_hook(_without_view)
    fully_shard(module, mesh=mesh, mp_policy=mp_policy, reshard_after_forward=reshard_after_forward)
    for name, parameter in before.items():
        rows = module.get_parameter(name)
        setattr(rows, GATHERED_DTYPE, mp_policy.param_dtype or rows.dtype)
        mark(rows, spec_of(parameter))
    module.set_gradient_divide_factor(1.0)
    # A divide factor alone would become a reduce operation that gloo does not have.
    module.set_force_sum_reduction_for_comms(True)
    found: list[Tensor] = []

    def stand_ins() -> list[Tensor]:
        """Returns the gathered parameters. FSDP2 uses the same tensors in every step."""
        if not found:  # gathers the unit to find them
            module.unshard()
            found.extend(_whole_parameters(module).values())
            module.reshard()
        return found

    module.__dict__[STAND_INS] = stand_ins
    gradients = UnitGradients()
    if hasattr(module, "set_custom_all_gather"):  # older releases of torch keep their collectives
        module.set_custom_all_gather(_GatherWeights())
        module.set_custom_reduce_scatter(gradients)
    # FSDP2 puts its pre-forward hook first, so the parameters are gathered when this hook runs.
    module.register_forward_pre_hook(
        lambda *_: gradients.record(_whole_parameters(module).values())
    )
    return module


def _reshard_unless_backward_follows(model: nn.Module, *_: Any) -> None:
    """Frees the gathered weights after a forward without gradients.

    FSDP2 leaves the root whole, since it expects a backward that frees it. Without a backward the
    model's parameters would stay the whole weights instead of the rows.
    """
    if not torch.is_grad_enabled():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _without_view(*forward: Any) -> Any:
    """Returns the module's output (the last argument), cloned if it is a view.

    FSDP2 registers a backward hook on the output. An in-place write to a view would drop that hook,
    and FSDP2 warns.
    """
    output = forward[-1]
    return output.clone() if output.requires_grad and base_of(output) is not None else output


def _whole_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that are not sharded at the moment, by name."""
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if not isinstance(parameter, DTensor)
    }


def _read_for_output(embedding: Any) -> Tensor:
    """Returns the tied weight, gathered. Backward frees it after the operations that used it."""
    embedding.unshard()
    weight: Tensor = embedding.weight
    if not torch.is_grad_enabled():
        return weight

    def freed(grad: Tensor) -> Tensor:
        embedding.reshard()
        return grad

    # A view would hold this gradient, so that the engine could not add the lookup's in place.
    used: Tensor = applied(Pair(lambda same: same, freed, slice(0)), weight)
    return used


class _GatherWeights:
    """FSDP2's AllGather. It ignores async_op: it is finished when it returns.

    On a GPU it runs on the stream that FSDP2 has chosen.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a new buffer, as FSDP2's own collectives allocate it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> None:
        start_all_gather_into_(output_tensor, input_tensor, group).wait()


# The Python references to a gradient that only torch's loop variable holds. They are the loop
# variable, the local variable in `free_`, and the argument of getrefcount.
FREE_TO_DROP = 3


class UnitGradients(_GatherWeights):
    """The gradients of a unit's gathered parameters, from their accumulation to their reduction.

    It is FSDP2's ReduceScatter for sums, and frees the copied gradients first. It holds weak
    references, so it keeps no gradient alive.
    """

    def __init__(self) -> None:
        self._recorded = WeakTensorKeyDictionary()
        self._gradients: list[weakref.ref[Tensor]] = []

    def record(self, parameters: Iterable[Tensor]) -> None:
        """Records each gradient that these gathered parameters get from now on.

        Repeated calls change nothing.
        """
        for parameter in parameters:
            if parameter not in self._recorded and parameter.requires_grad:
                self._recorded[parameter] = True
                parameter.register_post_accumulate_grad_hook(self._note)

    def free_(self) -> None:
        """Frees the memory of the recorded gradients that are still alive and have no other reader.

        A gradient stays unchanged if Python or autograd holds a further reference to it, or if
        another tensor shares its storage.
        """
        noted, self._gradients = self._gradients, []
        for reference in noted:
            gradient = reference()
            if (
                gradient is not None
                and sys.getrefcount(gradient) <= FREE_TO_DROP
                and _owns_storage_alone(gradient)
            ):
                gradient.untyped_storage().resize_(0)
            del gradient

    def _note(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._gradients.append(weakref.ref(parameter.grad))

    def __call__(  # type: ignore[override]
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert op == torch.distributed.ReduceOp.SUM, op
        self.free_()
        start_reduce_scatter_into_(output_tensor, input_tensor, group).wait()


def _owns_storage_alone(tensor: Tensor) -> bool:
    """Returns whether no other tensor, in Python or in autograd, shares the tensor's storage."""
    storage = tensor.untyped_storage()
    users = num_users_of_storage(address_of(storage))
    # Two users of the storage remain: the tensor and the local variable `storage`.
    return bool(num_users_of_tensor(tensor) == 1 and users <= 2)
