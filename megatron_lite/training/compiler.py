"""torch.compile on each layer, and its own trade of memory for time: `--activation-memory-budget`.

The budget is a ratio from 0 to 1, not a number of bytes. It limits the bytes that a compiled graph
keeps for backward: 0 recomputes everything, 1 (torch's default) recomputes nothing. Each layer is
one graph, and all get the same ratio. Dropout breaks a layer into several graphs, and each of them
gets the ratio. The compiler chooses the kept bytes, so they are neither predicted nor compared.
Gradients equal those of eager layers up to rounding only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_lite.model.gpt import GPTModel
from megatron_lite.parallel.torch_internals import compiler_settings


def compile_layers_(model: GPTModel) -> None:
    """Marks each layer for torch.compile. Its first call compiles it, for seconds to minutes."""
    for layer in model.decoder.layers:
        layer.compile()


@contextmanager
def memory_budget(ratio: float | None) -> Iterator[None]:
    """Gives graphs that are compiled inside the block this budget. None leaves torch's default."""
    if ratio is None:
        yield
        return
    with compiler_settings().patch(activation_memory_budget=ratio):
        yield
