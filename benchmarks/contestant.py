"""A contestant of benchmarks/side_by_side.py is a way to train a model, whoever built it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.engines import Setting
from benchmarks.recompute_engines import Engine


@dataclass(frozen=True)
class Contestant:
    """One way to train the model.

    clear: drops the gradients of the step before.
    run: one forward and backward; returns the loss, 0-d.
    is_compiled: whether torch.compile hides its operators.
    """

    name: str
    clear: Callable[[], None]
    run: Callable[[], Tensor]
    parameters: Sequence[nn.Parameter]
    is_compiled: bool = False


def peer(engine: Engine, *, is_compiled: bool = False) -> Contestant:
    """Returns an engine as a contestant, whose gradients are dropped before its turn."""

    def clear() -> None:
        for parameter in engine.parameters:
            parameter.grad = None

    def run() -> Tensor:
        loss = engine.forward()
        loss.backward()
        return loss.detach()

    return Contestant(engine.name, clear, run, engine.parameters, is_compiled)


def of_logits(name: str, model: nn.Module, setting: Setting, **more: bool) -> Contestant:
    """Returns a contestant whose model maps tokens [b, s] to logits [b, s, V]."""
    batch = setting.batch()
    labels = batch.labels.reshape(-1)

    def forward() -> Tensor:
        return F.cross_entropy(model(batch.tokens).float().flatten(0, 1), labels)

    engine = Engine(name=name, forward=forward, parameters=tuple(model.parameters()))
    return peer(engine, **more)
