"""Finds the tensors that differ if the measured kept bytes are not the predicted ones.

Predicted terms and measured storages have no names in common. They are paired by size, within a
module, a layer and the stage, also two equal storages with one term, such as the mean and the
deviation of a norm. What stays unpaired is the difference. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from megatron_lite.memory.predict.kept_tensors import Term

LAYERS = "decoder.layers."
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
        number = self.module.removeprefix(LAYERS).partition(".")[0]
        return int(number) if self.module.startswith(LAYERS) and number.isdigit() else None


def difference(terms: Sequence[Term], saved: Sequence[Saved], *, first_layer: int = 0) -> str:
    """Returns the terms and storages that remain after pairing as text; "" if none do.

    first_layer: the number of the stage's first layer in the whole model. The layers of terms count
        within the stage.
    """
    left = list(saved)
    missing = [(None if one.layer is None else one.layer + first_layer, one) for one in terms]
    # The surest pairs first. A unit's states of random streams are saved outside of its layer.
    for within, parts in product(("module", "layer", "stage"), (1, 2)):
        for place, term in list(missing):
            module = f"{LAYERS}{place}.{term.module}".removesuffix(".")
            near = [
                one
                for one in left
                if one.num_bytes * parts == term.num_bytes
                and (within != "layer" or one.layer == place)
                and (within != "module" or one.module == module)
            ][:parts]
            if len(near) == parts:
                missing.remove((place, term))
                for one in near:
                    left.remove(one)
    found = {
        "saved but not predicted": [
            (
                one.num_bytes,
                f"{_layer(one.layer)}, module {one.module or '(none)'}: {one.dtype} "
                f"{list(one.shape)}",
            )
            for one in left
        ],
        "predicted but not saved": [
            (one.num_bytes, f"{_layer(place)}, operation {one.operation}: {one.tensor.name}")
            for place, one in missing
        ],
    }
    return "; ".join(f"{what}: {_largest(rows)}" for what, rows in found.items() if rows)


def _layer(number: int | None) -> str:
    return "outside of the layers" if number is None else f"layer {number}"


def _largest(rows: list[tuple[int, str]]) -> str:
    rows.sort(key=lambda row: -row[0])
    named = [f"{text}, {size:,} bytes" for size, text in rows[:MOST_NAMED]]
    return "; ".join(named) + (f" and {len(rows) - MOST_NAMED} more" if rows[MOST_NAMED:] else "")
