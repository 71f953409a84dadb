"""Runs a user's step so that the model is as before, and reads the bytes at its layers.

The forward of a layer begins and ends with the hooks of its module. Its backward begins when the
gradient of its output is there, and ends when that of its input is.
"""

import os
import random
import sys
import time
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from copy import copy
from ctypes import string_at
from functools import partial
from itertools import chain, count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from megatron_lite.memory.measure.live_storages import is_out_of_memory
from megatron_lite.parallel.torch_internals import has_values, tree_map_only, unreduced_gradients
from megatron_lite.parallel.weights import local_part
from megatron_lite.recompute.contents import Contents, Part, mapped, shape_of, sharded, tensors_of
from megatron_lite.recompute.randomness import drawn_again, global_states

from .gauges import Gauge, Reading
from .plans import AFTER, BACKWARD, CALL, FORWARD, OUTSIDE
from .ranks import OtherShapes, Ranks
from .sharing import Sharing

FORWARD_END, BACKWARD_END, MODEL_END = range(4, 7)
LARGE = 2**26  # bytes of what an object holds, from which on it is not copied
UNREDUCED = (
    "FSDP2 holds gradients that it has not reduced over the ranks: begin before the first "
    "micro-batch, and let the step end with one that syncs (set_requires_gradient_sync)"
)
VARIES = "the step has inputs of other shapes each time"
ONE_BATCH = "give a step of one batch, the largest"
PATIENCE = 5.0  # seconds between two lines that tell which run it is
COMPILED = (
    "torch.compile is around {}: compiled code has other memory, and layers with a policy run "
    "uncompiled. Fit and train the model without it (in a Trainer, without torch_compile)"
)


class Event(NamedTuple):
    """A mark in a step: the begin or end of the forward or backward of one call of a layer, or the
    end of the model's forward.

    size: the elements of the call's first tensor.
    """

    name: int = OUTSIDE
    layer: int = -1
    size: int = 0
    call: int = -1


class Span(NamedTuple):
    """A part of a step.

    name, layer: see `Moment`. call: the number of this call of the layer.
    is_largest: whether it has the largest argument.
    alive: the calls that wait for their backward, or are in it, as (layer, number), each with the
        size of its argument in thousandths of the largest one.
    start, end: the bytes at its begin and end. peak: the most bytes in it.
    """

    name: int
    layer: int
    call: int
    is_largest: bool
    alive: Counter[tuple[int, int]]
    start: int
    end: int
    peak: int
    nanoseconds: int


class Step:
    """A step of the user: a function that runs forwards and backwards of the model.

    layers: the layers of the model. parameters: those that get gradients; (): of the model.
    ranks: those that run it together.
    numbers: those of the layers that have run, in the order of their first forwards.
    varies: whether runs had inputs of different shapes. Every call of the model then gets the
        largest ones so far.
    seed: of the random numbers with which each run begins; None: of the present ones.
    size: of the largest inputs of the last run, in elements.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        step: Callable[[], Any],
        parameters: Sequence[Tensor] = (),
        ranks: Ranks | None = None,
    ) -> None:
        self._model, self._layers, self._step = model, layers, step
        self._step_of_ranks = partial((ranks or Ranks()).agreed, self._checked_step)
        self._parameters = parameters or [*model.parameters()]
        self.numbers = defaultdict[nn.Module, int](count().__next__)
        self._runs = 0
        # of the inputs: those of the model's calls, and those of layers; of the first run so far
        self._shapes: tuple[list[Any], defaultdict[nn.Module, set[Any]]]
        self._first: Any = None
        self.varies = self._is_trial = False
        self.seed: int | None = None
        self.size = 0
        self._told = time.monotonic()
        self._largest: tuple[int, Any] = (0, None)
        self._events: list[Event] = []
        self._is_compiled = False
        self.draws = False  # random numbers, as the last run has shown
        self.is_divided = False  # over tensor-parallel ranks, as the last read run has seen
        self.sharing = Sharing(self.numbers)  # of the last run that took notes

    def run(
        self, gauge: AbstractContextManager[Gauge] | None = None, *, takes_notes: bool = True
    ) -> list[Span]:
        """Runs the step once. Returns its parts, if a gauge reads them.

        takes_notes: whether it is noted who shares tensors. It takes time, which a gauge may read.
        Raises OtherShapes if what was measured before does not hold for the largest inputs.
        """
        self._runs += 1
        self._shapes, self.size = ([], defaultdict(set)), 0
        self._tell("")
        with repeatable(self._parameters), warnings.catch_warnings(), ExitStack() as stack:
            if self.seed is not None:
                random.seed(self.seed), np.random.seed(self.seed), torch.manual_seed(self.seed)
            warnings.filterwarnings("ignore", message="Layers under a recompute policy keep no k")
            see = self._model.register_forward_pre_hook(self._see_inputs, with_kwargs=True)
            stack.enter_context(see)
            for layer in self._layers:
                see = layer.register_forward_pre_hook(self._see_inputs_of_layer, with_kwargs=True)
                stack.enter_context(see)
            if takes_notes:
                self.sharing = Sharing(self.numbers)
                stack.enter_context(self.sharing.noting(self._layers))
            if gauge is None:
                self._step_of_ranks()
                return []
            self._events, self._gauge = [], stack.enter_context(gauge)
            for handle in self._mark_layers():
                stack.enter_context(handle)
            end = partial(self._mark, Event(MODEL_END))
            stack.enter_context(self._model.register_forward_hook(end))
            self._mark(Event())
            self._step_of_ranks()
            self._mark(Event())
        return _spans(self._events, self._gauge.readings)

    @contextmanager
    def drawing(self, seed: int) -> Iterator[None]:
        """Lets the runs inside the block draw other random numbers. Their inputs may be others."""
        before, self.seed, self._is_trial = self.seed, seed, True
        try:
            yield
        finally:
            self.seed, self._is_trial = before, False

    def draw_from(self, seed: int) -> None:
        """Lets all runs draw the random numbers of a seed, which gives larger inputs."""
        self.seed, self._first = seed, None

    def forget_layers(self, number: int = 0) -> None:
        """Forgets the layers from a number on, as if they had not run."""
        for layer in [*self.numbers][number:]:
            del self.numbers[layer]
        self.numbers.default_factory = count(number).__next__

    def _checked_step(self) -> None:
        before, drawn = self._largest[0], _states()
        try:
            self._step()
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError) or not is_out_of_memory(error):
                raise
            raise torch.OutOfMemoryError(f"{type(error).__name__}: {error}") from error
        self.draws = _states() != drawn
        if self._is_compiled:
            raise ValueError(COMPILED.format("the model"))
        self._first = first = self._first or self._shapes
        if self._is_trial and not self.varies:
            return
        if (self._largest[0] > before) if self.varies else self._shapes[0] != first[0]:
            self.varies, self._first = True, None
            raise OtherShapes
        # Chance may drop a layer, and a replay may call one again.
        if any(seen != first[1].get(layer, seen) for layer, seen in self._shapes[1].items()):
            raise ValueError(
                f"{VARIES}, and not by calls of the model itself, which could be repeated with the "
                f"largest: {ONE_BATCH}"
            )

    def _tell(self, where: str) -> None:
        if time.monotonic() - self._told > PATIENCE and os.environ.get("RANK", "0") == "0":
            self._told = time.monotonic()
            text = f"fit_memory_: run {self._runs} of the step{where}"
            with suppress(OSError):  # standard error may be full
                print(text, file=sys.stderr, flush=True)

    def _see_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._is_compiled |= torch.compiler.is_compiling()  # a compiler takes the hook along
        if module is not self._model:  # a copy has the hook, too
            raise ValueError(
                "the step runs a copy of the model, as DataParallel does for each GPU: start a "
                "process for each (torchrun), or show it one (CUDA_VISIBLE_DEVICES=0)"
            )
        tensors = tensors_of((args, kwargs))
        self._shapes[0].append([*map(shape_of, tensors)])
        self.size = max(self.size, size := sum(each.numel() for each in tensors))
        if size > self._largest[0]:
            self._largest = size, (args, kwargs)
        # Clones stand for what the step may have made itself. A GPU's allocator counts the largest.
        clone = partial(tree_map_only, Tensor, lambda one: one.clone() if one.is_cpu else one)
        return clone(self._largest[1]) if self.varies else None

    def _see_inputs_of_layer(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        # A compiler takes the hook along.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._shapes[1][layer].add((*map(shape_of, tensors_of((args, kwargs))),))

    def _mark(self, event: Event, *_: Any) -> None:
        # The gradients of several results begin one backward.
        if event.name != BACKWARD or self._events[-1] != event:
            self._events.append(event)
            self._gauge.mark()
            self._tell(f", layer {event.layer + 1} of {len(self._layers)}" * (event.layer >= 0))

    def _mark_layers(self) -> Iterator[Any]:
        calls, sizes, given = Counter[int](), dict[int, int](), dict[int, set[int]]()

        def mark(module: nn.Module, name: int, tensors: Any, gradient: int) -> None:
            if not torch.is_grad_enabled():  # no policy changes what such a forward takes
                return
            layer = self.numbers[module]
            calls[layer] += name == FORWARD
            if name == FORWARD:
                # FSDP2 has gathered the weights, so other ranks hold parts of them.
                if "torch.distributed.tensor" in sys.modules:
                    from megatron_lite.recompute.split_inputs import tensor_parallel_group

                    self.is_divided |= tensor_parallel_group(module) is not None
                sizes[layer] = next((each.numel() for each in tensors_of(tensors)), 0) or 1
            call = layer, sizes[layer], calls[layer]
            self._mark(Event(name, *call))
            found = [each for each in tensors_of(tensors) if each.requires_grad]
            if name == FORWARD:
                given[layer], found = {*map(id, found)}, found[:1]  # others may be everywhere
            else:
                # A loss may leave a layer by an attribute.
                for holder in (tensors, *module.modules()):
                    held = getattr(holder, "__dict__", {}).values()
                    found += [x for x in held if isinstance(x, Tensor) and x.grad_fn]
                found[1:] = [x for x in found[1:] if id(x) not in given[layer]]
            for tensor in found:
                tensor.register_hook(partial(self._mark, Event(gradient, *call)))

        for layer in self._layers:
            yield layer.register_forward_pre_hook(
                lambda one, args, kwargs: mark(one, FORWARD, (args, kwargs), BACKWARD_END),
                with_kwargs=True,
            )
            yield layer.register_forward_hook(
                lambda one, args, output: mark(one, FORWARD_END, output, BACKWARD)
            )


def _states() -> list[Any]:
    """Returns what differs once random numbers have been drawn."""
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    found = [torch.get_rng_state(), *on_gpus]  # no mode of fake tensors may see them
    return [id(global_states()), *(string_at(one.data_ptr(), one.nbytes) for one in found)]


def _kept(tensor: Tensor) -> Callable[[], Tensor]:
    """Returns what gives a tensor back with its present values, or a new one if it is gone."""
    reference, device = weakref.ref(tensor), tensor.device
    values = tensor.detach().to("cpu", copy=True)

    def again() -> Tensor:
        found = reference()
        if found is None:
            return values.to(device)
        here = local_part(found)  # not all writes are counted: not BatchNorm's, not those by .data
        if here.layout != torch.strided or not torch.equal(here.cpu(), local_part(values)):
            with torch.no_grad():
                found.copy_(values)
        return found

    return again


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restores bit by bit after the block what the modules of a model hold: buffers, attributes,
    containers, objects of Python, generators. A policy that is on the model stays on.

    The block is for all runs of a step: what the first one makes for good, such as a mask, is there
    in the others, as in training. A tensor or an array of more than LARGE bytes that an object
    holds, such as a dataset, is left as it is.
    Raises ValueError after the block if a parameter is not what it was.
    """
    while type(model).__module__.startswith("torch.nn.parallel"):  # DDP counts its iterations
        model = model.module  # type: ignore[assignment]
    units = sharded(model)
    if any(map(unreduced_gradients, units)):
        raise ValueError(UNREDUCED)
    contents, named = Contents(), dict(model.named_parameters())
    if not sharded(model, "FullyShardedDataParallel"):  # FSDP1 exchanges attributes by itself
        contents.add("", model)
    others = [
        part.value
        for name, part in contents.parts.items()
        if name not in named and not (part.owner and getattr(part.value, "nbytes", 0) > LARGE)
    ]
    others += model.buffers()
    arrays = [(each, copy(each)) for each in others if not isinstance(each, Tensor)]
    kept = {
        id(each): _kept(each) for each in others if isinstance(each, Tensor) and has_values(each)
    }
    contents.parts = {name: Part(name, "", each) for name, each in named.items()}
    contents.hash_values({})
    del others  # no tensor is held: the step may free it

    def exchange(values: dict[int, Any]) -> None:
        for each in contents.containers:
            each.items[:] = [mapped(one, lambda x: values.get(id(x), x)) for one in each.items]

    with drawn_again([state for _, state in contents.generators]), contents.restored():
        exchange(kept)
        try:
            yield
        finally:
            for array, values in arrays:
                array[... if hasattr(array, "ndim") else slice(None)] = values
            exchange({id(each): each() for each in kept.values()})
            held = map(vars, model.modules())
            policies = [(each, each["forward"]) for each in held if "forward" in each]
            left = [*chain.from_iterable(map(unreduced_gradients, units))]
            for holder, name in left:
                setattr(holder, name, None)
    if left:
        raise ValueError(UNREDUCED)
    for part in contents.written({}, counts=False):
        raise ValueError(
            f"the step wrote to the parameter {part.name}, which cannot be undone: leave out of "
            "the step what changes weights. If the model does so once, as with max_norm, call again"
        )
    for layer, policy in policies:
        layer["forward"] = policy


@contextmanager
def without_layerdrop(model: nn.Module) -> Iterator[list[str]]:
    """Lets chance drop no layer inside the block: what modules and their configurations hold under
    names that end in layerdrop, as in transformers, is 0. Yields a note, if it was not."""
    held = [vars(each) for each in model.modules()]
    held += [getattr(each.get("config"), "__dict__", {}) for each in held]
    rates = [
        (one, name, rate)
        for one in held
        for name, rate in one.items()
        if name.endswith("layerdrop") and isinstance(rate, float) and rate
    ]
    for one, name, _ in rates:
        one[name] = 0.0
    try:
        yield ["note: layerdrop was 0 in all runs; a step that drops layers takes less"] * bool(
            rates
        )
    finally:
        for one, name, rate in rates:
            one[name] = rate


@contextmanager
def repeatable(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Restores gradients and generators after the block, bit by bit.

    Raises ValueError if an optimizer is about to update weights in the block.
    """
    gradients = [None if each.grad is None else _kept(each.grad) for each in parameters]
    devices = range(torch.cuda.device_count() * torch.cuda.is_initialized())
    with (
        torch.random.fork_rng(devices),
        drawn_again(global_states()),
        register_optimizer_step_pre_hook(_refuse_update),
    ):
        try:
            yield
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient and gradient()


def _refuse_update(optimizer: Optimizer, *_: Any) -> None:
    raise ValueError(
        f"the step runs {type(optimizer).__name__}.step(), which would change the weights: leave "
        "it out, and give optimizer=, whose states are then counted"
    )


def _spans(events: list[Event], readings: list[Reading]) -> list[Span]:
    """Returns the parts of a step between the marks."""
    spans, alive, present, outside = [], Counter[tuple[int, int]](), Event(), Event()
    # A graph that is retained has several backwards.
    last = {event[1:]: number for number, event in enumerate(events) if event.name == BACKWARD}
    waits = {layer for layer, *_ in last}
    others = [event[1:] for event in events if event.name == FORWARD and event.layer not in waits]
    largest: dict[int, list[int]] = {}  # of a layer's calls: with a backward, if one has
    for layer, *call in (*last, *others):
        largest[layer] = max(call, largest.get(layer, call))

    def weight(event: Event) -> Counter[tuple[int, int]]:
        share = -(-CALL * event.size // largest[event.layer][0])
        return Counter({(event.layer, event.call): share})

    for number, (event, now, after) in enumerate(zip(events, readings, readings[1:], strict=False)):
        # Between two layers, the gradient begins one backward before it ends the other.
        if event.name != BACKWARD_END or event[1:] == present[1:]:
            if present.name == BACKWARD and last[present[1:]] < number:
                alive -= weight(present)
            if event.name in (FORWARD, BACKWARD, MODEL_END):
                outside = Event() if event.name == FORWARD else Event(AFTER)
            present = event if event.name in (FORWARD, BACKWARD) else outside
        if event.name == FORWARD_END and event.layer in waits:
            alive += weight(event)
        is_largest = largest.get(present.layer) == [*present[2:]]
        spans.append(
            Span(
                *present[:2],
                present.call,
                is_largest,
                alive.copy(),
                now.num_bytes,
                after.num_bytes,
                after.peak,
                after.nanoseconds - now.nanoseconds,
            )
        )
    return spans
