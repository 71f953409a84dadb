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
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_lite.parallel.rng import Generators
from megatron_lite.parallel.torch_internals import (
    PythonNode,
    current_backward,
    current_node,
    engine,
    write_count_of,
)
from megatron_lite.recompute.call_arguments import Arguments
from megatron_lite.recompute.guard import Guard, Signature
from megatron_lite.recompute.host_randomness import HostRandomness
from megatron_lite.recompute.layer_state import LayerState, Written
from megatron_lite.recompute.ops import KeptResults
from megatron_lite.recompute.own_generators import drawn_again
from megatron_lite.recompute.phase import recomputing
from megatron_lite.recompute.randomness import KeptRandomness
from megatron_lite.recompute.saved import SavedParameter
from megatron_lite.recompute.surroundings import Surroundings
from megatron_lite.recompute.turns import Turns
from megatron_lite.recompute.verify import RecomputeMismatch
from megatron_lite.recompute.versions import check_unwritten, version_of
from megatron_lite.recompute.witness import Witness, hash_last, is_repeated

NO_TASK = -1  # torch's number for "not inside a backward"


def rebuild_saved(
    function: Callable[..., Any],
    *args: Any,
    rng: Generators | None,
    name: str = "the function",
    results: KeptResults | None = None,
    replay: Callable[..., Any] | None = None,
) -> Any:
    """Returns `function(*args)`; backward rebuilds the tensors that it saved.

    This is `rebuild_call` without a layer.
    """
    return rebuild_call(function, args, {}, rng=rng, name=name, results=results, replay=replay)


def rebuild_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    rng: Generators | None,
    name: str,
    layer: nn.Module | None = None,
    written: Written | None = None,
    results: KeptResults | None = None,
    replay: Callable[..., Any] | None = None,
    guard: Guard | None = None,
    turns: Turns | None = None,
) -> Any:
    """Returns `function(*args, **kwargs)` itself; backward rebuilds the tensors that it saved.

    If gradients are off, the function simply runs. The call keeps for backward: the tensors among
    the arguments (through the saved-tensor hooks in force), the states of the random-number
    generators, the results that `results` chooses, and copies of what the function writes to.

    name: the name of the function in messages.
    rng: the random-number streams that the function draws from; None if it draws nothing.
    layer: the module whose state a replay restores. With a layer, a replay also restores the global
        generators of Python and NumPy.
    written: the buffers and arguments that earlier calls wrote to, which this call copies. With
        None nothing is copied, and a write to an argument or a buffer is an error.
    results: the operators whose results are kept instead of rebuilt. It belongs to this call only.
    replay: runs in backward in place of `function`. It must save the same tensors.
    guard: decides whether this call of the layer is verified (guard.py, witness.py).
    turns: lets one thread at a time run the forward or a replay.

    RecomputeMismatch in backward: the replay saved tensors of another number or form than the
    forward. In a verified call also: it computed something else, or left something behind.
    RuntimeError: an argument, a parameter or a buffer that the replay needs was written to since,
    or the layer wrote to a tensor after it was saved for backward.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    turns = turns or Turns()
    with turns.taken():
        call = _LayerCall(
            name,
            function,
            replay or function,
            args,
            kwargs,
            rng=rng,
            layer=layer,
            written=written,
            results=results,
            guard=guard,
            turns=turns,
        )
        return call.forward(args, kwargs)


class _LayerCall:
    """One call of the function: everything that a replay needs, and the slots of its saved tensors.

    The slots in the graph hold this object, so it lives as long as the graph needs one of them. It
    refers to the slots weakly, which also shows which of them are still needed.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        replay: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        rng: Generators | None,
        layer: nn.Module | None,
        written: Written | None,
        results: KeptResults | None,
        guard: Guard | None,
        turns: Turns,
    ) -> None:
        written = written or Written(state=set(), arguments=set())
        self._name, self._function, self._replay, self._results = name, function, replay, results
        # From here on the state before the forward is read, so this object is made right before it.
        self._arguments = Arguments(name, args, kwargs, written)
        self._state = None if layer is None else LayerState(name, layer, written)
        devices = {"cpu", *(tensor.device.type for tensor in self._arguments.tensors())}
        self._surroundings = Surroundings.now(devices)
        self._randomness = None if rng is None else KeptRandomness(rng)
        self._host_randomness = None if layer is None else HostRandomness()
        self._guard, self._turns = guard, turns
        self._witness = self._witnessed(rng, layer, args, kwargs)
        self._slots: list[weakref.ref[_SavedSlot]] = []
        self._forms: list[_Form] = []
        self._is_complete = False
        self._values: dict[int, dict[int, tuple[Tensor, int | None]]] = {}
        self._was_read: set[tuple[int, int]] = set()
        self._lock = threading.RLock()

    def _witnessed(
        self,
        rng: Generators | None,
        layer: nn.Module | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Witness | None:
        if self._guard is None or layer is None:
            return None
        signature = (
            Signature.of(layer, args, kwargs, self._surroundings)
            if self._guard.verify == "first"
            else None
        )
        is_verified = self._guard.wants(signature)
        return Witness(self._name, rng, layer, self._guard, signature) if is_verified else None

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the function with slots in place of its saved tensors, and returns its outputs."""
        if self._witness is not None:
            self._witness.begin(args, kwargs)
        with ExitStack() as around:
            around.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack))
            if self._results is not None:
                around.enter_context(self._results.keeping())
            outputs = self._function(*args, **kwargs)
        if self._witness is not None:
            self._witness.end(outputs)
            self._witness.settle()
        # Each `settle` compares with the state before the forward. It keeps what a replay must
        # restore and drops the rest, so most copies live only as long as the forward.
        self._arguments.settle()
        if self._host_randomness is not None:
            self._host_randomness.settle()
        if self._state is not None:
            self._state.settle()
        if self._results is not None:
            self._results.save()
        self._is_complete = True
        return outputs

    def value(self, number: int) -> Tensor:
        """Returns the tensor that the forward saved as number `number`, rebuilt.

        Each tensor of a replay is returned once and then forgotten, so its memory can be freed
        while backward goes on. A second read of the same slot runs another replay.
        """
        # Every backward (graph task) has its own replay. A backward inside the forward, or inside
        # another backward, must not take the tensors that the outer one still reads. Backward may
        # read slots from several threads.
        with self._lock:
            task = current_backward()
            values = self._values.get(task)
            if values is None or number not in values:
                values = self._values[task] = self._rebuilt()
                if task != NO_TASK:  # tensors that this backward does not read must not outlive it
                    forget = weakref.WeakMethod(self._forget)
                    engine.queue_callback(lambda: _forget(forget, task))
            if number not in values:
                self._forget(task)
                raise RecomputeMismatch(
                    f"{self._name}: the replay saved fewer tensors than the forward, and backward "
                    f"needs number {number} of {len(self._slots)}"
                )
            if self._is_read_again(task, number):
                tensor, version = values[number]
            else:
                tensor, version = values.pop(number)
            if task == NO_TASK:
                del self._values[task]
        if self._witness is not None and number in self._witness.rewritten:
            version = None  # the forward wrote to it, after the place where this replay stopped
        check_unwritten(tensor, version, purpose=f"saved for backward in {self._name}")
        return tensor

    def _is_read_again(self, task: int, number: int) -> bool:
        """Tells whether a saved tensor stays, because the node that reads it may do so again.

        A Function in Python may read `ctx.saved_tensors` any number of times. Only a layer in which
        one did keeps the tensors, until the node ends.
        """
        node = current_node() if task != NO_TASK else None
        if not isinstance(node, PythonNode) or self._guard is None:
            return False
        self._guard.reads_again |= (task, number) in self._was_read
        self._was_read.add((task, number))
        if not self._guard.reads_again:
            return False

        def drop(*_: Any) -> None:
            self._values.get(task, {}).pop(number, None)
            handle.remove()

        handle = node.register_hook(drop)
        return True

    def _forget(self, task: int) -> None:
        self._values.pop(task, None)

    def _pack(self, tensor: Tensor) -> _SavedSlot | SavedParameter:
        if _is_parameter(tensor):  # the module holds it anyway
            return SavedParameter(tensor, write_count_of(tensor))
        slot = _SavedSlot(self, len(self._slots))
        self._slots.append(weakref.ref(slot))
        self._forms.append(_Form.of(tensor))
        if self._witness is not None and not self._is_complete:
            self._witness.save(tensor)
        return slot

    def _rebuilt(self) -> dict[int, tuple[Tensor, int | None]]:
        """Runs the replay. Returns the tensors whose slots the graph still needs, by number.

        Each comes with its version. A layer that writes to it later makes it useless.
        """
        # A function may run a backward of its own. Such a replay inside the forward rebuilds the
        # tensors that were saved so far, and nothing is compared with the forward.
        witness = self._witness if self._is_complete else None
        rebuilt = _Rebuilt(self, witness, expected=len(self._slots), is_whole=self._is_complete)
        if witness is not None:
            witness.look()
        # Leaving the stack restores everything that the replay changed, also after _Enough.
        with ExitStack() as around:
            around.enter_context(self._turns.taken())
            if self._state is not None:
                around.enter_context(self._state.restored())
            around.enter_context(drawn_again(self._arguments.generators))
            if self._randomness is not None:
                around.enter_context(self._randomness.replayed())
            if self._host_randomness is not None:
                around.enter_context(self._host_randomness.replayed())
            around.enter_context(self._surroundings.restored())
            # `again` builds graph nodes for the inputs, so gradients must be on before it.
            around.enter_context(torch.enable_grad())
            around.enter_context(recomputing())
            args, kwargs = self._arguments.again()
            if witness is not None:
                witness.begin(args, kwargs)
            try:
                outputs = self._run_again(rebuilt, args, kwargs)
            except BaseException as error:
                # A scripted function turns _Enough into an error of its own. Or it ends the replay
                # of a call around this one.
                if not rebuilt.has_stopped or (
                    isinstance(error, _Enough) and error.call is not self
                ):
                    raise
                return rebuilt.values
            if witness is not None:
                witness.end(outputs)
        if rebuilt.is_whole:
            rebuilt.check()
        if witness is not None:
            witness.look()
            witness.compare(rebuilt.tensors)
            self._witness = None if witness.is_done else witness
        return rebuilt.values

    def _run_again(self, rebuilt: _Rebuilt, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The hooks of the replay come after `again`, so they see only what the function itself
        # saves.
        with ExitStack() as around:
            unpack = _identity if rebuilt.witness is None else rebuilt.witness.chosen
            around.enter_context(torch.autograd.graph.saved_tensors_hooks(rebuilt.pack, unpack))
            if self._results is not None:
                around.enter_context(self._results.reusing(again=rebuilt.witness is not None))
            return self._replay(*args, **kwargs)

    def needs(self, number: int) -> bool:
        """Tells whether the graph still needs a saved tensor."""
        return self._slots[number]() is not None

    def may_stop(self) -> bool | None:
        """Tells whether a replay may end when all saved tensors are rebuilt; None if unknown."""
        if self._results is not None and not self._results.skip_tail:
            return False
        return True if self._guard is None else self._guard.stops_early

    def found(self, stops_early: bool) -> None:
        """Records that a replay which ran to the end did or did not change its last tensors."""
        if self._guard is not None:
            self._guard.stops_early = stops_early and self._guard.stops_early is not False

    def compare(self, number: int, tensor: Tensor) -> None:
        """Raises RecomputeMismatch if a saved tensor has another form than in the forward."""
        form = _Form.of(tensor)
        if form != self._forms[number]:
            raise RecomputeMismatch(
                f"{self._name}: as number {number} of {len(self._slots)} the forward saved "
                f"{self._forms[number]} for backward, the replay {form}. Something that the "
                "function reads has changed in between, or it does not do the same twice"
            )

    def refuse(self, count: int) -> None:
        """Raises RecomputeMismatch, because the replay saved another number of tensors."""
        raise RecomputeMismatch(
            f"{self._name}: the forward saved {len(self._slots)} tensors for backward, the replay "
            f"{count}. Something that the function reads has changed in between, or it does "
            "not do the same twice"
        )


class _Rebuilt:
    """The tensors that one replay of a call saves.

    witness: compares the replay, if the call is verified.
    expected: how many tensors the forward saved.
    is_whole: whether the forward had ended.
    values: the tensors whose slots the graph still needs, by number, with their versions.
    tensors: all of them, if the replay runs to the end.
    has_stopped: whether it ended early.
    """

    def __init__(
        self, call: _LayerCall, witness: Witness | None, *, expected: int, is_whole: bool
    ) -> None:
        self._call, self.witness, self._expected = call, witness, expected
        self.is_whole, self._count = is_whole, 0
        # A replay that runs to the end shows whether later ones may stop where the last tensor is
        # saved: RReLU fills a tensor after it saved it.
        self._stops = witness is None and call.may_stop() is True
        self._tries = not self._stops and call.may_stop() is not False and is_whole
        self.has_stopped = False
        self._last: list[Tensor] = []
        self.values: dict[int, tuple[Tensor, int | None]] = {}
        self.tensors: list[Tensor] = []

    def pack(self, tensor: Tensor) -> Any:
        """Takes a tensor that the replay saves, and returns what its graph keeps."""
        if _is_parameter(tensor):
            return tensor if self.witness is None else (-1, tensor)
        number, self._count = self._count, self._count + 1
        detached = tensor.detach()  # an output with its graph would hold that graph: a cycle
        if number < self._expected:
            self._call.compare(number, tensor)
            if self._call.needs(number):
                self.values[number] = detached, version_of(detached)
            if self.witness is not None:
                self.witness.save(detached)
            if not self._stops:
                self.tensors.append(detached)
            if self._count == self._expected:
                if self._stops:
                    self.has_stopped = True
                    raise _Enough(self._call)
                if self._tries:
                    self._last = hash_last(self.tensors)
        return detached if self.witness is None else (number, detached)

    def check(self) -> None:
        """Ends a replay that ran to its end.

        RecomputeMismatch: it saved another number of tensors than the forward.
        """
        if self._count != self._expected:
            self._call.refuse(self._count)
        if self._tries:
            self._call.found(is_repeated(self._last, hash_last(self.tensors)))


class _SavedSlot:
    """The object that the graph holds in place of a saved tensor."""

    __slots__ = ("__weakref__", "call", "number")

    def __init__(self, call: _LayerCall, number: int) -> None:
        self.call, self.number = call, number

    def tensor(self) -> Tensor:
        """Returns the tensor, rebuilt."""
        return self.call.value(self.number)


class _Form(NamedTuple):
    """The shape, dtype and device of a saved tensor, which a replay must repeat."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> _Form:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device)

    def __str__(self) -> str:
        return f"{list(self.shape)} of {str(self.dtype).removeprefix('torch.')} on {self.device}"


class _Enough(BaseException):
    """Ends a replay early, when all tensors that the forward saved are rebuilt.

    It derives from BaseException, because the function might catch an Exception.
    """

    def __init__(self, call: _LayerCall) -> None:
        self.call = call


def _is_parameter(tensor: Tensor) -> bool:
    return tensor.is_leaf and isinstance(tensor, nn.Parameter)


def _unpack(kept: _SavedSlot | SavedParameter) -> Tensor:
    return kept.tensor()


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _forget(method: weakref.WeakMethod[Any], task: int) -> None:
    found = method()
    if found is not None:
        found(task)
