"""The settings of torch around a forward, besides autocast, which its replay repeats.

They are the modes on torch's functions (a default device is one), the default dtype, the
choice of kernels, the number of threads, and the hooks on all modules. A caller may have set them
for the forward alone.
A context of another library is not known here: the verified replay finds what it changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from megatron_lite.parallel.torch_internals import (
    attention_kernels,
    choose_attention_kernels,
    disable_current_modes,
    dispatch_modes,
    function_modes,
    hooks_of_all_modules,
    pop_function_mode,
    push_function_mode,
    without_torch_function,
)
from megatron_lite.recompute.contents import Contents
from megatron_lite.recompute.saved import hooks_in_force

GPUS = ("cuda", "xpu")
Flag = tuple[Callable[[], Any], Callable[[Any], Any]]  # reads it, sets it


@cache
def _flags() -> tuple[Flag, ...]:
    cuda, cudnn, onednn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    return (
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        (torch.get_num_threads, torch.set_num_threads),  # sums of some kernels depend on it
        (
            lambda: attention_kernels(with_priority=True),
            lambda kernels: choose_attention_kernels(kernels, set_priority=True),
        ),
        (cuda.fp16_bf16_reduction_math_sdp_allowed, cuda.allow_fp16_bf16_reduction_math_sdp),
        (
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda now: torch.use_deterministic_algorithms(now[0], warn_only=now[1]),
        ),
        *(
            (partial(getattr, of, name), partial(setattr, of, name))
            for of, name in (
                (onednn, "enabled"),
                (cudnn, "enabled"),
                (cudnn, "benchmark"),
                (cudnn, "deterministic"),
            )
        ),
    )


@cache
def _settle_attention(kind: str) -> None:
    """Lets torch choose the order of its attention kernels, which it does at its first call.

    On Hopper and later it puts cuDNN first. Settings that were read before the first call would
    give a replay another kernel than its forward had.
    """
    if kind in GPUS and getattr(torch, kind).is_available():
        with torch.no_grad(), disable_current_modes(), without_torch_function():
            heads = torch.zeros(1, 1, 8, 8, dtype=torch.float16, device=kind)
            torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)


class Surroundings(NamedTuple):
    """The settings of torch at one moment.

    flags: the values of the settings of `_flags`.
    modes: the modes on torch's functions, outermost first.
    hooks: the dictionaries of hooks on all modules.
    """

    flags: tuple[Any, ...]
    modes: tuple[Any, ...]
    hooks: Contents

    @classmethod
    def now(cls, kinds: set[str]) -> Surroundings:
        """Returns the present settings. kinds: the kinds of devices in use, such as "cuda"."""
        for kind in kinds:
            _settle_attention(kind)
        hooks = Contents()
        for found in hooks_of_all_modules:
            hooks.note("", found)
        flags = tuple(read() for read, _ in _flags())
        return cls(flags, tuple(function_modes()), hooks)

    def kinds(self) -> tuple[Any, ...]:
        """Returns the settings with the kinds of modes and hooks in place of these, as a key."""
        return (
            str(self.flags),
            (*map(type, self.modes), *map(type, dispatch_modes())),
            tuple(
                kind_of(hook) for found in self.hooks.containers for hook in found.value.values()
            ),
            kind_of((hooks_in_force() or (None,))[0]),  # of the caller, which may round
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Gives torch these settings inside the block, and after it the present ones."""
        with ExitStack() as around:
            for (read, put), then in zip(_flags(), self.flags, strict=True):
                if (now := read()) != then:
                    around.callback(put, now)
                    put(then)
            around.enter_context(self.hooks.restored())
            around.enter_context(_modes_as(self.modes))
            yield


def kind_of(function: Any) -> Any:
    """Returns what stays the same when a function is made again, as in each step: its code."""
    function = getattr(function, "func", getattr(function, "__func__", function))  # a partial's
    return getattr(function, "__code__", type(function))


@contextmanager
def _modes_as(modes: tuple[Any, ...]) -> Iterator[None]:
    now = tuple(function_modes())
    _exchange(modes)
    try:
        yield
    finally:
        _exchange(now)


def _exchange(modes: tuple[Any, ...]) -> None:
    for _ in function_modes():
        pop_function_mode()
    for mode in modes:
        push_function_mode(mode)
