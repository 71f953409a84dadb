"""The layout of saved parameters over tensor-parallel ranks, as parameters_pp*.json has it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from megatron_lite.config import plain
from megatron_lite.parallel.parameter_spec import ParameterSpec

MOST_DIMS = 8
MOST_ELEMENTS = 2**48
MOST_BLOCKS = 64


@dataclass(frozen=True, kw_only=True)
class SavedLayout:
    """The layout of a saved parameter over tensor-parallel (TP) ranks.

    global_shape: the shape of the whole parameter, without padding.
    tp_dim: the dim that is split over TP ranks; None if every TP rank holds the whole parameter.
    tp_blocks: into how many blocks tp_dim falls, each of which is split over the ranks.
    padded_length: the length of tp_dim with padding; None without padding.
    pp_rank: the pipeline rank whose files hold the parameter.
    """

    global_shape: tuple[int, ...]
    tp_dim: int | None
    tp_blocks: int
    padded_length: int | None
    pp_rank: int = 0

    @classmethod
    def of(cls, spec: ParameterSpec) -> SavedLayout:
        """Returns the layout of a parameter in this run."""
        return cls(
            global_shape=spec.global_shape,
            tp_dim=spec.tp_dim,
            tp_blocks=spec.tp_blocks,
            padded_length=spec.padded_length,
        )

    @classmethod
    def from_plain(cls, values: object, name: str, *, pp_rank: int, tp_size: int) -> SavedLayout:
        """Reads the fields that `to_plain` wrote for the named parameter.

        pp_rank: the pipeline rank whose file contains them.
        tp_size: the number of TP ranks over which the parameter was split.
        Raises ValueError on a split that no run has.
        """
        try:
            found = plain.as_object(values, "the layout")
            plain.check_names(found, _FIELDS, "the layout")
            sizes = plain.as_list(plain.field(found, "global_shape"), "global_shape")
            if len(sizes) > MOST_DIMS:
                raise ValueError(
                    f"global_shape must have at most {MOST_DIMS} dims (got {len(sizes)})"
                )
            shape = tuple(plain.as_whole(size, "global_shape", 0, MOST_ELEMENTS) for size in sizes)
            if math.prod(shape) > MOST_ELEMENTS:
                raise ValueError(
                    f"global_shape must have at most {MOST_ELEMENTS} elements (got "
                    f"{math.prod(shape)})"
                )
            layout = cls(
                global_shape=shape,
                pp_rank=pp_rank,
                tp_blocks=plain.whole(found, "tp_blocks", 1, MOST_BLOCKS),
                tp_dim=_optional(found, "tp_dim", 0, len(shape) - 1),
                padded_length=_optional(found, "padded_length", 0, MOST_ELEMENTS),
            )
            layout._check_split(tp_size)
        except ValueError as error:
            raise ValueError(f"parameter {plain.quoted(name)}: {error}") from error
        return layout

    def to_plain(self) -> dict[str, Any]:
        """Returns the fields as a JSON object, without `pp_rank`, which the file's name holds."""
        return {name: value for name, value in asdict(self).items() if name != "pp_rank"}

    def spec(self) -> ParameterSpec:
        """Returns the split as a ParameterSpec."""
        return ParameterSpec(
            global_shape=self.global_shape,
            tp_dim=self.tp_dim,
            tp_blocks=self.tp_blocks,
            padded_length=self.padded_length,
        )

    def file_shape(self, tp_rank: int, tp_size: int) -> tuple[int, ...]:
        """Returns the shape of the tensor in the file of one TP rank: its rows without padding."""
        if self.tp_dim is None:
            return self.global_shape
        shape = list(self.global_shape)
        shape[self.tp_dim] = sum(span.length for span in self.spec().spans(tp_rank, tp_size))
        return tuple(shape)

    def _check_split(self, tp_size: int) -> None:
        if self.tp_dim is None:
            if self.tp_blocks != 1 or self.padded_length is not None:
                raise ValueError(
                    "tp_blocks must be 1 and padded_length null if tp_dim is null (got "
                    f"{self.tp_blocks} and {self.padded_length})"
                )
            return
        length = self.global_shape[self.tp_dim]
        padded = length if self.padded_length is None else self.padded_length
        if self.padded_length is not None and self.tp_blocks != 1:
            raise ValueError(
                f"tp_blocks must be 1 if padded_length is given (got {self.tp_blocks})"
            )
        if padded < length or padded % (tp_size * self.tp_blocks):
            what = "padded_length" if self.padded_length is not None else "global_shape[tp_dim]"
            raise ValueError(
                f"{what} must be at least {length} and a multiple of tp_size x tp_blocks = "
                f"{tp_size * self.tp_blocks} (got {padded})"
            )


_FIELDS = tuple(field.name for field in fields(SavedLayout) if field.name != "pp_rank")


def _optional(values: dict[str, Any], name: str, low: int, high: int) -> int | None:
    return None if plain.field(values, name) is None else plain.whole(values, name, low, high)
