"""Finds the tensors that differ if the measured kept bytes are not the predicted ones.

Predicted terms and measured storages have no names in common. They are paired by size, first within
a module and then within a layer, also several storages for one term, such as the mean and the
deviation of a norm. What stays unpaired is the difference. Standard library only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from megatron_lite.memory.predict.kept_tensors import Term

LAYERS = "decoder.layers."
MOST_PARTS = 6
MOST_CANDIDATES = 12
MOST_NAMED = 3


class Saved(NamedTuple):
    """A measured storage.

    module: the module whose forward saved it first. shape, dtype: those of the saved tensor.
    """

    module: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int

    @property
    def layer(self) -> int | None:
        """The number of the layer in the whole model; None outside of the layers."""
        number = (
            self.module.removeprefix(LAYERS).partition(".")[0]
            if self.module.startswith(LAYERS)
            else ""
        )
        return int(number) if number.isdigit() else None

    def __str__(self) -> str:
        place = "outside of the layers" if self.layer is None else f"layer {self.layer}"
        return (
            f"{place}, module {self.module or '(none)'}: {self.dtype} {list(self.shape)}, "
            f"{self.num_bytes:,} bytes"
        )


class Difference(NamedTuple):
    """The terms and storages without a partner.

    saved: the storages that are measured and not predicted.
    missing: the terms that are predicted and not measured. Their layers count within the stage.
    first_layer: the number of the stage's first layer in the whole model.
    """

    saved: tuple[Saved, ...]
    missing: tuple[Term, ...]
    first_layer: int = 0

    def __str__(self) -> str:
        missing = [
            f"{self._place(term)}, operation {term.operation}: {term.tensor.name}, "
            f"{term.num_bytes:,} bytes"
            for term in self.missing
        ]
        sides = (
            ("saved but not predicted", [str(saved) for saved in self.saved]),
            ("predicted but not saved", missing),
        )
        return "; ".join(f"{what}: {_first(found)}" for what, found in sides if found)

    def _place(self, term: Term) -> str:
        if term.layer is None:
            return "outside of the layers"
        return f"layer {term.layer + self.first_layer}"


def difference(
    terms: Sequence[Term], saved: Sequence[Saved], *, first_layer: int = 0
) -> Difference:
    """Returns the terms and storages that remain after pairing.

    first_layer: the number of the stage's first layer in the whole model.
    """
    left = defaultdict[int | None, list[Saved]](list)
    for one in saved:
        left[one.layer].append(one)
    missing = list(terms)
    # The surest pairs first. A unit's states of random streams are saved outside of its layer.
    for place in ("module", "layer", "outside"):
        for most in (1, MOST_PARTS):
            unpaired = []
            for term in missing:
                layer = None if term.layer is None else term.layer + first_layer
                module = f"{LAYERS}{layer}.{term.module}".removesuffix(".")
                layer = None if place == "outside" else layer
                near = [one for one in left[layer] if place != "module" or one.module == module]
                taken = _parts(term, near, most)
                for one in taken:
                    left[layer].remove(one)
                unpaired += [] if taken else [term]
            missing = unpaired
    rest = (one for group in left.values() for one in group)
    return Difference(
        tuple(sorted(rest, key=lambda one: -one.num_bytes)),
        tuple(sorted(missing, key=lambda term: -term.num_bytes)),
        first_layer,
    )


def _parts(term: Term, candidates: Sequence[Saved], most: int) -> tuple[Saved, ...]:
    """Returns at most so many storages whose bytes together are those of the term."""
    # The number of combinations grows fast, so many candidates are only looked at one by one.
    for number in range(1, 1 + (most if len(candidates) <= MOST_CANDIDATES else 1)):
        for group in combinations(candidates, number):
            if sum(one.num_bytes for one in group) == term.num_bytes:
                return group
    return ()


def _first(found: Sequence[str]) -> str:
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return "; ".join(found[:MOST_NAMED]) + more
