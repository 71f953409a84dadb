"""Stand-ins for most layers of a model on fake tensors: a step with them takes less time.

Layers that are alike change the bytes alike. So two of them run, and each other one only makes what
a layer leaves: its results, what it keeps for backward, its keys and values in a cache, its
gradients.
"""

from collections import UserDict, defaultdict
from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from megatron_lite.fit.step import Span, Step
from megatron_lite.parallel.torch_internals import address_of
from megatron_lite.parallel.weights import bytes_of, storages_of
from megatron_lite.recompute.caches import kind_of_caches, own_cache
from megatron_lite.recompute.contents import Contents, tensors_of
from megatron_lite.recompute.saved import exchanging, results_of

MOST_TRIES = 5  # of steps with a wrong stand-in; then all layers run


class Ran(NamedTuple):
    """What a call of a layer has shown.

    kept: the bytes that its graph alone keeps, those that a cache of keys and values keeps as well,
        and those that the cache alone keeps. The arguments are in none of them.
    places: of its arguments and results that the graph keeps.
    is_tuple: whether the results are a tuple, not a tensor. forms: the shape, the strides and the
        type of each.
    """

    layer: nn.Module
    kept: list[int]
    places: list[int]
    is_tuple: bool
    forms: list[Any]


class StandIns:
    """Runs a step in which stand-ins take the places of most layers.

    Of layers that are alike, and that have alike neighbours, with the same actions, two run. Each
    other one only makes results of the same form, keeps as many bytes, and makes gradients. Its
    peaks and its time are those of the second one. A layer whose forward or backward does not
    change the bytes as there runs itself from then on, as a layer does whose results something
    else reads as well.

    keys: of the layers, in the order of their forwards; those of one key are alike.
    """

    def __init__(self, keys: dict[nn.Module, Hashable]) -> None:
        self._keys, self._tries = keys, 0

    def __call__(
        self, step: Step, gauge: Callable[[], Any], actions: Mapping[nn.Module, str]
    ) -> list[Span]:
        """Returns the parts of the step. gauge: makes a FakeGauge. actions: those of layers; others
        keep everything."""
        while True:
            self._gauge, self._ran = gauge(), defaultdict[Any, list[Ran | None]](list)
            self._numbers = step.numbers
            # the layer that ran, by the one that did not
            self._replaced: dict[nn.Module, nn.Module] = {}
            own = [(key, actions.get(layer, "none")) for layer, key in self._keys.items()]
            # Of neighbours it matters whether they are rebuilt, and so keep their arguments.
            near = [None, *((key, action == "none") for key, action in own), None]
            with ExitStack() as stack:
                for layer, *key in zip(self._keys, near, own, near[2:], strict=False):
                    stand_in = partial(self._call, layer, tuple(key), layer.forward)
                    stack.enter_context(patch.object(layer, "forward", stand_in))
                spans = step.run(self._gauge)
            odd = self._complete(spans)
            if not odd:
                return spans
            self._tries += 1
            for layer in odd if self._tries < MOST_TRIES else self._keys:
                self._keys[layer] = layer

    def _call(self, layer: nn.Module, key: Any, policy: Any, *args: Any, **kwargs: Any) -> Any:
        ran, given = self._ran[key], tensors_of((args, kwargs))
        every, kind, is_rebuilt = (*args, *kwargs.values()), kind_of_caches(), key[1][1] != "none"
        caches = [each for each in every if isinstance(each, kind)]
        if len(ran) == 2 and (one := ran[1]):
            self._replaced[layer] = one.layer
            held = [torch.empty(size, dtype=torch.uint8) for size in one.kept]
            for cache in caches[:1]:
                vars(cache).setdefault("stand_ins", []).append(held[1:])
            copies = [own_cache(each) for each in caches if is_rebuilt]
            form = one.forms, one.places, [held[:2], copies]
            results = _StandIn.apply(form, len(given), *given, *layer.parameters())
            return results if one.is_tuple else results[0]
        before, cached = self._gauge.total_bytes(), _sizes(caches)
        saved = set[int]()
        note = exchanging(lambda tensor: saved.add(address_of(tensor.untyped_storage())))
        with note, patch.object(layer, "forward", policy):
            result = layer.forward(*args, **kwargs)
        if torch.is_grad_enabled():
            results, one = results_of(result), None
            # Gemma's layers hand keys and values to later layers in a UserDict.
            if (
                not {*map(id, results)} & {*map(id, given)}
                and all(isinstance(each, Tensor) and each.requires_grad for each in results)
                and (is_rebuilt or not any(isinstance(each, UserDict) for each in every))
            ):
                kept = self._gauge.total_bytes() - before - bytes_of(results)
                sizes = {at: size for at, size in _sizes(caches).items() if at not in cached}
                both = sum(size for at, size in sizes.items() if at in saved)
                here = [address_of(x.untyped_storage()) for x in (*given, *results)]
                one = Ran(
                    layer,
                    [kept - sum(sizes.values()), both, sum(sizes.values()) - both],
                    [
                        n
                        for n, at in enumerate(here)
                        if at in saved or (is_rebuilt and n < len(given))
                    ],
                    results is result,
                    [(x.shape, x.stride(), x.dtype) for x in results],
                )
            ran.append(one)
        return result

    def _complete(self, spans: list[Span]) -> set[nn.Module]:
        """Gives stand-ins their peaks and times. Returns the layers that change the bytes otherwise
        than those that are alike; of two of which one ran, that one if no other is like it."""
        parts = defaultdict[int, list[int]](list)
        for place, span in enumerate(spans):
            parts[span.layer].append(place)
        odd = set[nn.Module]()
        for layer, like in self._replaced.items():
            both = [parts[self._numbers[one]] for one in (layer, like)]
            changes = [
                [(spans[at].name, spans[at].end - spans[at].start) for at in places]
                for places in both
            ]
            if changes[0] != changes[1]:
                odd.add(layer)
                continue
            for place, other in zip(*both, strict=True):
                own, ran = spans[place], spans[other]
                peak = own.start + ran.peak - ran.start
                spans[place] = own._replace(peak=peak, nanoseconds=ran.nanoseconds)
        right = {like for layer, like in self._replaced.items() if layer not in odd}
        return {one if (like := self._replaced[one]) in right else like for one in odd}


def _sizes(caches: Any) -> dict[int, int]:
    """Returns the bytes of the storages in caches, by their addresses."""
    contents = Contents()
    contents.add("", caches)
    found = [each.value for each in contents.parts.values() if isinstance(each.value, Tensor)]
    return {address: one.nbytes() for address, one in storages_of(found).items()}


class _StandIn(torch.autograd.Function):
    """Makes results and gradients.

    form: the form of the results, the places of the arguments and results that it keeps, and what
        else the graph holds.
    """

    @staticmethod
    def forward(ctx: Any, form: Any, num_given: int, *inputs: Tensor) -> Any:
        forms, places, ctx.held = form
        results = tuple(torch.empty_strided(*each[:2], dtype=each[2]) for each in forms)
        tensors = *inputs[:num_given], *results
        ctx.save_for_backward(*(tensors[place] for place in places))
        ctx.like = [(each.shape, each.dtype) for each in inputs]
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.held = None
        needed = zip(ctx.like, ctx.needs_input_grad[2:], strict=True)
        made = [torch.empty(size, dtype=dtype) if need else None for (size, dtype), need in needed]
        return None, None, *made
