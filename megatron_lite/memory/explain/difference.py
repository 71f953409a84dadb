"""Finds the tensors that differ if the measured kept bytes are not the predicted ones.

Predicted terms and measured storages have no names in common. They are paired by size: first within
one module of one layer, then within a layer, then anywhere. The unpaired terms and storages are the
difference. A term may stand for several storages, such as the mean and the deviation of a norm. If
several tensors of one module have the same size, the report may name any of them. Standard library
only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
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

    def exact(term: Term, one: Saved) -> bool:
        return _layer(term, first_layer) == one.layer and _module(term, first_layer) == one.module

    def near(term: Term, one: Saved) -> bool:
        return _layer(term, first_layer) == one.layer

    missing, left = list(terms), list(saved)
    # The surest pairs first: by module, by layer, several storages for one term, by size alone.
    for together in (exact, near):
        missing = [term for term in missing if not _take(term, left, together)]
    missing = [term for term in missing if not _take_several(term, left, first_layer)]
    missing = [term for term in missing if not _take(term, left, lambda term, one: True)]
    return Difference(
        tuple(sorted(left, key=lambda one: -one.num_bytes)),
        tuple(sorted(missing, key=lambda term: -term.num_bytes)),
        first_layer,
    )


def _take(term: Term, left: list[Saved], together: Callable[[Term, Saved], bool]) -> bool:
    """Removes the storages that make up the term from `left`. Returns whether it found them."""
    # A term is one storage, or up to MOST_PARTS equal storages that one module saved.
    candidates = [one for one in left if together(term, one)]
    for parts in range(1, MOST_PARTS + 1):
        groups: dict[Hashable, list[Saved]] = {}
        for one in candidates:
            if one.num_bytes * parts == term.num_bytes:
                group = groups.setdefault(one.module if parts > 1 else 0, [])
                group.append(one)
                if len(group) == parts:
                    for taken in group:
                        left.remove(taken)
                    return True
    return False


def _take_several(term: Term, left: list[Saved], first_layer: int) -> bool:
    """Removes several storages of different sizes in one layer that together make up the term.

    Returns whether it found them. The statistics of the norms of query and key are an example.
    """
    # The number of combinations grows fast: with more than MOST_CANDIDATES it does not search.
    candidates = [
        one
        for one in left
        if one.layer == _layer(term, first_layer) and one.num_bytes < term.num_bytes
    ]
    for parts in range(
        2, min(MOST_PARTS, len(candidates)) + 1 if len(candidates) <= MOST_CANDIDATES else 0
    ):
        for group in combinations(candidates, parts):
            if sum(one.num_bytes for one in group) == term.num_bytes:
                for taken in group:
                    left.remove(taken)
                return True
    return False


def _layer(term: Term, first_layer: int) -> int | None:
    return None if term.layer is None else term.layer + first_layer


def _module(term: Term, first_layer: int) -> str | None:
    if term.module is None or term.layer is None:
        return None
    return f"{LAYERS}{term.layer + first_layer}.{term.module}".removesuffix(".")


def _first(found: Sequence[str]) -> str:
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return "; ".join(found[:MOST_NAMED]) + more
