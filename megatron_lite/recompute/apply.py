"""Puts a recompute policy on the layers of any model, in place: the engine of this project for models that are not its own.

    apply_policy_(model, layers_fqn="transformer.h", policy="every-2:full")

The layers of a torch.nn.ModuleList or ModuleDict are counted in order. Each keeps its parameters and its name in the model; only
its `forward` is wrapped. Layers are called one by one by a model that is not ours, so a unit is one layer, and named regions,
which only our own layers have, are refused. Random numbers must come from torch's default generators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megatron_lite.config.checks import InputError
from megatron_lite.config.policy import parse_policy
from megatron_lite.parallel.rng import DEFAULT, RngSnapshot
from megatron_lite.parallel.weights import weights_in_use
from megatron_lite.recompute.checkpoint import checkpoint
from megatron_lite.recompute.offload import CudaLanes, Lanes, Offload
from megatron_lite.recompute.ops import KeptResults, find_operators, keep_results
from megatron_lite.recompute.plan import RecomputePlan, Segment
from megatron_lite.recompute.pool import Pool
from megatron_lite.recompute.schedule import segments
from megatron_lite.recompute.verify import Record


class DefaultGenerator:
    """torch's default generator of a device as the only stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def snapshot(self) -> RngSnapshot:
        """As it is."""
        state = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()
        return RngSnapshot(DEFAULT, {DEFAULT: state})

    def restore(self, snapshot: RngSnapshot) -> None:
        """Puts it back."""
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(snapshot.states[DEFAULT], self.device)
        else:
            torch.set_rng_state(snapshot.states[DEFAULT])


def apply_policy_(model: nn.Module, *, layers_fqn: str, policy: str, verify: bool = False) -> RecomputePlan:
    """Wraps the layers of `model.<layers_fqn>` and returns the plan that they follow. See config/policy.py for the language.

    With @host, what a layer keeps goes to host memory, but for what it is given besides its first argument: masks and the like.
    verify: compare each replay with its forward; RecomputeMismatch where they differ.
    ValueError, before anything is changed: no such module; one that is neither a ModuleList nor a ModuleDict; a policy that
    cannot be read, names regions, units of several layers, a split over ranks or operators that torch does not have; a model
    whose layers have a policy already.
    """
    layers = _layers(model, layers_fqn)
    plan = RecomputePlan(tuple(segments(parse_policy(policy), len(layers))), skip_tail=False, verify=verify)
    for segment in plan.segments:
        _check(segment, layers_fqn)
    if any(isinstance(layer.__dict__.get("forward"), _Wrapped) for layer in layers):
        raise ValueError(f"the layers of {layers_fqn} have a recompute policy already")
    host = _Host([segment.first_layer for segment in plan.segments if segment.on_host])
    for segment, layer in zip(plan.segments, layers, strict=True):
        if segment.unit or segment.ops or segment.on_host:
            layer.forward = _Wrapped(layer, f"{layers_fqn}.{segment.first_layer}", segment, host, verify=verify)
    return plan


class _Wrapped:
    """A layer's forward that keeps what its segment of the plan says."""

    def __init__(self, layer: nn.Module, name: str, segment: Segment, host: _Host, *, verify: bool) -> None:
        self._layer, self._forward, self._name, self._verify = layer, layer.forward, name, verify
        self._segment, self._host = segment, host
        update_wrapper(self, layer.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        device = given[0].device if given else torch.device("cpu")
        if not self._segment.on_host or not torch.is_grad_enabled():
            return self._run(device, *args, **kwargs)
        with self._host.opened(self._segment.first_layer, device, stay=[*weights_in_use(self._layer), *given[1:]]):
            return self._run(device, *args, **kwargs)

    def _run(self, device: torch.device, *args: Any, **kwargs: Any) -> Any:
        if not self._segment.unit and not self._segment.ops:
            return self._forward(*args, **kwargs)
        rng = DefaultGenerator(device)
        forward: Callable[..., Any] = partial(_call, self._forward, tuple(kwargs), len(args))
        if self._verify:
            forward = Record(self._name, rng, self._layer).watch(forward)
        if self._segment.ops:
            results = KeptResults(self._segment.ops, skip_tail=False)
            return keep_results(forward, *args, *kwargs.values(), results=results, rng=rng)
        return checkpoint(forward, *args, *kwargs.values(), rng=rng)


class _Host:
    """Where the layers of one model with @host put what they keep. layers: their numbers, in the order of their calls."""

    def __init__(self, layers: list[int]) -> None:
        self._layers = layers
        self._pool: Pool | None = None
        self._lanes: Lanes | None = None
        self._offload: Offload | None = None

    @contextmanager
    def opened(self, layer: int, device: torch.device, *, stay: list[torch.Tensor]) -> Iterator[None]:
        """Around the forward of a layer. stay: tensors that are not moved."""
        if self._pool is None or self._lanes is None:
            self._pool = Pool(pinned=device.type == "cuda")
            self._lanes = CudaLanes(device) if device.type == "cuda" else Lanes()
        if self._offload is None or layer == self._layers[0]:
            self._offload = Offload(self._lanes, kind=device.type)
        with self._offload.segment(self._pool, stay=stay):
            yield
        if layer == self._layers[-1]:
            self._offload.finish()


def _call(forward: Callable[..., Any], keywords: tuple[str, ...], num_positional: int, *values: Any) -> Any:
    return forward(*values[:num_positional], **dict(zip(keywords, values[num_positional:], strict=True)))


def _layers(model: nn.Module, layers_fqn: str) -> list[nn.Module]:
    try:
        found = model.get_submodule(layers_fqn)
    except AttributeError:
        lists = [name for name, module in model.named_modules() if isinstance(module, (nn.ModuleList, nn.ModuleDict))]
        raise ValueError(f"the model has no module {layers_fqn!r}; its lists of modules are "
                         f"{', '.join(lists) or 'none'}") from None
    if isinstance(found, nn.ModuleDict):
        return list(found.values())
    if not isinstance(found, nn.ModuleList):
        raise ValueError(f"{layers_fqn!r} is a {type(found).__name__}: a policy needs a ModuleList or a ModuleDict of layers")
    return list(found)


def _check(segment: Segment, layers_fqn: str) -> None:
    if segment.regions:
        raise ValueError(f"layer {segment.first_layer} of {layers_fqn}: {'+'.join(sorted(segment.regions))} are regions, and "
                         "this model's layers name none: use full, none or ops(...)")
    if segment.unit and segment.num_layers > 1:
        raise ValueError(f"layer {segment.first_layer} of {layers_fqn}: the model calls its layers one by one, so a unit cannot "
                         f"have {segment.num_layers}: use full")
    if segment.split:
        raise ValueError(f"layer {segment.first_layer} of {layers_fqn}: @split needs tensor-parallel layers of this project")
    try:
        find_operators(segment.ops)
    except InputError as error:
        raise ValueError(f"layer {segment.first_layer} of {layers_fqn}: {error}") from error
