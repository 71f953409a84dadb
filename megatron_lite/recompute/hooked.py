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
from megatron_lite.parallel.torch_internals import current_backward, engine, write_count_of
from megatron_lite.recompute.call_arguments import Arguments
from megatron_lite.recompute.host_randomness import HostRandomness
from megatron_lite.recompute.layer_state import LayerState, Written, drawn_again
from megatron_lite.recompute.ops import KeptResults
from megatron_lite.recompute.phase import recomputing
from megatron_lite.recompute.randomness import KeptRandomness, autocast_states
from megatron_lite.recompute.saved import SavedParameter
from megatron_lite.recompute.verify import RecomputeMismatch, Witness

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
    verify: bool = False,
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
    verify: whether to compare the replay with the forward, bit by bit: arguments, saved tensors,
        results, random-number streams, and the inputs and parameters that the graph reaches.

    RecomputeMismatch in backward: the replay saved tensors of another number or form than the
    forward. With `verify` also: it computed other values.
    RuntimeError: an argument, a parameter or a buffer that the replay needs was written to since.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
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
        verify=verify,
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
        verify: bool,
    ) -> None:
        written = written or Written(buffers=set(), arguments=set())
        self._name, self._function, self._replay, self._results = name, function, replay, results
        # From here on the state before the forward is read, so this object is made right before it.
        self._arguments = Arguments(name, args, kwargs, written)
        self._state = None if layer is None else LayerState(name, layer, written)
        devices = {"cpu", *(tensor.device.type for tensor in self._arguments.tensors())}
        self._autocast, self._device = autocast_states(devices), torch.get_default_device()
        self._randomness = None if rng is None else KeptRandomness(rng)
        self._host_randomness = None if layer is None else HostRandomness()
        self._witness = Witness(name, rng, layer) if verify else None
        self._slots: list[weakref.ref[_SavedSlot]] = []
        self._forms: list[_Form] = []
        self._is_complete = False
        self._stops_early = not verify and (results is None or results.skip_tail)
        self._values: dict[int, dict[int, Tensor]] = {}
        self._lock = threading.RLock()

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the function with slots in place of its saved tensors, and returns its outputs."""
        with ExitStack() as around:
            around.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack))
            if self._results is not None:
                around.enter_context(self._results.keeping())
            if self._witness is not None:
                self._witness.begin(args, kwargs)
            outputs = self._function(*args, **kwargs)
            if self._witness is not None:
                self._witness.end(outputs)
        # Each `settle` compares with the state before the forward. It keeps what a replay must
        # restore and drops the rest, so most copies live only as long as the forward.
        self._arguments.settle()
        if self._host_randomness is not None:
            self._host_randomness.settle()
        if self._state is not None:
            self._state.settle()
        if self._results is not None:
            self._results.save(self._name)
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
            if task == NO_TASK:
                del self._values[task]
            return values.pop(number)

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

    def _rebuilt(self) -> dict[int, Tensor]:
        """Runs the replay. Returns the tensors whose slots the graph still needs, by number."""
        values: dict[int, Tensor] = {}
        # A function may run a backward of its own. Such a replay inside the forward rebuilds the
        # tensors that were saved so far, and its totals are not compared with the forward's.
        count, expected, was_complete = 0, len(self._slots), self._is_complete

        def collect(tensor: Tensor) -> Tensor:
            nonlocal count
            if _is_parameter(tensor):
                return tensor
            number, count = count, count + 1
            detached = tensor.detach()  # an output with its graph would hold that graph: a cycle
            if number < expected:
                self._compare(number, tensor)
                if self._slots[number]() is not None:
                    values[number] = detached
                if count == expected and self._stops_early:
                    raise _Enough(self)
            return detached

        # Leaving the stack restores everything that the replay changed, also after _Enough. The
        # hooks of the replay come after `again`, so `collect` sees only what the function itself
        # saves.
        with ExitStack() as around:
            if self._state is not None:
                around.enter_context(self._state.restored())
            around.enter_context(drawn_again(self._arguments.generators))
            if self._randomness is not None:
                around.enter_context(self._randomness.replayed())
            if self._host_randomness is not None:
                around.enter_context(self._host_randomness.replayed())
            for state in self._autocast:
                around.enter_context(torch.autocast(**state))
            if torch.get_default_device() != self._device:
                around.enter_context(self._device)
            # `again` builds graph nodes for the inputs, so gradients must be on before it.
            around.enter_context(torch.enable_grad())
            around.enter_context(recomputing())
            args, kwargs = self._arguments.again()
            around.enter_context(torch.autograd.graph.saved_tensors_hooks(collect, _identity))
            if self._results is not None:
                around.enter_context(self._results.reusing())
            if self._witness is not None and was_complete:
                self._witness.begin(args, kwargs)
            try:
                outputs = self._replay(*args, **kwargs)
            except _Enough as enough:
                if enough.call is not self:  # it ends the replay of a call around this one
                    raise
                return values
            if self._witness is not None and was_complete:
                self._witness.end(outputs)
        if was_complete and count != expected:
            raise RecomputeMismatch(
                f"{self._name}: the forward saved {expected} tensors for backward, the replay "
                f"{count}. Something that the function reads has changed in between, or it does "
                "not do the same twice"
            )
        return values

    def _compare(self, number: int, tensor: Tensor) -> None:
        form = _Form.of(tensor)
        if form != self._forms[number]:
            raise RecomputeMismatch(
                f"{self._name}: as number {number} of {len(self._slots)} the forward saved "
                f"{self._forms[number]} for backward, the replay {form}. Something that the "
                "function reads has changed in between, or it does not do the same twice"
            )
        if self._witness is not None and self._is_complete:
            self._witness.save(tensor)


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
