"""Tensors that several layers share, such as masks, rotary tables and position biases.

The bytes at two moments do not tell who keeps a tensor. So a run of the step notes the arguments
and the results of each layer, and which of them the layer keeps for backward.
"""

import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.parallel.torch_internals import address_of, disable_dynamo, hooks_in_force
from megatron_lite.recompute.apply import saved_forms
from megatron_lite.recompute.contents import shape_of, tensors_of
from megatron_lite.recompute.saved import Handle, exchanging, saved_value

from .layers import kind_of
from .plans import Shared


class Sharing:
    """The notes on the first call of each layer in a run that may keep something for backward.

    A storage has a number, in the order in which storages are seen.

    numbers: those of the layers, in the order of their first calls (`Step.numbers`).
    tensors: the storages of a layer's arguments, and behind them those of its results.
    kept: the places in `tensors` of those that the layer keeps.
    forms: the shapes of the arguments, and whether they need gradients.
    needs: the number and the bytes of the tensors that it saves for backward, or would save if it
        were not rebuilt.
    """

    def __init__(self, numbers: Mapping[nn.Module, int]) -> None:
        self._layers = numbers
        self._storages: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []  # and its bytes
        self._numbers: dict[int, int] = {}  # by address
        # what is saved outside of layers, and how many layers had begun when it first was
        self._outside: dict[int, int] = {}
        self._calls: dict[nn.Module, Any] = {}
        self.tensors: dict[int, list[int]] = {}
        self.kept: dict[int, frozenset[int]] = {}
        self.forms: dict[int, tuple[Any, ...]] = {}
        self.needs: dict[int, tuple[int, int]] = {}

    @contextmanager
    def noting(self, layers: Iterable[nn.Module]) -> Iterator[None]:
        """Takes notes inside the block."""
        with ExitStack() as stack:
            stack.enter_context(exchanging(self._note_outside))
            for layer in layers:
                begin = partial(self._begin, stack)
                stack.enter_context(layer.register_forward_pre_hook(begin, with_kwargs=True))
                stack.enter_context(layer.register_forward_hook(self._end))
            yield

    def kinds(self) -> dict[nn.Module, Hashable]:
        """Returns for each layer of the run a value that is equal for layers of one kind."""
        return {
            layer: (kind_of(layer), self.needs[number], self.forms[number])
            for layer, number in self._layers.items()
            if number in self.needs
        }

    def shared(self) -> dict[int, Shared]:
        """Returns the tensors that the run has made, and layers got and kept, by their numbers."""
        made, given = dict[int, int](), dict[int, list[int]]()
        for layer, tensors in self.tensors.items():
            for at, number in enumerate(tensors):
                made.setdefault(number, layer)
                if at < len(self.forms[layer]) and at in self.kept[layer]:
                    given.setdefault(number, []).append(layer)
        return {
            number: Shared(made[number], layers[0], layers[-1], self.num_bytes([number]))
            for number, layers in given.items()
            # others are there before or after the step
            if self.num_bytes([number]) and number not in self._outside
        }

    def saved_later(self, layer: int) -> dict[int, int]:
        """Returns the arguments and results of a layer that are saved outside after it, so that
        they are gone before its backward, unless it keeps them, and how many layers had begun."""
        found = {number: self._outside.get(number, 0) for number in self.tensors[layer]}
        return {number: begun for number, begun in found.items() if begun > layer}

    def given(self, layer: int) -> set[int]:
        """Returns the arguments of a layer."""
        return {*self.tensors[layer][: len(self.forms[layer])]}

    def num_bytes(self, numbers: Iterable[int]) -> int:
        """Returns the bytes of storages, without those that are there after the step."""
        found = (self._storages[number] for number in numbers)
        return sum(num_bytes for storage, num_bytes in found if storage() is None)

    def _begin(self, stack: ExitStack, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if (layer := self._layers[module]) in self.forms:
            self._calls[module] = None  # what it saves is not saved outside of layers
        else:
            given = tensors_of((args, kwargs))
            self.forms[layer] = tuple((shape_of(each), each.requires_grad) for each in given)
            self.tensors[layer] = [*map(self._number_of, given)]
            noted, outer = list[Any](), hooks_in_force()

            def note(tensor: Tensor) -> Handle:
                kept, form = saved_value(tensor, outer), (shape_of(tensor), tensor.dtype)
                noted.append((weakref.ref(kept), self._number_of(tensor), form))
                return kept

            call = stack.enter_context(ExitStack())  # a failing step closes it
            self._calls[module] = call, noted
            call.enter_context(exchanging(note))

    def _end(self, module: nn.Module, args: Any, results: Any) -> None:
        if found := self._calls.pop(module, None):
            (call, noted), layer = found, self._layers[module]
            call.close()
            # A layer that is rebuilt, but saves nothing, lets its arguments go.
            found = [(number, form) for kept, number, form in noted if kept()]
            forms = saved_forms(module) or [form for _, form in found]
            # The length of a jagged tensor is no int.
            num_bytes = sum(
                prod(n for n in shape if isinstance(n, int)) * dtype.itemsize
                for shape, dtype, *_ in forms
            )
            self.needs[layer] = len(forms), num_bytes
            held = tensors_of(results) or tensors_of(getattr(results, "__dict__", ()))
            self.tensors[layer] += map(self._number_of, held)
            saved, places = {number for number, _ in found}, enumerate(self.tensors[layer])
            self.kept[layer] = frozenset(place for place, number in places if number in saved)

    def _note_outside(self, tensor: Tensor) -> None:
        if not self._calls:
            self._outside.setdefault(self._number_of(tensor), len(self.forms))

    @disable_dynamo  # that of torch 2.8 confuses a weak reference and its object
    def _number_of(self, tensor: Tensor) -> int:
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # a sparse tensor has several
            storage = torch.UntypedStorage(0)
        number = self._numbers.get(address_of(storage))
        if number is None or self._storages[number][0]() is not storage:
            number = self._numbers[address_of(storage)] = len(self._storages)
            self._storages.append((weakref.ref(storage), storage.nbytes()))
        return number
