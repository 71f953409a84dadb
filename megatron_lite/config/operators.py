"""The operators that `ops(...)` of a recompute policy can name, and the choice of kept results.

An entry is a group or one operator of torch, such as aten.mm.default. The groups are:

    matmul       every matrix product
    attention    the fused attention kernels, and the whole attention over context-parallel ranks.
                 Unfused attention, which builds its scores, has no such operator.
    collective   the all-reduces, all-gathers and reduce-scatters of tensor parallelism, and the
                 all-gather of keys and values of unfused attention over context-parallel ranks
    max          maxima, which scaled number formats need. The layers of this project have none.

NAME/N keeps the first result of each layer and every N-th after it, in the order of the forward.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

GROUPS = {
    "matmul": (
        "aten.mm.default",
        "aten.addmm.default",
        "aten.bmm.default",
        "aten.baddbmm.default",
        "aten.linear.default",
        "aten._grouped_mm.default",
    ),
    "attention": (
        "aten._flash_attention_forward.default",
        "aten._scaled_dot_product_flash_attention.default",
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "aten._scaled_dot_product_efficient_attention.default",
        "aten._scaled_dot_product_cudnn_attention.default",
        "aten._scaled_dot_product_fused_attention_overrideable.default",
        "megatron_lite.context_parallel_attention.default",
    ),
    # Functional forms: an in-place collective returns nothing that a policy could keep. A layer
    # with an ops(...) policy therefore runs its collectives in this form (parallel/collectives.py).
    "collective": (
        "_c10d_functional.all_reduce.default",
        "_c10d_functional.all_gather_into_tensor.default",
        "_c10d_functional.reduce_scatter_tensor.default",
        "_c10d_functional.all_to_all_single.default",
    ),
    "max": ("aten.max.default", "aten.max.dim"),
}
IN_GROUPS = frozenset(name for names in GROUPS.values() for name in names)


class OperatorEntry(NamedTuple):
    """One entry of `ops(...)`, such as `matmul/2`.

    name: the name of a group or of one operator.
    every: N, if every N-th result is kept.
    """

    name: str
    every: int

    @property
    def operators(self) -> tuple[str, ...]:
        """The operators that the entry names, each spelled namespace.op.overload."""
        return GROUPS.get(self.name, (self.name,))


def parse_entry(text: str) -> OperatorEntry:
    """Returns the entry that the text spells.

    Raises ValueError if the name is neither a group nor spelled like an operator. Raises it too if
    the name shows that the operator writes into its argument, since no result could be kept.
    """
    name, _, every = text.partition("/")
    if name not in GROUPS:
        if not re.fullmatch(r"\w+\.\w+\.\w+", name):
            raise ValueError(
                f"{name} is no group of operators ({', '.join(GROUPS)}) and no operator spelled "
                "namespace.op.overload, such as aten.mm.default"
            )
        namespace, operator, _ = name.split(".")
        if operator.endswith("_") or namespace == "c10d":
            raise ValueError(
                f"{name} writes into its argument: it has no result that could be kept"
                + (" (collective names those that have one)" if "c10d" in namespace else "")
            )
    return OperatorEntry(name, int(every or 1))


class Choice:
    """Decides which results of one run of one layer are kept.

    `keeps` must be called for every operator of the layer, in the order of the forward.
    """

    def __init__(self, ops: Sequence[str]) -> None:
        entries = [parse_entry(text) for text in ops]
        self._rules = [(frozenset(entry.operators), entry.every) for entry in entries]
        self._seen = [0] * len(entries)

    def keeps(self, operator: str) -> bool:
        """Returns whether the result of this call is kept."""
        # Every rule counts the call, also after another rule has decided: rules count separately.
        kept = False
        for number, (operators, every) in enumerate(self._rules):
            if operator in operators:
                kept |= self._seen[number] % every == 0
                self._seen[number] += 1
        return kept
