"""The settings of torch around a forward, besides autocast, which its replay repeats.

They are the modes on torch's functions (a default device is one), the default dtype, the
choice of kernels, the number of threads, and the hooks on all modules. A caller may have set them
for the forward alone.
A context of another library is not known here: the verified replay finds what it changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch

from megatron_lite.parallel.torch_internals import (
    attention_order,
    dispatch_modes,
    flags_of_kernels,
    function_modes,
    hooks_in_force,
    hooks_of_all_modules,
    pop_function_mode,
    push_function_mode,
    set_attention_order,
)

from .contents import kind_of, unobserved

GPUS = ("cuda", "xpu")
# What reads and what sets each. Each call of a layer reads them all, nearly all by functions of C.
FLAGS: tuple[Any, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),  # sums of some kernels depend on it
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (lambda: tuple(attention_order()), lambda order: set_attention_order([*order])),
    *flags_of_kernels,
)


@cache
def _settle_attention(device: torch.device) -> None:
    """Lets torch choose the order of its attention kernels, which it does at its first call.

    On Hopper and later it puts cuDNN first. Settings that were read before the first call would
    give a replay another kernel than its forward had. The current device may be another one, whose
    memory others have taken.
    """
    if device.type in GPUS and getattr(torch, device.type).is_available():
        with unobserved():
            heads = torch.zeros(1, 1, 8, 8, dtype=torch.float16, device=device)
            torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)


class Surroundings(NamedTuple):
    """The settings of torch at one moment.

    flags: the values of FLAGS.
    modes: the modes on torch's functions, outermost first.
    hooks: the items of the dictionaries of hooks on all modules.
    """

    flags: list[Any]
    modes: list[Any]
    hooks: list[dict[int, Any]]

    @classmethod
    def now(cls, devices: Iterable[torch.device] = ()) -> Surroundings:
        """Returns the present settings. devices: those in use."""
        for device in devices:
            _settle_attention(device)
        hooks = [*map(dict, hooks_of_all_modules)]
        return cls([read() for read, _ in FLAGS], function_modes(), hooks)

    def kinds(self) -> tuple[Any, ...]:
        """Returns the settings with the kinds of modes and hooks in place of these, as a key."""
        return (
            *self.flags,
            (*map(type, self.modes), *map(type, dispatch_modes())),
            tuple(kind_of(hook) for found in self.hooks for hook in found.values()),
            kind_of((hooks_in_force() or (None,))[0]),  # of the caller, which may round
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Gives torch these settings inside the block, and after it the present ones."""
        before = Surroundings.now()
        try:
            self._replace_those(before)
            yield
        finally:
            before._replace_those(Surroundings.now())

    def _replace_those(self, now: Surroundings) -> None:
        if now == self:
            return
        for (read, put), then in zip(FLAGS, self.flags, strict=True):
            if read() != then:  # one may set another
                put(then)
        for place, hooks in zip(hooks_of_all_modules, self.hooks, strict=True):
            if place != hooks:  # somebody may iterate over it
                place.clear()
                place.update(hooks)
        for _ in now.modes:
            pop_function_mode()
        for mode in self.modes:
            push_function_mode(mode)
