"""Starts the ranks of a benchmark as processes on this machine's CPU, which talk gloo."""

from __future__ import annotations

import datetime
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def joined(rank: int, num_ranks: int, folder: str, *, minutes: float = 10.0) -> Iterator[None]:
    """Makes this process one of the ranks inside the block. They meet through a file in `folder`.

    minutes: the limit of one collective.
    """
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(minutes=minutes),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def other_ranks(run: Callable[[int, str], None], num_ranks: int) -> Iterator[str]:
    """Calls `run(rank, folder)` for every rank except 0, each in a process of its own.

    Yields the folder in which the ranks meet. No process outlives the block.
    """
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        others = [
            spawn.Process(target=run, args=(rank, folder), daemon=True)
            for rank in range(1, num_ranks)
        ]
        try:
            for process in others:
                process.start()
            yield folder
            for process in others:
                process.join(60.0)
        finally:
            for process in others:
                process.kill()
                process.join()
