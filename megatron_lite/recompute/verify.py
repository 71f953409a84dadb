"""Compares a replay with its forward, value by value: hashes of what each region returned, and of the random streams.

For `--recompute-verify`. Each comparison waits for the device. Without the flag nothing here runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_lite.parallel.rng import Generators

CHUNK = 2**20
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}


class RecomputeMismatch(RuntimeError):
    """A replay computed something else than its forward: gradients from it would be wrong."""


class Seen(NamedTuple):
    """What was at one place: the tensors' hashes, and those of the streams' states at that moment."""

    place: str
    tensors: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    streams: dict[str, int]


class Record:
    """What one unit or region saw in its forward, and the comparison of every replay with it.

    module: what runs inside, whose buffers must not change.
    """

    def __init__(self, what: str, rng: Generators | None, module: nn.Module | None = None) -> None:
        self.what, self.rng, self._module = what, rng, module
        self._seen: list[Seen] = []
        self._complete = False
        self._position = 0

    def watch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose first call is noted and whose later calls are compared: arguments, what `see` is told, results."""

        def watched(*args: Any) -> Any:
            self._position = 0
            self.see(f"{self.what}, input", args)
            buffers = self._buffers()
            outputs = function(*args)
            changed = [name for name, value in self._buffers().items() if value != buffers[name]]
            if changed:
                raise RecomputeMismatch(f"{self.what} changes its buffer {changed[0]}: a replay would change it a second time")
            self.see(f"{self.what}, output", outputs)
            self._complete = True
            return outputs

        return watched

    def see(self, place: str, values: Any) -> None:
        """Takes the tensors among `values` (a tensor, or a sequence). RecomputeMismatch where a replay differs."""
        tensors = [value for value in (values if isinstance(values, (tuple, list)) else (values,)) if isinstance(value, Tensor)]
        now = Seen(place, tuple(map(digest, tensors)), tuple(tuple(tensor.shape) for tensor in tensors), self._streams())
        if not self._complete:
            self._seen.append(now)
            return
        before = self._seen[self._position]
        self._position += 1
        if now != before:
            raise RecomputeMismatch(_difference(before, now))

    def _buffers(self) -> dict[str, int]:
        return {} if self._module is None else {name: digest(buffer) for name, buffer in self._module.named_buffers()}

    def _streams(self) -> dict[str, int]:
        if self.rng is None:
            return {}
        return {name: digest(state) for name, state in self.rng.snapshot().states.items()}


def digest(tensor: Tensor) -> int:
    """A 64-bit hash of the tensor's bits and of their places."""
    flat = tensor.detach().contiguous().view(-1)
    bits = flat.view(INTEGERS[flat.element_size()])
    if bits.device.type == "cpu":
        return int.from_bytes(hashlib.blake2b(bytes(bits.view(torch.uint8).numpy()), digest_size=8).digest(), "little")
    return digest_by_places(bits)


def digest_by_places(bits: Tensor) -> int:
    """For integers of at most 32 bits on any device: the sum of each times an odd number of its place, modulo 2^64."""
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), CHUNK):
        part = bits[start : start + CHUNK].long() + 1
        places = torch.arange(start + 1, start + 1 + part.numel(), device=bits.device)
        total += (part * (2 * (places * 0x9E3779B97F4A7C1 + 0x632BE59BD9B4E01) + 1)).sum()  # wraps around
    return int(total.item())


def _difference(before: Seen, now: Seen) -> str:
    if now.place != before.place or now.shapes != before.shapes:
        return (f"recomputation took another path: {before.place} with shapes {before.shapes} in forward, {now.place} with "
                f"{now.shapes} in the replay")
    streams = [name for name in before.streams if now.streams[name] != before.streams[name]]
    random = (f"RNG stream {', '.join(streams)} stood elsewhere than in forward" if streams else "the RNG streams agree"
              if before.streams else "no RNG stream was compared")
    changed = [number for number, (one, other) in enumerate(zip(before.tensors, now.tensors, strict=True)) if one != other]
    what = f"tensor {changed[0]} {list(now.shapes[changed[0]])} differs" if changed else "the tensors agree"
    return f"a replay is not what its forward was at {now.place}: {what} from the forward's; {random}" if changed else (
        f"a replay is not what its forward was at {now.place}: {what}, but {random}")
