"""Gives each run of a recomputed layer its own copy of a key-value cache (library transformers).

In training, the models of transformers make an empty cache and pass it to every layer, which
appends its keys and values. A replay would append them a second time, behind those of the forward.
Training never reads this cache. It would also hold the keys and values of every layer, which
recomputation is meant to free.

So each run of the layer, forward and replay, fills its own copy of the cache, which is then
dropped. The results have the same bits as with the cache, and no keys or values are kept. The layer
still reads a prefix that the cache holds. A cache whose tensors the layer writes to in place is
refused, like any argument that cannot be restored (call_arguments.py).
"""

import copy
import sys
import weakref
from collections import UserDict
from collections.abc import Callable
from functools import wraps
from typing import Any

from .saved import Args, Kwargs

CACHES = "transformers.cache_utils"


def kind_of_caches() -> Any:
    """Returns the class of caches; no value is an instance of ()."""
    return getattr(sys.modules.get(CACHES), "Cache", ())


def with_own_caches(
    forward: Callable[..., Any], args: Args, kwargs: Kwargs, notify: Callable[[str], None]
) -> tuple[Callable[..., Any], Args, Kwargs]:
    """Returns (forward, args, kwargs) with which no run of the layer changes a cache of the caller.

    Of each UserDict the contents are passed, of which a replay gets a copy of its own. Gemma's
    layers hand keys and values to later layers in such a dictionary, with their graph.

    notify: called with a message for the user if a cache is among the arguments.
    """
    kind = kind_of_caches()
    places: list[tuple[Any, Any]] = [*enumerate(args), *kwargs.items()]
    # The graph holds `run`, so it must not hold the tensors in the dictionaries.
    found = {
        place: (weakref.ref(each), _filled(each, {}))
        for place, each in places
        if isinstance(each, UserDict)
    }
    has_caches = any(isinstance(each, kind) for _, each in places)
    if not found and not has_caches:
        return forward, args, kwargs

    def copied(value: Any) -> Any:
        return own_cache(value) if isinstance(value, kind) else value

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        def own(place: Any, value: Any) -> Any:
            if place not in found:
                return copied(value)
            reference, empty = found[place]
            if getattr(caller := reference(), "data", None) is value:
                return caller  # in the forward: it may have attributes
            return _filled(empty, value)

        return forward(
            *map(own, range(len(args)), args),
            **{name: own(name, value) for name, value in kwargs.items()},
        )

    if has_caches:
        notify(
            "Layers under a recompute policy keep no keys and values: the cache in the model's "
            "output (`past_key_values`) lacks theirs. With use_cache=False none is made, and "
            "nothing is said"
        )
    # The arguments are copied here too. Layers without a policy append to the caller's cache after
    # this call, and a replay must find the cache as it is now.
    given = {place: value.data if place in found else copied(value) for place, value in places}
    return run, tuple(map(given.pop, range(len(args)))), given


def _filled(like: Any, data: dict[Any, Any]) -> Any:
    own = copy.copy(like)
    own.data = data
    return own


def own_cache(cache: Any) -> Any:
    """Returns a copy of a cache with the same tensors, but with its own lists and entries.

    Keys, values and states that a layer puts into the copy do not reach the original.
    """
    own = copy.copy(cache)
    vars(own).update(_own(vars(cache)))
    return own


def _own(value: Any) -> Any:
    if type(value) is dict:
        return {key: _own(each) for key, each in value.items()}
    if type(value) is list:
        return [_own(each) for each in value]
    # Families have entries of their own, which are classes of their modules (DeepSeek-V4).
    is_entry = any(kind.__module__ == CACHES for kind in type(value).__mro__)
    return own_cache(value) if is_entry else value
