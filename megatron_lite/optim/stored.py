"""States of the optimizer in less than float32 or in host memory, which are read, written and
updated part by part.

    fp32    as it is
    bf16    rounded once, when an update writes it
    fp16    stored x scale, with a scale for each part that brings its largest value below 2^15

`--stochastic-rounding` rounds a main weight of fp16 to one of its two neighbours, so that it stays
where it is in the mean. The number that decides is a function of the seed, the parameter, the
update and the element: resumed runs and ZeRO-1's pieces draw the same ones.

Every update computes in float32. A scale is a power of two, so what is stored is exact in the
float32 of a checkpoint, and reading it back gives the same values. The states of a parameter are
cut into parts of at most PART elements, so that no float32 copy of a large one exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.config import optimizer_settings
from megatron_lite.optim.layouts import Piece
from megatron_lite.parallel.torch_internals import is_fake

if TYPE_CHECKING:
    from megatron_lite.optim.adam_update import AdamW

SCALES = "scales_of_parts"
HEADROOM = 15  # 2^15 is below float16's largest number
FRACTION = 13  # the bits of a float32 that float16 has not
LEAST_EXPONENT = -100  # so that the scale is no subnormal number


def parts_of(state: Tensor) -> list[slice]:
    """Returns the places of the parts in a flattened state."""
    size = optimizer_settings.PART
    return [slice(start, start + size) for start in range(0, state.numel(), size)]


def new_state(like: Tensor, kind: str, device: torch.device) -> Tensor:
    """Returns zeros in the shape of a weight. kind: "fp32" (float64 for such a weight), "bf16" or
    "fp16"."""
    wide = torch.promote_types(like.dtype, torch.float32)
    dtype = {"fp32": wide, "bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    state = torch.zeros(like.shape, dtype=dtype, device=device)
    if kind == "fp16":
        setattr(state, SCALES, torch.ones(len(parts_of(state)), device=device))
    return state


def read(state: Tensor, part: slice) -> Tensor:
    """Returns a part as float32 (float64): the state's own memory, if it has that format."""
    own = state.detach().view(-1)[part]
    if own.dtype.itemsize > 2:
        return own
    scales = getattr(state, SCALES, None)
    values = own.float()
    return values if scales is None else values.mul_(scales[part.start // optimizer_settings.PART])


def noise(key: int, update: Tensor, first: int, like: Tensor) -> Tensor:
    """Returns k / 2^13 in [0, 1) for each element of `like`, which is number `first` and so on of a
    parameter. update: the number of those before, 0-d."""
    number = torch.arange(first, first + like.numel(), device=like.device)
    mixed = _mixed(number + _mixed(update.long() + key))
    return (mixed & (2**FRACTION - 1)).float() / 2**FRACTION


def _mixed(number: Tensor) -> Tensor:
    """Returns numbers of 64 bits that look random: splitmix64, with signed shifts."""
    number = number * 0x1E3779B97F4A7C15
    for shift, factor in ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB)):
        number = (number ^ (number >> shift)) * factor
    return number ^ (number >> 31)


def _either_neighbour(values: Tensor, chances: Tensor) -> Tensor:
    """Rounds values below 2^15 to 11 bits, or to multiples of 2^-24, which are float16's least."""
    unit = torch.frexp(values).exponent.clamp(min=-13) - 11
    return torch.ldexp(torch.floor(torch.ldexp(values, -unit) + chances), unit)


def write_(state: Tensor, part: slice, values: Tensor, chances: Tensor | None = None) -> None:
    """Overwrites a part, rounding once. values: float32 (float64). chances: see `noise`; None
    rounds to the nearest."""
    own, scales = state.detach().view(-1)[part], getattr(state, SCALES, None)
    if scales is not None:
        scale = scales[part.start // optimizer_settings.PART]
        values = values.float()
        mantissa, exponent = torch.frexp(values.abs().max())
        # A largest value that float16 rounds up to a power of two has the next exponent when read.
        bits = 12 if chances is None else 11
        exponent = (exponent + (mantissa >= 1.0 - 2.0**-bits)).clamp(min=LEAST_EXPONENT)
        scale.copy_(torch.ldexp(torch.ones_like(scale), exponent - HEADROOM))
        values = values / scale
        if chances is not None:
            values = _either_neighbour(values, chances)
    own.copy_(values)


def write_whole_(state: Tensor, values: Tensor) -> None:
    """Overwrites a state with values of any format, rounding once."""
    flat = values.detach().reshape(-1)
    for part in parts_of(state):
        write_(state, part, flat[part])


def whole(state: Tensor) -> Tensor:
    """Returns a state as float32 (float64), in its shape."""
    if state.dtype.itemsize > 2:
        return state
    return torch.cat([read(state, part) for part in parts_of(state)]).view(state.shape)


class Part(NamedTuple):
    """A part of a piece that is updated by itself, and the settings of its group."""

    piece: Piece
    place: slice
    settings: dict[str, Any]

    @property
    def weight(self) -> Tensor:
        return self.piece.weight.detach().view(-1)[self.place]

    @property
    def grad(self) -> Tensor:
        return self.piece.grad.view(-1)[self.place]


def update_apart(
    rule: AdamW, groups: Sequence[tuple[list[Piece], dict[str, Any]]], skipped: Tensor
) -> None:
    """Updates and publishes the pieces of groups part by part, each with its group's settings."""
    on_host = []
    for pieces, settings in groups:
        parts = [Part(one, place, settings) for one in pieces for place in parts_of(one.weight)]
        if pieces[0].on_host:
            on_host += parts
            continue
        for part in parts:
            values = _update_part(rule, part, part.grad, found_inf=skipped)
            if part.piece.weight is not part.piece.master:
                # what is stored has been rounded, and a skipped step changes nothing
                part.weight.copy_(torch.where(skipped > 0.0, part.weight, values))
        for piece in pieces:
            rule.steps[piece.name] += 1.0 - skipped
    # It waits for the device, and for all but the last copies.
    if on_host and (is_fake(skipped) or not skipped.item()):
        assert rule.link is not None
        for part, grad in zip(on_host, rule.link.arriving(on_host), strict=True):
            rule.link.send(part, _update_part(rule, part, grad, found_inf=None))
        for name in {part.piece.name for part in on_host}:
            rule.steps[name] += 1.0


def _update_part(rule: AdamW, part: Part, grad: Tensor, found_inf: Tensor | None) -> Tensor:
    """Updates the states of a part, where they are. Returns its main weights before they are
    stored."""
    piece, place, settings = part
    states = [piece.master, *(rule.states[piece.name][key] for key in rule.names)]
    master, *others = values = [read(state, place) for state in states]
    rule.update(
        [master],
        [grad.to(master.dtype)],
        [[one] for one in others],
        [rule.steps[piece.name] + 1.0],
        found_inf=found_inf,
        **settings,
    )
    for state, value in zip(states, values, strict=True):
        if value.dtype != state.dtype:
            key = rule.keys.get(piece.name) if state is piece.master else None
            first = piece.start + place.start
            chances = None if key is None else noise(key, rule.steps[piece.name], first, value)
            write_(state, place, value, chances)
    return master
