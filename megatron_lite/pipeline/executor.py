"""Runs a pipeline rank's list of actions: receives, computes, sends. What the actions are is pipeline/order.py's business."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron_lite.config.stages import Stage
from megatron_lite.pipeline.handoff import arrive, depart, run_backward
from megatron_lite.pipeline.links import Arriving, Direction, Links
from megatron_lite.pipeline.order import Action


class Forward(Protocol):
    """One micro-batch through one of the rank's stages.

    hidden_states: what the stage before sent; None on the first stage, which reads tokens. Returns what the next stage gets, or
    on the last stage the loss that backward starts from.
    """

    def __call__(self, action: Action, hidden_states: Tensor | None) -> Tensor: ...


def run_actions(actions: Sequence[Action], forward: Forward, *, stages: Sequence[Stage], links: Links, overlap: bool = True,
                before_backward: Callable[[Action], None] | None = None,
                after: Callable[[Action], None] | None = None) -> list[Tensor]:
    """All of `actions` in turn. Returns the losses of the last stage, detached, in the order of the micro-batches; else [].

    stages: this rank's, by chunk. overlap: what an action needs is received while the one before it computes. after: called when
    an action is done. Where gradients are off, the actions must all be forwards.
    """
    run = _Run(stages, links)
    losses = []
    for number, action in enumerate(actions):
        run.expect(action)
        if overlap and number + 1 < len(actions):
            run.expect(actions[number + 1])
        links.forget_sent()
        if action.kind == "forward":
            loss = run.forward(action, forward)
            losses += [] if loss is None else [loss]
        else:
            if before_backward is not None:
                before_backward(action)
            run.backward(action)
        if after is not None:
            after(action)
    links.wait_sent()
    return losses


class _Run:
    """What is under way in one step."""

    def __init__(self, stages: Sequence[Stage], links: Links) -> None:
        self._stages, self._links = stages, links
        self._arriving: dict[Action, Arriving] = {}
        self._ends: dict[tuple[int, int], Tensor] = {}  # by (micro-batch, chunk): where backward starts

    def expect(self, action: Action) -> None:
        """Begins to receive what the action needs, if it does and has not begun yet."""
        stage = self._stages[action.chunk]
        if action not in self._arriving and not (stage.is_first if action.kind == "forward" else stage.is_last):
            self._arriving[action] = self._links.receive(action.kind)

    def forward(self, action: Action, forward: Forward) -> Tensor | None:
        """Returns the loss of the last stage."""
        stage = self._stages[action.chunk]
        received = None if stage.is_first else self._arriving.pop(action).wait()
        if received is not None and torch.is_grad_enabled():
            received = arrive(received, self._sender("backward"))
        output = forward(action, received)
        del received
        if not stage.is_last:
            self._links.send(output, "forward")
        if torch.is_grad_enabled():
            needed = action._replace(kind="backward")
            end = output if stage.is_last else depart(output, lambda: self._arriving.pop(needed).wait())
            self._ends[action.microbatch, action.chunk] = end
        return output.detach() if stage.is_last else None

    def backward(self, action: Action) -> None:
        run_backward(self._ends.pop((action.microbatch, action.chunk)))

    def _sender(self, direction: Direction) -> Callable[[Tensor], None]:
        return lambda tensor: self._links.send(tensor, direction)
