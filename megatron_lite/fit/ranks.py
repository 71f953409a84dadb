"""What the ranks of a fit tell each other: figures, of which the highest count, and errors."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist

from megatron_lite.parallel.torch_internals import default_store, set_group_timeout
from megatron_lite.recompute.replay import RecomputeMismatch

PATIENCE = timedelta(minutes=5)  # one rank may be slower than another, or have ended
# That of a rank that has failed: in seconds, and in times of the longest call so far.
LEAST_S, CALLS = 10.0, 4.0
LOOKS_S = 0.5  # between two looks for a rank that has given up


class OtherShapes(ValueError):
    """A run of the step has other inputs than those that were measured."""


# Those that other ranks can raise with a text, the narrower ones first.
KINDS = (OtherShapes, RecomputeMismatch, torch.OutOfMemoryError, RuntimeError, ValueError)


class Ranks:
    """The ranks of a group, or this one alone without a group."""

    def __init__(self, group: Any = None) -> None:
        self.group, self._longest = group, 0.0

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
        begin = time.monotonic()
        try:
            try:
                result = run()
            finally:
                self._longest = max(self._longest, time.monotonic() - begin)
        except Exception as error:
            kind = next((one for one in KINDS if isinstance(error, one)), ValueError)
            self._compare((kind, str(error)))
            raise
        self._compare(None)
        return result

    def _compare(self, failed: tuple[Any, str] | None) -> None:
        # Others may wait for this rank inside of the step.
        has_broken = self.group and failed and failed[0] is not OtherShapes
        try:
            if has_broken:
                patience = max(LEAST_S, CALLS * self._longest)
                set_group_timeout(timedelta(seconds=patience), self.group)
            every = self.told(failed)
        except ValueError as error:
            if not failed:
                raise
            text = (
                f"{failed[0].__name__} on this rank ({failed[1]}), and others do not answer: they "
                "wait for it inside of the step, or have ended. Remove the first cause; if it is "
                "memory, give a smaller budget or batch"
            )
            with suppress(RuntimeError):  # the store may have ended
                default_store().set(_key(self.group), f"rank {dist.get_rank()}: {text}")
                time.sleep(2 * LOOKS_S)  # an end of this rank ends the others
            raise ValueError(text) from error
        if has_broken:
            set_group_timeout(PATIENCE, self.group)
        rank, first = next(((n, one) for n, one in enumerate(every) if one), (0, None))
        if first and (not failed or failed[0] is not first[0]):
            raise first[0](f"rank {rank}: {first[1]}")


def _key(group: Any) -> str:
    return f"fit_memory_ {group.group_name}"


def _tell(key: str, is_over: Event) -> None:
    """Prints what a rank says that has given up, for which this one may wait inside of the step."""
    with suppress(RuntimeError):  # the store may have ended
        while not is_over.wait(LOOKS_S):
            if default_store().check([key]):
                said = default_store().get(key).decode()
                if not said.startswith(f"rank {dist.get_rank()}:"):
                    print(f"fit_memory_: {said}", file=sys.stderr, flush=True)
                return


@contextmanager
def all_ranks() -> Iterator[Ranks]:
    """Yields all ranks of torch.distributed, in a group apart from the collectives of a step."""
    if not (dist.is_available() and dist.is_initialized()):
        yield Ranks()
        return
    group, is_over = dist.new_group(backend="gloo", timeout=PATIENCE), Event()
    listener = Thread(target=_tell, args=(_key(group), is_over), daemon=True)
    listener.start()
    try:
        yield Ranks(group)
    finally:
        is_over.set()
        listener.join()
        dist.destroy_process_group(group)
