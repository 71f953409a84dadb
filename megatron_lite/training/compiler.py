"""torch.compile on each layer, and its own trade of memory for time: `--activation-memory-budget`.

The budget is a ratio, not a number of bytes: of what a compiled graph keeps for backward, between recomputing all of it (0) and
nothing (1, torch's default). Each layer is one graph, and gets the same ratio; dropout ends graphs, and then each piece has it.
Bytes are the compiler's choice, so they are neither predicted nor compared, and gradients equal those of eager layers up to
rounding only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_lite.model.gpt import GPTModel


def compile_layers_(model: GPTModel) -> None:
    """Each layer compiles itself when it is first called, for seconds to minutes."""
    for layer in model.decoder.layers:
        layer.compile()


@contextmanager
def memory_budget(ratio: float | None) -> Iterator[None]:
    """Graphs that are compiled inside get this budget; torch's own where it is None."""
    if ratio is None:
        yield
        return
    import torch._functorch.config as compiler  # late: seconds

    with compiler.patch(activation_memory_budget=ratio):
        yield
