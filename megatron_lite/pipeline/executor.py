"""Runs a pipeline rank's list of actions: receives, computes, sends.

pipeline/order.py makes the list. The hidden states enter a stage's graph at one end and leave it
at the other:

    stage k    arrived -> layers -> nothing    backward: the gradient of nothing comes from
                                               stage k+1, that of what arrived goes to stage k-1

Neither end keeps the hidden states. A received input lives as long as a layer keeps it, and an
output lives until it has been sent.

Computation never waits for a send, and a receive begins before its tensor is needed. Messages
carry no name. The tensors of one process group arrive in the order in which they were sent, and
pipeline/order.py gives both ends the same order. A group carries one direction only, so a send
never waits behind a receive.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.config.stages import Stage
from megatron_lite.parallel.collectives import WAITING, Started, Timed, not_timed
from megatron_lite.parallel.compiled import Pair, applied

from .order import Action

Direction = Literal["forward", "backward"]


class _Sending(NamedTuple):
    """A tensor on its way to another rank. wait: raises the send's error if it failed."""

    tensor: Tensor
    is_done: Callable[[], bool]
    wait: Callable[[], object]


class Links:
    """The sends and receives of one pipeline rank.

    groups: groups of the pipeline's ranks. The first two carry forward and backward tensors; the
        next two carry them between the last rank and the first.
    shape, dtype: the hidden states between stages, the same for all stages.
    """

    def __init__(
        self,
        groups: tuple[ProcessGroup, ...],
        *,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._groups, self._shape, self._dtype, self._device = groups, shape, dtype, device
        self._rank, self._size = groups[0].rank(), groups[0].size()
        self._leaving: list[_Sending] = []
        self._is_simulated = dist.get_backend(groups[0]) == dist.Backend.FAKE
        # One thread can wait for all sends of a group, since they complete in order.
        has_waiters = device.type == "cpu" and not self._is_simulated
        self._waiters = [ThreadPoolExecutor(1, "sent") for _ in groups] if has_waiters else []

    def send(self, tensor: Tensor, direction: Direction) -> None:
        """Begins to send to the rank of the next stage (forward) or the stage before (backward)."""
        number, peer = self._route(direction, sends=True)
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, group=self._groups[number], group_dst=peer)
        assert work is not None
        sending = _Sending(tensor, work.is_completed, work.wait)
        if self._waiters:
            # A gloo work does not report its completion until a thread waits for it.
            waited = self._waiters[number].submit(work.wait)
            sending = _Sending(tensor, waited.done, waited.result)
        elif self._is_simulated:  # its wait returns at once, but it never reports completion
            sending = sending._replace(is_done=lambda: True)
        self._leaving.append(sending)

    def receive(self, direction: Direction) -> Started:
        """Begins to receive from the rank of the stage before (forward) or the next (backward)."""
        number, peer = self._route(direction, sends=False)
        tensor = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        work = dist.irecv(tensor, group=self._groups[number], group_src=peer)
        assert work is not None
        return Started(tensor, (work,))

    def forget_sent(self) -> None:
        """Drops the references to tensors that have been sent. Does not wait for the others."""
        staying = []
        for one in self._leaving:
            if one.is_done():
                one.wait()  # returns at once
            else:
                staying.append(one)
        self._leaving = staying

    def wait_sent(self) -> None:
        """Returns once all tensors have been sent.

        On a GPU it returns once the current stream is set to wait for the sends.
        """
        with WAITING:
            for one in self._leaving:
                one.wait()
        self._leaving.clear()

    def _route(self, direction: Direction, *, sends: bool) -> tuple[int, int]:
        """Returns the number of the group that joins this rank and its peer, and that rank. Rank 0
        follows the last rank."""
        step = 1 if (direction == "forward") == sends else -1
        peer = (self._rank + step) % self._size
        closes_the_ring = (self._rank if step == 1 else peer) == self._size - 1
        return (direction == "backward") + 2 * closes_the_ring, peer


# Runs one micro-batch through one of the rank's stages: (action, hidden states) -> hidden states
# for the next stage; on the last stage it returns the loss, from which backward starts. It gets the
# output of the stage before, or None on the first stage, which reads tokens.
Forward = Callable[[Action, Tensor | None], Tensor]


def run_actions(
    actions: Sequence[Action],
    forward: Forward,
    *,
    stages: Sequence[Stage],
    links: Links,
    overlap: bool,
    timed: Timed = not_timed,
    before_backward: Callable[[Action], None] = lambda action: None,
) -> list[Tensor]:
    """Runs `actions` in turn and returns the losses of the last stage.

    The losses are detached and in the order of the micro-batches; a rank without the last stage
    returns []. If gradients are off, all actions must be forwards.

    stages: this rank's stages, by model chunk.
    overlap: whether a rank receives the input of an action while the action before it computes.
    timed: times each backward, by the names of training/profiler.py. The time in which a backward
        waits for its gradient counts.
    before_backward: called with each backward action before it runs.
    """
    losses: list[Tensor] = []
    arriving: dict[Action, Started] = {}
    # By (micro-batch, model chunk): the tensor from which backward starts.
    ends: dict[tuple[int, int], Tensor] = {}

    def expect(action: Action) -> None:
        # The first stage's forward and the last stage's backward need no input of another rank.
        stage = stages[action.chunk]
        needs_none = stage.is_first if action.kind == "forward" else stage.is_last
        if action not in arriving and not needs_none:
            arriving[action] = links.receive(action.kind)

    def send_back(grad: Tensor) -> tuple[None]:
        links.send(grad, "backward")
        return (None,)

    def run_forward(action: Action) -> None:
        """Runs a forward. Its output is the loss on the last stage, and else is sent.

        There the output is not kept: backward starts from an empty tensor. The local reference to
        the input is dropped, so the input lives only as long as a layer keeps it.
        """
        stage = stages[action.chunk]
        received = None if stage.is_first else arriving.pop(action).wait()
        if received is not None and torch.is_grad_enabled():
            # Autograd runs a Function's backward only if an input requires gradients. The empty
            # anchor does; `received` does not, so no gradient accumulates on it.
            anchor = torch.empty(0, requires_grad=True)
            arrival = Pair(lambda _, one: one.view_as(one), send_back, slice(0))
            received = applied(arrival, anchor, received)
        output = forward(action, received)
        del received
        if stage.is_last:
            losses.append(output.detach())
        else:
            links.send(output, "forward")
        if torch.is_grad_enabled():
            end = output
            if not stage.is_last:
                # An empty tensor [0] stands for the output in backward. The gradient is received
                # later; the second lambda fetches it once backward runs.
                needed = action._replace(kind="backward")
                fetch = Pair(
                    lambda output: output.new_empty(0),
                    lambda _: arriving.pop(needed).wait(),
                    slice(0),
                )
                end = applied(fetch, output)
            ends[action.microbatch, action.chunk] = end

    def run_backward(action: Action) -> None:
        # Its graph fetches the gradient of the output and sends the input's.
        end = ends.pop((action.microbatch, action.chunk))
        end.backward(torch.ones_like(end))

    for number, action in enumerate(actions):
        # Messages carry no name, so receives are posted in the order of the actions. The other end
        # sends in the same order.
        expect(action)
        if overlap and number + 1 < len(actions):
            expect(actions[number + 1])
        # Tensors that have been sent are dropped before the action allocates its own.
        links.forget_sent()
        if action.kind == "forward":
            run_forward(action)
        else:
            before_backward(action)
            with timed("backward-compute"):
                run_backward(action)
    links.wait_sent()
    return losses
