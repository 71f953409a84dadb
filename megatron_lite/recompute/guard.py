"""Decides which calls of a layer are verified, and remembers what their replays showed.

A layer that repeats itself once will do so again, unless something changes. So with
`verify="first"` a call is verified if its signature is new, and the calls 2, 4, 8, 16, .. of each
layer are: some layers change later, such as a teacher that equals its student at first. A signature
counts only after a replay has been compared, so a forward without backward does not use it up.
"""

from __future__ import annotations

from operator import attrgetter, itemgetter
from typing import Any, Literal, NamedTuple

from torch import Tensor

from .contents import Contents, kind_of, shape_of
from .layer_state import state_of

MAX_SHAPES = 4  # so many sets of shapes are verified, because lengths may vary for ever

Verify = bool | Literal["first"]


class Signature(NamedTuple):
    """Describes all that a replay may depend on but values. shapes: those of the arguments."""

    kinds: int
    shapes: tuple[Any, ...]

    @classmethod
    def of(cls, contents: Contents, given: list[Any], settings: tuple[Any, ...]) -> Signature:
        """Returns the signature of a call.

        contents: what the layer holds.
        given: the values among its arguments. settings: those of torch.
        """
        tensors = [each for each in given if isinstance(each, Tensor)]
        states = [*map(state_of, contents.parameters)]
        held = [hooks for _, *found in states for hooks in found if hooks]
        kinds = (
            contents.kinds,
            *map(type, given),
            *map(attrgetter("dtype", "requires_grad", "layout"), tensors),
            *[kind_of(hook) for hooks in held for hook in hooks.values()],
            *map(itemgetter(0), states),
            *settings,
        )
        return cls(hash(kinds), tuple(map(shape_of, tensors)))


class Guard:
    """The verification of one layer: which of its calls, and what their replays showed.

    verify: "first", or True for all calls, or False for none.
    stops_early: whether a replay may end before the layer does, when all saved tensors are rebuilt.
        None until a replay has run to the end.
    calls: the number of calls so far.
    has_router: whether a forward chose by a top-k call. None before the first one.
    forms: of what the last call has saved, besides parameters.
    reads_again: whether a Function of the layer reads its saved tensors more than once.
    doubts: the numbers of saved tensors whose bytes differed in a replay, where all else agreed.
    harmless: the numbers of those whose difference backward does not read.
    """

    def __init__(self, verify: Verify, *, stops_early: bool | None = None) -> None:
        self.verify, self.stops_early = verify, stops_early
        self.reads_again = False
        self.forms: list[Any] = []
        self.has_router: bool | None = None
        self.doubts: set[int] = set()
        self.harmless: set[int] = set()
        self.calls = 0
        self._seen: set[int] = set()
        self._shapes: set[Signature] = set()

    def wants(self, signature: Signature | None) -> bool:
        """Tells whether this call is verified. Call it once for each call of the layer."""
        self.calls += 1
        if not signature:
            return bool(self.verify)
        return (
            self.calls & (self.calls - 1) == 0
            or bool(self.doubts)
            or signature.kinds not in self._seen
            or (signature not in self._shapes and len(self._shapes) < MAX_SHAPES)
        )

    def saw(self, signature: Signature) -> None:
        """Records that a replay of a call with this signature was compared."""
        self._seen.add(signature.kinds)
        if len(self._shapes) < MAX_SHAPES:
            self._shapes.add(signature)
