"""Recomputation by saved-tensor hooks: the engine for functions of any kind.

    forward   The function runs once, with its own graph. Each tensor that it saves is replaced by
              an empty slot.
    backward  The first slot that backward reads runs the function again under the same conditions,
              up to the last tensor that the forward saved. This replay fills all slots that the
              graph still needs. Backward goes on through the graph of the forward.

Backward goes through the forward's own graph, which has these effects:
    Outputs may be any objects, and a loss may leave the function by an attribute or a hook.
    Unused outputs get no gradient.
    Parameters get their gradients from autograd as usual (DDP, `torch.autograd.grad`, hooks).
    Second-order gradients are right, because they read the slots again.

`checkpoint.py` is the other engine. It knows its inputs and outputs, so it can split an input over
ranks.

A replay changes nothing that the caller holds: see layer_state.py and call_arguments.py.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron_lite.parallel.tensor_hash import read
from megatron_lite.parallel.torch_internals import (
    PythonNode,
    collectives_so_far,
    current_backward,
    current_node,
    engine,
    outside_vmap,
    untraced,
)

from .call_arguments import Arguments
from .contents import CONSTANT, hash_last, shape_of
from .guard import Guard, Signature
from .layer_state import LayerState, Written
from .ops import KeptResults
from .randomness import Generators, drawn_again
from .replay import Conditions, RecomputeMismatch
from .router import KeptChoices
from .saved import (
    Args,
    Handle,
    Kwargs,
    check_unwritten,
    parameter_of,
    saved_parameter,
    saved_value,
    unpacked,
    version_of,
)
from .surroundings import Surroundings
from .witness import Witness

PATIENCE_S = 120.0  # of a thread that waits for another one
NO_TASK = -1  # torch's number for "not inside a backward"


class Turns:
    """Lets one thread at a time run a forward or a replay of the layers under one policy.

    A replay exchanges the state of its layer and of the generators, and another thread must not see
    it. The threads in which autograd works for a device are let through: they work for a thread
    that waits. It can be copied and pickled with a model; the copy has a lock of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[type[Turns], tuple[()]]:
        return Turns, ()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Waits until no other thread is inside.

        RuntimeError: another thread stays inside; it may wait for this one.
        """
        if isinstance(threading.current_thread(), threading._DummyThread):  # not made by Python
            yield
            return
        if not self._lock.acquire(timeout=PATIENCE_S):
            raise RuntimeError(
                "another thread has been inside a layer with a recompute policy for "
                f"{PATIENCE_S:.0f} s. Layers that wait for each other in several threads cannot be "
                "recomputed: take them out of the policy"
            )
        try:
            yield
        finally:
            self._lock.release()


@dataclass(kw_only=True)
class How:
    """How a function is run again in backward.

    rng: the random-number streams that the function draws from; None if it draws nothing.
    name: the name of the function in messages.
    layer: the module whose state a replay restores. With a layer, a replay also restores the global
        generators of Python and NumPy.
    written: the buffers and arguments that earlier calls of the layer wrote to, which this call
        copies. Without a layer nothing is copied, and a write to an argument is an error.
    results: the operators whose results are kept instead of rebuilt. It belongs to one call only.
    replay: runs in backward in place of the function. It must save the same tensors.
    guard: decides whether this call of the layer is verified (guard.py, witness.py).
    turns: lets one thread at a time run the forward or a replay.
    """

    rng: Generators | None
    name: str = "the function"
    layer: nn.Module | None = None
    written: Written = field(default_factory=Written)
    results: KeptResults | None = None
    replay: Callable[..., Any] | None = None
    guard: Guard = field(default_factory=lambda: Guard(False, stops_early=True))
    turns: Turns = field(default_factory=Turns)


def rebuild_saved(function: Callable[..., Any], args: Args, kwargs: Kwargs, how: How) -> Any:
    """Returns `function(*args, **kwargs)` itself; backward rebuilds the tensors that it saved.

    Gradients must be on. The call keeps for backward: the tensors among the arguments (through the
    saved-tensor hooks in force), the states of the random-number generators, the results that
    `how.results` chooses, and copies of what the function writes to.

    RecomputeMismatch in backward: the replay saved tensors of another number or form than the
    forward. In a verified call also: it computed something else, or left something behind.
    RuntimeError: an argument, a parameter or a buffer that the replay needs was written to since,
    or the layer wrote to a tensor after it was saved for backward.
    """
    with how.turns.taken():
        return _LayerCall(function, args, kwargs, how).forward(args, kwargs)


# the tensors that an operator saves, at most, if it fills one of them later
MOST_OF_ONE_OPERATOR = 3


Saved = tuple[Tensor, int | None]  # a tensor that is saved for backward, and its version
Form = tuple[tuple[int, ...], torch.dtype, torch.device]  # what a replay must repeat of it


def form_of(tensor: Tensor) -> Form:
    """Returns the form of a saved tensor."""
    is_strided = tensor.is_nested and tensor.layout == torch.strided
    return shape_of(tensor) if is_strided else tensor.shape, tensor.dtype, tensor.device


class _LayerCall:
    """One call of the function: everything that a replay needs, and the slots of its saved tensors.

    The slots in the graph hold this object, so it lives as long as the graph needs one of them. It
    refers to the slots weakly, which also shows which of them are still needed.
    """

    def __init__(self, function: Callable[..., Any], args: Args, kwargs: Kwargs, how: How) -> None:
        self.how, self._function = how, function
        # From here on the state before the forward is read, so this object is made right before it.
        self._arguments = Arguments(how.name, args, kwargs)
        self._state = LayerState(how.name, how.layer, how.written, self._arguments)
        self._conditions = Conditions(how.rng, self._arguments.kinds)
        self._surroundings = Surroundings.now(
            {each.device for each in self._arguments.tensors.values()}
        )
        # Others hold what a library collects during a forward, such as results of inner modules.
        found = copy_context().items()
        self._variables = [(name, value) for name, value in found if isinstance(value, CONSTANT)]
        self._generators = [*map(saved_value, self._conditions.take_states())]
        self._witness: Witness | None = None
        self._choices: KeptChoices | None = None
        if how.layer is not None:
            signature = None
            if how.guard.verify == "first":
                settings = *self._surroundings.kinds(), str(self._conditions.autocast), *kwargs
                signature = Signature.of(self._state.contents, self._arguments.given, settings)
            if how.guard.wants(signature):
                self._witness = Witness(how.name, how.rng, how.layer, how.guard, signature)
            if how.guard.has_router is not False or self._witness:
                self._choices = KeptChoices()
        self.slots: list[weakref.ref[Handle]] = []
        self.forms: list[Form] = []
        self._is_complete = False
        # What a first forward saves. It stays if the forward wrote to a parameter, of which there
        # is no copy: this call is then not recomputed.
        self._held: list[Saved] = []
        self._values: dict[int, dict[int, Saved]] = {}
        self._was_read: set[tuple[int, int]] = set()
        self._lock = threading.RLock()

    def _replay(self, args: Args, kwargs: Kwargs) -> Any:
        """Runs the function with the plain variables of contextvars as in its forward."""
        for name, value in self._variables:
            name.set(value)
        return (self.how.replay or self._function)(*args, **kwargs)

    def forward(self, args: Args, kwargs: Kwargs) -> Any:
        """Runs the function with slots in place of its saved tensors, and returns its outputs."""
        witness, results, choices = self._witness, self.how.results, self._choices
        if witness:
            witness.begin(args, kwargs)
        with saved_tensors_hooks(self._pack, untraced(unpacked)), ExitStack() as around:
            for kept in (results, choices):
                if kept:
                    around.enter_context(kept.keeping())
            outputs = self._function(*args, **kwargs)
        if witness:
            witness.end(outputs)
            witness.settle()
        # Each `settle` compares with the state before the forward. It keeps what a replay must
        # restore and drops the rest, so most copies live only as long as the forward.
        self._arguments.check_unchanged("by its forward")
        is_restorable, copies = self._state.settle()
        self._arguments.settle(copies)
        if is_restorable:
            self._held = []
        if results:
            results.save()
        if choices:
            has_router = choices.save()
            self.how.guard.has_router = has_router or bool(self.how.guard.has_router)
        self._is_complete, self.how.guard.forms = True, self.forms
        return outputs

    def value(self, number: int) -> Tensor:
        """Returns the tensor that the forward saved as number `number`, rebuilt.

        Each tensor of a replay is returned once and then forgotten, so its memory can be freed
        while backward goes on. A second read of the same slot runs another replay.
        """
        tensor, version = self._held[number] if self._held else self._rebuilt_value(number)
        check_unwritten(tensor, version, purpose=f"saved for backward in {self.how.name}")
        return tensor

    def _rebuilt_value(self, number: int) -> Saved:
        # Every backward (graph task) has its own replay. A backward inside the forward, or inside
        # another backward, must not take the tensors that the outer one still reads. Backward may
        # read slots from several threads.
        with self._lock:
            task = current_backward()
            values = self._values.get(task, {})
            if number not in values:
                with self.how.turns.taken():
                    values = self._values[task] = self._rebuilt()
                if task != NO_TASK:  # tensors that this backward does not read must not outlive it
                    engine.queue_callback(partial(self._values.pop, task, None))
            if number not in values:
                del self._values[task]
                raise _unlike(
                    self.how.name,
                    "the replay saved fewer tensors than the forward, and backward needs number "
                    f"{number} of {len(self.slots)}",
                )
            node = current_node() if task != NO_TASK else None
            is_read_again = isinstance(node, PythonNode) and self._is_read_again(node, task, number)
            tensor, version = values[number] if is_read_again else values.pop(number)
            if task == NO_TASK:
                del self._values[task]
        return tensor, version

    def _is_read_again(self, node: Any, task: int, number: int) -> bool:
        """Tells whether a saved tensor stays, because the Function that reads it may do so again.

        A Function in Python may read `ctx.saved_tensors` any number of times. Only a layer in which
        one did keeps the tensors, until the node ends.
        """
        guard = self.how.guard
        guard.reads_again |= (task, number) in self._was_read
        self._was_read.add((task, number))
        if not guard.reads_again:
            return False

        def drop(*_: Any) -> None:
            self._values.get(task, {}).pop(number, None)
            handle.remove()

        handle = node.register_hook(drop)
        return True

    def _pack(self, tensor: Tensor) -> Handle:
        if tensor.is_leaf and isinstance(tensor, nn.Parameter):
            return saved_parameter(tensor)
        slot = partial(self.value, len(self.slots))
        self.slots.append(weakref.ref(slot))
        self.forms.append(form_of(tensor))
        if self._state.is_first and not self._is_complete:
            self._held.append((tensor.detach(), version_of(tensor)))
        if self._witness and not self._is_complete:
            self._witness.save(tensor)
        return slot

    def _rebuilt(self) -> dict[int, Saved]:
        """Runs the replay. Returns the tensors whose slots the graph still needs, by number.

        Each comes with its version. A layer that writes to it later makes it useless.
        """
        # A function may run a backward of its own. Such a replay inside the forward rebuilds the
        # tensors that were saved so far, and nothing is compared with the forward.
        witness = self._witness if self._is_complete else None
        rebuilt = _Rebuilt(self, witness)
        # `again` builds graph nodes for the inputs, so gradients must be on before it. Another
        # checkpoint around this layer may run the layer to give back what was kept for the replay.
        # So that is read before the state is exchanged.
        with torch.inference_mode(False), torch.enable_grad(), outside_vmap():
            args, kwargs = self._arguments.again(self._state.copies)
            states = [state() for state in self._generators]
            if witness:
                witness.look()
            with (  # leaving it restores everything that the replay changed, also after _Enough
                self._state.restored(),
                drawn_again(self._arguments.generators),
                self._conditions.repeated(states),
                self._surroundings.restored(),
            ):
                if not self._run_again(rebuilt, witness, args, kwargs):
                    return rebuilt.values
        if self._is_complete:
            rebuilt.check()
        if witness:
            witness.compare(rebuilt.tensors)
            self._witness = None if witness.is_done else witness
        return rebuilt.values

    def _run_again(
        self, rebuilt: _Rebuilt, witness: Witness | None, args: Args, kwargs: Kwargs
    ) -> bool:
        """Runs the replay itself. Returns whether it ran to its end."""
        if witness:
            witness.begin(args, kwargs)
        # The hooks of the replay come last, so they see only what the function itself saves.
        unpack = witness.chosen if witness else lambda kept: kept
        try:
            with saved_tensors_hooks(rebuilt.pack, unpack), ExitStack() as run:
                if witness:
                    run.enter_context(witness.watching())
                if self.how.results:
                    run.enter_context(self.how.results.reusing(again=witness is not None))
                if self._choices:
                    run.enter_context(self._choices.reusing())
                outputs = copy_context().run(self._replay, args, kwargs)
        except BaseException as error:
            # A scripted function turns _Enough into an error of its own. Or it ends the replay of a
            # call around this one.
            if not rebuilt.has_stopped or (
                isinstance(error, _Enough) and error.args[0] is not self
            ):
                raise
            return False
        if witness:
            witness.end(outputs)
        return True


class _Rebuilt:
    """The tensors that one replay of a call saves.

    witness: compares the replay, if the call is verified.
    values: the tensors whose slots the graph still needs, by number, with their versions.
    tensors: all of them, if the replay runs to the end.
    has_stopped: whether it ended early.
    """

    def __init__(self, call: _LayerCall, witness: Witness | None) -> None:
        self._call, self._witness, self._expected = call, witness, len(call.slots)
        results = call.how.results
        may_stop = call.how.guard.stops_early if not results or results.skip_tail else False
        # A replay that runs to the end shows whether later ones may stop where the last tensor is
        # saved: RReLU fills a tensor after it saved it.
        self._stops = not witness and may_stop is True
        self._tries = not self._stops and may_stop is not False and call._is_complete
        self.has_stopped = False
        self._filled: list[Tensor] = []  # no parts of parameters
        self._last: list[Tensor] = []
        self._collectives: list[int] = []  # so many had begun when the last tensor was saved
        self._are_computed: list[bool] = []
        self._is_computed = True  # whether what the last operator may have saved is computed
        self.values: dict[int, Saved] = {}
        self.tensors: list[Tensor] = []

    def pack(self, tensor: Tensor) -> Any:
        """Takes a tensor that the replay saves, and returns what its graph keeps.

        RecomputeMismatch: it has another form than in the forward.
        """
        if tensor.is_leaf and isinstance(tensor, nn.Parameter):
            return (-1, tensor) if self._witness else tensor
        number = len(self._are_computed)
        self._are_computed.append(tensor.requires_grad)
        detached = tensor.detach()  # an output with its graph would hold that graph: a cycle
        if number < self._expected:
            before, now = self._call.forms[number], form_of(tensor)
            if before != now:
                raise _unlike(
                    self._call.how.name,
                    f"as number {number} of {self._expected} the forward saved {_text(*before)} "
                    f"for backward, the replay {_text(*now)}",
                )
            if self._call.slots[number]() is not None:
                self.values[number] = detached, version_of(detached)
            if self._witness:
                self._witness.save(tensor)
            if not self._stops:
                self.tensors.append(detached)
                if parameter_of(tensor) is None:
                    self._filled.append(detached)
            if number + 1 == self._expected:
                # Only what has a gradient is complete when it is saved.
                self._is_computed = all(self._are_computed[-MOST_OF_ONE_OPERATOR:])
                if self._stops and self._is_computed:
                    self.has_stopped = True
                    raise _Enough(self._call)
                if self._tries:
                    self._collectives = collectives_so_far()
                    self._last = untraced(hash_last)(self._filled, {}, self._weights())
        return (number, detached) if self._witness else detached

    def _weights(self) -> Any:
        # A layer that quantizes a weight, or masks it, puts it back after the last tensor is saved.
        layer = self._call.how.layer
        return () if layer is None else layer.parameters()

    def check(self) -> None:
        """Ends a replay that ran to its end.

        RecomputeMismatch: it saved another number of tensors than the forward.
        """
        count = len(self._are_computed)
        if count != self._expected:
            raise _unlike(
                self._call.how.name,
                f"the forward saved {self._expected} tensors for backward, the replay {count}",
            )
        if self._tries:
            guard = self._call.how.guard
            # An operator may fill a tensor after it saved it, as RReLU does with its noise. Memory
            # that held the forward's noise has the right bits before that. So the tensors that the
            # last operator may have saved must also have gradients: these are computed.
            known = self._witness.known if self._witness else {}
            last = read([*self._last, *hash_last(self._filled, known, self._weights())])
            is_repeated = last[: len(self._last)] == last[len(self._last) :] and self._is_computed
            # All ranks must run a collective behind the last tensor, or none.
            is_repeated &= collectives_so_far() == self._collectives
            guard.stops_early = is_repeated and guard.stops_early is not False


class _Enough(BaseException):
    """Ends a replay early, when all tensors that the forward saved are rebuilt.

    It derives from BaseException, because the function might catch an Exception. It has the call.
    """


def _unlike(name: str, what: str) -> RecomputeMismatch:
    return RecomputeMismatch(
        f"{name}: {what}. Something that the function reads has changed in between, or it does not "
        "do the same twice, as a router that chooses by other noise: make it repeatable, or take "
        "the layer out of the policy"
    )


def _text(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> str:
    return f"{list(shape)} of {str(dtype).removeprefix('torch.')} on {device}"
