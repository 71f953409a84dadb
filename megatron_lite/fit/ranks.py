"""What the ranks of a fit tell each other: figures, of which the highest count, and errors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_lite.recompute.replay import RecomputeMismatch


class OtherShapes(ValueError):
    """A run of the step has other inputs than those that were measured."""


# Those that other ranks can raise with a text, the narrower ones first.
KINDS = (OtherShapes, RecomputeMismatch, torch.OutOfMemoryError, RuntimeError, ValueError)


class Ranks(NamedTuple):
    """The ranks of a group, or this one alone without a group."""

    group: Any = None

    def told(self, one: Any) -> list[Any]:
        """Returns what each rank has given to its call. Raises ValueError if one does not call."""
        if not self.group:
            return [one]
        every = [None] * dist.get_world_size(self.group)
        try:
            dist.all_gather_object(every, one, self.group)
        except RuntimeError as error:
            raise ValueError(
                f"a rank has ended, or waits for others inside of the step ({error}): look for the "
                "error of another rank"
            ) from error
        return every

    def agreed(self, run: Callable[[], Any]) -> Any:
        """Returns what the call returns. If it raises on one rank, all raise the same kind.

        Raises ValueError if the others cannot know, since they wait for this rank in the call.
        """
        try:
            result = run()
        except Exception as error:
            kind = next((one for one in KINDS if isinstance(error, one)), ValueError)
            self._compare((kind, str(error)))
            raise
        self._compare(None)
        return result

    def _compare(self, failed: tuple[Any, str] | None) -> None:
        try:
            every = self.told(failed)
        except ValueError as error:
            if not failed:
                raise
            raise ValueError(
                f"{failed[0].__name__} on this rank ({failed[1]}), and others do not answer: they "
                "wait for it inside of the step, or have ended. Remove the first cause; if it is "
                "memory, give a smaller budget or batch"
            ) from error
        rank, first = next(((n, one) for n, one in enumerate(every) if one), (0, None))
        if first and (not failed or failed[0] is not first[0]):
            raise first[0](f"rank {rank}: {first[1]}")


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
