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

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.config import optimizer_settings
from megatron_lite.config.optimizer_settings import together
from megatron_lite.parallel.compiled import CompiledKernels, at_least_float32
from megatron_lite.parallel.torch_internals import foreach_copy_, is_fake

if TYPE_CHECKING:
    from .adam_update import AdamW
    from .layouts import Piece

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
    wide = at_least_float32(like.dtype)
    dtype = {"fp32": wide, "bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    state = torch.zeros(like.shape, dtype=dtype, device=device)
    if kind == "fp16":
        setattr(state, SCALES, torch.ones(len(parts_of(state)), device=device))
    return state


def read(states: Sequence[Tensor], places: Sequence[slice]) -> list[Tensor]:
    """Returns parts of states of one format as float32 (float64): the states' own memory, if they
    have that format."""
    own = _places(states, places)
    values = _wide(own, at_least_float32(own[0].dtype))
    for state, place, part in zip(states, places, values, strict=True):
        if (scales := getattr(state, SCALES, None)) is not None:
            part.mul_(scales[place.start // optimizer_settings.PART])
    return values


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
    if (scales := getattr(state, SCALES, None)) is not None:
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
    state.detach().view(-1)[part].copy_(values)


def write_whole_(state: Tensor, values: Tensor) -> None:
    """Overwrites a state with values of any format, rounding once."""
    flat = values.detach().reshape(-1)
    for part in parts_of(state):
        write_(state, part, flat[part])


def whole(state: Tensor) -> Tensor:
    """Returns a state as float32 (float64), in its shape."""
    if state.dtype.itemsize > 2:
        return state
    places = parts_of(state)
    return torch.cat(read([state] * len(places), places)).view(state.shape)


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

    def stored(self, names: Iterable[str]) -> list[Tensor]:
        """Returns the whole main weight, and the states of these names."""
        return [self.piece.master, *(self.piece.states[name] for name in names)]


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
        # Those with scales or a rounding of their own are updated each by itself.
        states = parts[0].stored(rule.names)
        alone = rule.keys or any(hasattr(state, SCALES) for state in states)
        if rule.kernels is not None and not alone:
            parts = _update_compiled(rule, rule.kernels, parts, skipped)
        for several in (
            [[one] for one in parts] if alone else together(parts, lambda one: one.weight.numel())
        ):
            values = _update_parts(rule, several, [one.grad for one in several], skipped)
            weights = [one.weight for one in several]
            if pieces[0].master.dtype.itemsize == 2:
                # what is stored has been rounded, and a skipped step changes nothing
                values = [torch.where(skipped > 0.0, weights[0], values[0])]
            if pieces[0].weight is not pieces[0].master:
                foreach_copy_(weights, values)
            del values, weights  # or else they live while the next part is updated
    # It waits for the device, and for all but the last copies.
    if on_host and (is_fake(skipped) or not skipped.item()):
        assert rule.link is not None
        for part, grad in zip(on_host, rule.link.arriving(on_host), strict=True):
            rule.link.send(part, *_update_parts(rule, [part], [grad], None))
        rule.count_on_host += 1.0


def _update_compiled(
    rule: AdamW, kernels: CompiledKernels, parts: Sequence[Part], skipped: Tensor
) -> list[Part]:
    """Updates and publishes parts by one compiled kernel each, which makes no float32 copy. Returns
    the small ones, which are left.

    All tensors begin at aligned elements, as the buckets have them: compiled code needs that.
    """
    config, settings = rule.config, parts[0].settings
    betas, rate = (config.adam_beta1, config.adam_beta2), settings["lr"]
    one, two = (1.0 - beta ** rule.count.double() for beta in betas)  # as torch's kernel has them
    decay = torch.ones_like(skipped) - rate * settings["weight_decay"]
    shared = [decay, (rate / one).to(skipped.dtype), two.sqrt().to(skipped.dtype), skipped]
    small = []
    for part in parts:
        if part.weight.numel() < optimizer_settings.SMALL:
            small.append(part)
            continue
        stored = [state.detach().view(-1)[part.place] for state in part.stored(rule.names)]
        if part.piece.weight is not part.piece.master:
            stored.append(part.weight)
        kernels(adam_, part.grad, *shared, *stored, betas=betas, eps=config.adam_eps)
    return small


def adam_(
    grad: Tensor,
    decay: Tensor,
    rate: Tensor,
    root: Tensor,
    skipped: Tensor,
    *stored: Tensor,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Writes AdamW's update to what is stored: main weights, both moments, and the weights of the
    model if they are others. decay, rate, root, skipped: 0-d."""
    master, average, square = (one.to(at_least_float32(one.dtype)) for one in stored[:3])
    grad, stays = grad.to(master.dtype), skipped > 0.0
    average = average.lerp(grad, 1.0 - betas[0])
    square = betas[1] * square + (1.0 - betas[1]) * grad * grad
    master = master * decay - rate * average / (square.sqrt() / root + eps)
    for own, new in zip(stored, (master, average, square, master), strict=False):
        own.copy_(torch.where(stays, own, new))


def _update_parts(
    rule: AdamW, parts: Sequence[Part], grads: list[Tensor], found_inf: Tensor | None
) -> list[Tensor]:
    """Updates the states of parts, where they are. Returns their main weights before they are
    stored."""
    kinds = [*zip(*(part.stored(rule.names) for part in parts), strict=True)]
    places = [part.place for part in parts]
    values = [read(states, places) for states in kinds]
    count = rule.count_on_host + 1.0 if parts[0].piece.on_host else rule.count
    rule.update(
        values[0],
        _wide(grads, values[0][0].dtype),
        values[1:],
        [count] * len(parts),
        found_inf=found_inf,
        **parts[0].settings,
    )
    for states, found in zip(kinds, values, strict=True):
        if found[0].dtype == states[0].dtype:
            continue
        if len(parts) > 1:
            foreach_copy_(_places(states, places), found)
            continue
        (part,), chances = parts, None
        if states is kinds[0] and part.piece.name in rule.keys:
            first = part.piece.start + part.place.start
            chances = noise(rule.keys[part.piece.name], count - 1.0, first, found[0])
        write_(states[0], part.place, found[0], chances)
    return values[0]


def _places(states: Sequence[Tensor], places: Sequence[slice]) -> list[Tensor]:
    return [state.detach().view(-1)[place] for state, place in zip(states, places, strict=True)]


def _wide(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Returns the tensors in a dtype: themselves, or copies."""
    if tensors[0].dtype == dtype:
        return tensors
    copies = [torch.empty_like(one, dtype=dtype) for one in tensors]
    foreach_copy_(copies, tensors)
    return copies
