"""What the ranks of a fit tell each other: figures, of which the highest count, and errors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_lite.recompute.replay import RecomputeMismatch

# Those that other ranks can raise with a text, the narrower ones first.
KINDS = (RecomputeMismatch, torch.OutOfMemoryError, RuntimeError)


class Ranks(NamedTuple):
    """The ranks of a group, or this one alone without a group."""

    group: Any = None

    def told(self, one: Any) -> list[Any]:
        """Returns what each rank has given to its call."""
        if not self.group:
            return [one]
        every = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(every, one, self.group)
        return every

    def agreed(self, run: Callable[[], Any]) -> Any:
        """Returns what the call returns. If it raises on one rank, it raises on all."""
        try:
            result = run()
        except Exception as error:
            kind = next((one for one in KINDS if isinstance(error, one)), ValueError)
            with suppress(RuntimeError):  # the others may wait for this rank inside of the step
                self.told((kind, str(error)))
            raise
        for rank, failed in enumerate(self.told(None)):
            if failed:
                raise failed[0](f"rank {rank}: {failed[1]}")
        return result


@contextmanager
def all_ranks() -> Iterator[Ranks]:
    """Yields all ranks of torch.distributed, in a group apart from the collectives of a step."""
    if not (dist.is_available() and dist.is_initialized()):
        yield Ranks()
        return
    # One rank may be slower than another, or have ended.
    group = dist.new_group(backend="gloo", timeout=timedelta(minutes=5))
    try:
        yield Ranks(group)
    finally:
        dist.destroy_process_group(group)
