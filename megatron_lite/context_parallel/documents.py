"""Where the documents of packed samples begin and end. A training process without any does not load
this file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor


class CuSeqlens(NamedTuple):
    """The documents of packed samples, as lists and not as masks.

    bounds: on the host, over the samples in a row: 0, the ends of the documents, b s. A sample ends
        its last document.
    ends: the same numbers on the device, in int32.
    """

    bounds: Sequence[int]
    ends: Tensor

    @classmethod
    def of(
        cls, bounds: Sequence[int], *, batch: int, seq_length: int, device: torch.device
    ) -> CuSeqlens:
        """Returns the documents between these bounds.

        ValueError: they are no documents of `batch` whole samples.
        """
        total = batch * seq_length
        needed, rises = range(0, total + 1, seq_length), all(a < b for a, b in pairwise(bounds))
        if not rises or not {*needed} <= {*bounds} or bounds[0] != 0 or bounds[-1] != total:
            raise ValueError(
                f"the bounds of documents must rise from 0 to {total} and pass every multiple of "
                f"{seq_length}: cut those that are longer than a sequence (got {[*bounds[:9]]})"
            )
        ends = torch.tensor(bounds, dtype=torch.int32)
        if device.type == "cuda":
            ends = ends.pin_memory().to(device, non_blocking=True)
        return cls(bounds, ends)

    def starts(self, seq_length: int) -> Tensor:
        """Returns for each token, [b, s], the place of the first token of its document."""
        begins = self.ends[:-1] % seq_length
        each = begins.repeat_interleave(self.ends.diff(), output_size=self.bounds[-1])
        return each.view(-1, seq_length)

    @property
    def longest(self) -> int:
        """The tokens of the longest document."""
        return max(stop - start for start, stop in pairwise(self.bounds))

    def one_by_one(self, run: Callable[..., Iterable[Tensor]], *tensors: Tensor) -> Any:
        """Returns the results of `run` for the rows of each document, joined.

        tensors: each [b, .., n, d], as the results. They lie in memory as [n, b, .., d].
        """
        if len(self.bounds) == 2:
            return run(*tensors)
        b, _, n = tensors[0].shape[:3]
        whole: list[Tensor] = []
        for start, stop in pairwise(self.bounds):
            sample = slice(start // n, start // n + 1)
            rows = sample, slice(None), slice(start % n, (stop - 1) % n + 1)
            found = [*run(*(tensor[rows] for tensor in tensors))]
            whole = whole or [
                one.new_empty(n, b, one.shape[1], *one.shape[3:]).movedim(0, 2) for one in found
            ]
            for one, part in zip(whole, found, strict=True):
                one[rows] = part
        return whole
