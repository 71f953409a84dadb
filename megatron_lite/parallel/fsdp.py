"""Weights over data-parallel ranks with torch's FSDP2: which modules of a model are gathered together, and when.

    a unit     rank i holds the i-th rows of each parameter. The rows of all ranks are gathered before the unit's forward, freed
               after it, gathered again for its backward, and freed when its gradients have been reduced to rows
    units      by default each layer, and the root: all the rest, which is whole from the start of forward to the end of backward
    memory-efficient wrapping (after torchtune): token embedding and output projection, the largest parts of the root, are units
               too, and whole only while they are used; one unit if they are one tied weight, freed between its two uses

For a model's plain parameters, tensor-parallel or not. FSDP2 knows nothing of tensor parallelism: what torch sums over such
parameters, as torch.nn.utils.clip_grad_norm_ does, is a part of the sum. optim/fsdp.py updates the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from megatron_lite.parallel.parameter_spec import ParameterSpec, mark
from megatron_lite.parallel.weights import GATHERED_DTYPE, READER, STAND_INS


@dataclass(frozen=True, kw_only=True)
class Wrapping:
    """Which modules are units, by their names in the model. layers: a list of modules.

    embedding, output: given, they are units of their own. The embedding is a lookup, whose backward needs no weight. An output
    that has the embedding's weight, or None, for a model that reads it with `weight_of(embedding)`: one unit with the embedding.
    reshard_after_forward: free a layer's weights after its forward, and gather them again for its backward.
    """

    layers: str
    embedding: str | None = None
    output: str | None = None
    reshard_after_forward: bool = True


def fully_shard_(model: nn.Module, mesh: DeviceMesh, wrapping: Wrapping, *, compute_dtype: torch.dtype | None = None,
                 reduce_dtype: torch.dtype | None = None, forward_methods: Sequence[str] = ()) -> None:
    """Leaves each rank of the 1-D `mesh` 1/d of every parameter, as DTensors. Gradients are summed over the mesh, not averaged.

    compute_dtype: of the gathered weights; the rows are then float32. reduce_dtype: in which gradients are sent.
    forward_methods: the model's, besides `forward`, that run it.
    ValueError, before anything is changed: a name that is no module of the model, layers that are no list of modules.
    """
    layers = _layers(model, wrapping.layers)
    embedding, output = _module(model, wrapping.embedding), _module(model, wrapping.output)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    unit = partial(_unit, mesh=mesh, mp_policy=policy, row_dtype=None if compute_dtype is None else torch.float32)
    for layer in layers:
        unit([layer], reshard_after_forward=wrapping.reshard_after_forward)
    if embedding is not None and output is None:
        unit([embedding], reshard_after_forward=True).set_unshard_in_backward(False)
        embedding.__dict__[READER] = partial(_read_for_output, embedding)
    elif embedding is not None and output is not None and _share(embedding, output):
        _free_between_uses(unit([embedding, output], reshard_after_forward=True), embedding, output)
    else:
        if embedding is not None:
            unit([embedding], reshard_after_forward=True).set_unshard_in_backward(False)
        if output is not None:
            unit([output], reshard_after_forward=False)  # backward begins with it
    unit([model], reshard_after_forward=None)
    model.register_forward_hook(_reshard_unless_backward_follows)
    for name in forward_methods:
        setattr(model, name, partial(_call_without_view, getattr(model, name)))
        register_fsdp_forward_method(model, name)
        setattr(model, name, partial(_call_and_reshard, model, getattr(model, name)))


def _unit(modules: list[nn.Module], *, mesh: DeviceMesh, mp_policy: MixedPrecisionPolicy, row_dtype: torch.dtype | None,
          reshard_after_forward: bool | None) -> FSDPModule:
    """Parameters' marks go over to their rows."""
    before = _whole_parameters(modules)
    for parameter in before.values():
        if row_dtype is not None:
            parameter.data = parameter.data.to(row_dtype)
    specs = {place: getattr(parameter, "parameter_spec", None) for place, parameter in before.items()}
    for module in modules:
        module.register_forward_hook(_without_view)
    fully_shard(modules[0] if len(modules) == 1 else modules, mesh=mesh, mp_policy=mp_policy,
                reshard_after_forward=reshard_after_forward)
    for (number, name), spec in specs.items():
        rows = modules[number].get_parameter(name)
        setattr(rows, GATHERED_DTYPE, mp_policy.param_dtype or rows.dtype)
        if isinstance(spec, ParameterSpec):
            mark(rows, spec)
    unit = modules[0]
    assert isinstance(unit, FSDPModule)
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)  # a factor alone would become an operation that gloo does not have
    unit.__dict__[STAND_INS] = _StandIns(modules)
    return unit


def _call_without_view(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _without_view(method(*args, **kwargs))


def _call_and_reshard(model: nn.Module, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = method(*args, **kwargs)
    _reshard_unless_backward_follows(model)
    return result


def _reshard_unless_backward_follows(model: nn.Module, *_: Any) -> None:
    """FSDP2 leaves the root whole, for a backward that would free it; until then its parameters would not be the rows."""
    if not torch.is_grad_enabled():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _without_view(*forward: Any) -> Any:
    """The output, which comes last, as no view: FSDP2 warns of its hook on a view, which what writes to the view would lose."""
    output = forward[-1]
    return output.clone() if isinstance(output, Tensor) and output.requires_grad and output._base is not None else output


class _StandIns:
    """The gathered parameters of a unit, for which it is gathered once."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self._found: list[Tensor] | None = None

    def __call__(self) -> list[Tensor]:
        if self._found is None:
            unit = self._modules[0]
            assert isinstance(unit, FSDPModule)
            unit.unshard()
            self._found = list(_whole_parameters(self._modules).values())
            unit.reshard()
        return self._found


def _whole_parameters(modules: list[nn.Module]) -> dict[tuple[int, str], nn.Parameter]:
    """By the number of the module and the name in it: what is not sharded at the moment."""
    return {(number, name): parameter for number, module in enumerate(modules)
            for name, parameter in module.named_parameters() if not isinstance(parameter, DTensor)}


def _read_for_output(embedding: nn.Module) -> Tensor:
    """The tied weight, gathered; free again when backward has come through what is computed with it."""
    assert isinstance(embedding, FSDPModule)
    embedding.unshard()
    weight = embedding.weight
    assert isinstance(weight, Tensor)
    if not torch.is_grad_enabled():
        return weight
    used = weight.view_as(weight)
    used.register_hook(partial(_free, embedding))
    return used


def _free_between_uses(unit: FSDPModule, embedding: nn.Module, output: nn.Module) -> None:
    """FSDP2 would keep a unit of two modules whole from the first to the second."""

    def after_lookup(*_: object) -> None:
        unit.set_reshard_after_forward(True, recurse=False)
        unit.reshard()
        unit.set_reshard_after_forward(False, recurse=False)  # backward begins with the output

    embedding.register_forward_hook(after_lookup)
    output.register_full_backward_hook(partial(_free, unit))


def _free(unit: FSDPModule, *_: object) -> None:
    unit.reshard()


def _share(embedding: nn.Module, output: nn.Module) -> bool:
    return any(one is other for one in embedding.parameters() for other in output.parameters())


def _module(model: nn.Module, name: str | None) -> nn.Module | None:
    if name is None:
        return None
    try:
        return model.get_submodule(name)
    except AttributeError:
        known = [known for known, module in model.named_modules() if known and next(module.parameters(False), None) is not None]
        raise ValueError(f"the model has no module {name!r}; those with parameters of their own are {', '.join(known)}") from None


def _layers(model: nn.Module, name: str) -> list[nn.Module]:
    lists = {known: list(module.children()) for known, module in model.named_modules()
             if isinstance(module, (nn.ModuleList, nn.ModuleDict))}
    if name not in lists:
        raise ValueError(f"{name!r} is no list of modules in the model; its lists are {', '.join(lists) or 'none'}")
    return lists[name]


