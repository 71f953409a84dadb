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

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

PARTS = ("self_attention_cache", "cross_attention_cache")  # in an encoder-decoder cache


def with_own_caches(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    notify: Callable[[str], None],
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Returns (forward, args, kwargs) with which no run of the layer changes a cache of the caller.

    notify: called with a message for the user if a cache is among the arguments.
    """
    kind = getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
    if kind is None or not any(isinstance(value, kind) for value in (*args, *kwargs.values())):
        return forward, args, kwargs

    def copied(value: Any) -> Any:
        return _copied(value) if isinstance(value, kind) else value

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(
            *map(copied, args), **{name: copied(value) for name, value in kwargs.items()}
        )

    notify(
        "Layers under a recompute policy keep no keys and values: `past_key_values` of the model's "
        "output lacks theirs. With use_cache=False no cache is made, and nothing is said"
    )
    # The arguments are copied here too. Layers without a policy append to the caller's cache after
    # this call, and a replay must find the cache as it is now.
    return run, tuple(map(copied, args)), {name: copied(value) for name, value in kwargs.items()}


def _copied(cache: Any) -> Any:
    """Returns a copy of a cache with the same tensors, but with its own lists and entries.

    Keys and values that a layer appends to the copy do not reach the original.
    """
    own = copy.copy(cache)
    for name in PARTS:
        if getattr(cache, name, None) is not None:
            setattr(own, name, _copied(getattr(cache, name)))
    for name, value in vars(cache).items():
        if isinstance(value, dict):
            vars(own)[name] = dict(value)
        elif isinstance(value, list):
            vars(own)[name] = [
                copy.copy(entry) if hasattr(entry, "__dict__") else entry for entry in value
            ]
    return own
