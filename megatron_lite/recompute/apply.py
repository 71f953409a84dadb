"""Puts a recompute policy on the layers of any model, in place: the engine of this project for models that are not its own.

    apply_policy_(model, layers_fqn="transformer.h", policy="every-2:full")

The layers of a torch.nn.ModuleList or ModuleDict are counted in order. Each keeps its parameters and its name in the model; only
its `forward` is wrapped. Layers are called one by one by a model that is not ours, so a unit is one layer, and named regions,
which only our own layers have, are refused. Random numbers must come from torch's default generators.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn

from megatron_lite.config.policy import parse_policy
from megatron_lite.parallel.rng import DEFAULT, RngSnapshot
from megatron_lite.recompute.checkpoint import checkpoint
from megatron_lite.recompute.plan import RecomputePlan, Segment
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

    verify: compare each replay with its forward; RecomputeMismatch where they differ.
    ValueError, before anything is changed: no such module; one that is neither a ModuleList nor a ModuleDict; a policy that
    cannot be read, names regions, units of several layers, or a split over ranks; a model whose layers have a policy already.
    """
    layers = _layers(model, layers_fqn)
    plan = RecomputePlan(tuple(segments(parse_policy(policy), len(layers))), skip_tail=False, verify=verify)
    for segment in plan.segments:
        _check(segment, layers_fqn)
    if any(isinstance(layer.__dict__.get("forward"), _Wrapped) for layer in layers):
        raise ValueError(f"the layers of {layers_fqn} have a recompute policy already")
    for segment, layer in zip(plan.segments, layers, strict=True):
        if segment.unit:
            layer.forward = _Wrapped(layer, f"{layers_fqn}.{segment.first_layer}", verify=verify)
    return plan


class _Wrapped:
    """A layer's forward that keeps its arguments only."""

    def __init__(self, layer: nn.Module, name: str, *, verify: bool) -> None:
        self._layer, self._forward, self._name, self._verify = layer, layer.forward, name, verify
        update_wrapper(self, layer.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        rng = DefaultGenerator(next((tensor.device for tensor in tensors), torch.device("cpu")))
        forward = self._forward
        if self._verify:
            record = Record(self._name, rng, self._layer)
            return checkpoint(record.watch(partial(_call, forward, tuple(kwargs), len(args))), *args, *kwargs.values(), rng=rng)
        return checkpoint(forward, *args, rng=rng, **kwargs)


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
    if segment.ops or segment.on_host:
        raise ValueError(f"layer {segment.first_layer} of {layers_fqn}: {segment.action}@{segment.store} is not supported here")
