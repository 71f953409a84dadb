"""The operators that `ops(...)` of a recompute policy names, in groups or one by one, and which of their results are kept.

    matmul       every matrix product
    attention    every fused attention kernel, or all of it over context-parallel ranks; where the scores are built there is none
    collective   the sums and gathers of tensor parallelism, and the gather of keys for scores over context-parallel ranks
    max          maxima, which scaled number formats need; our layers have none

NAME/N keeps the first result, and every N-th after it, in each layer; results are counted in the order of the forward.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

GROUPS = {
    "matmul": ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default", "aten.linear.default"),
    "attention": ("aten._scaled_dot_product_flash_attention.default", "aten._scaled_dot_product_flash_attention_for_cpu.default",
                  "aten._scaled_dot_product_efficient_attention.default", "aten._scaled_dot_product_cudnn_attention.default",
                  "aten._scaled_dot_product_fused_attention_overrideable.default",
                  "megatron_lite.context_parallel_attention.default"),
    # In place they would write where no policy looks: inside a layer that keeps results the collectives run in this form.
    "collective": ("_c10d_functional.all_reduce.default", "_c10d_functional.all_gather_into_tensor.default",
                   "_c10d_functional.reduce_scatter_tensor.default", "_c10d_functional.all_to_all_single.default"),
    "max": ("aten.max.default", "aten.max.dim"),
}
IN_GROUPS = frozenset(name for names in GROUPS.values() for name in names)


class Entry(NamedTuple):
    """`matmul/2`. name: of a group or of one operator."""

    name: str
    every: int

    @property
    def operators(self) -> tuple[str, ...]:
        """namespace.op.overload of each."""
        return GROUPS.get(self.name, (self.name,))


def parse_entry(text: str) -> Entry:
    """ValueError: neither a group nor spelled like an operator; one that no policy may keep, as far as its name tells."""
    name, _, every = text.partition("/")
    if name not in GROUPS:
        if not re.fullmatch(r"\w+\.\w+\.\w+", name):
            raise ValueError(f"{name} is no group of operators ({', '.join(GROUPS)}) and no operator spelled "
                             "namespace.op.overload, such as aten.mm.default")
        namespace, operator, _ = name.split(".")
        if operator.endswith("_") or namespace == "c10d":
            raise ValueError(f"{name} writes into its argument: it has no result that could be kept"
                             + (" (collective names those that have one)" if "c10d" in namespace else ""))
    return Entry(name, int(every or 1))


class Choice:
    """Which results of one run of one layer are kept. To be told of every operator, in the order of the forward."""

    def __init__(self, ops: Sequence[str]) -> None:
        entries = [parse_entry(text) for text in ops]
        self._rules = [(frozenset(entry.operators), entry.every) for entry in entries]
        self._seen = [0] * len(entries)

    def keeps(self, operator: str) -> bool:
        """Whether this result is kept."""
        kept = False
        for number, (operators, every) in enumerate(self._rules):
            if operator in operators:
                kept |= self._seen[number] % every == 0
                self._seen[number] += 1
        return kept
