"""Makes something happen to a rank at a named place: `happens(place, action, iteration=3)`, called in it before it starts."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_lite.checkpointing import write
from megatron_lite.data import gpt
from megatron_lite.recompute.phase import is_recomputing
from megatron_lite.tensor_parallel import column_linear
from megatron_lite.training import build, loop
from megatron_lite.training.runner import StageRunner

# Where, and by patching what: the first call there of the iteration that is under way.
PLACES: dict[str, tuple[Any, str]] = {
    "forward": (column_linear._ColumnParallelLinear, "forward"),
    "backward": (column_linear._ColumnParallelLinear, "backward"),
    "replay": (column_linear._ColumnParallelLinear, "forward"),
    "step": (loop, "train_step"),
    "evaluation": (StageRunner, "evaluate"),
    "saving": (write, "_write_tensors"),
    "index": (gpt, "build_sample_index"),
    "model": (build, "build_stages"),
}


def happens(place: str, action: Callable[[], object], *, iteration: int = 0) -> None:
    """`action()` once, at the place, during the iteration (counted from where the run started); 0: before the first."""
    steps, done = [0], [False]
    owner, name = PLACES[place]
    original = getattr(owner, name)

    def patched(*args: Any, **options: Any) -> Any:
        if not done[0] and steps[0] == iteration and is_recomputing() == (place == "replay"):
            done[0] = True
            action()
        return original(*args, **options)

    setattr(owner, name, staticmethod(patched) if place in ("forward", "backward", "replay") else patched)
    train_step = loop.train_step

    def counted(*args: Any, **options: Any) -> Any:
        steps[0] += 1
        return train_step(*args, **options)

    loop.train_step = counted  # type: ignore[assignment]


def builds_second(cache: Path) -> None:
    """Makes this rank build its datasets after another has begun with an index in that folder."""
    build_datasets = build.build_datasets

    def second(*args: Any, **options: Any) -> Any:
        while not list(cache.glob("*.lock")):
            time.sleep(0.01)
        return build_datasets(*args, **options)

    build.build_datasets = second  # type: ignore[assignment]
