"""Runs a function on several CPU ranks of one machine: `results = run_ranks(fn, world_size, *args)`.

Each rank is a fork of the test process, so `fn` may be a closure over anything, and four ranks start in about 0.2 s.
They meet through a file and talk gloo; TORCH_DISTRIBUTED_DEBUG=DETAIL turns mismatched collectives into errors.
Forking is safe only as long as the parent never ran an OpenMP loop on several threads: tests/conftest.py sees to it.
Not for CUDA, which cannot be used in a forked process.
"""

from __future__ import annotations

import datetime
import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class RankFailure(RuntimeError):
    """A rank raised, died or did not return in time. The message holds the rank's own traceback."""


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0, detail: bool = True) -> list[Any]:
    """Calls `fn(rank, world_size, *args)` in `world_size` processes that share a gloo group; the results in rank order.

    Results come back pickled, tensors by value. Every rank starts from the same torch seed, whatever the parent drew.
    RankFailure as soon as one rank fails, or after `timeout` seconds, with the place where each rank hangs; no process
    outlives the call. detail=False: collectives are not compared between the ranks, which makes each several times faster.
    """
    assert torch.get_num_threads() == 1, "the parent must be limited to one thread before it forks (tests/conftest.py)"
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        processes, readers = [], []
        try:
            for rank in range(world_size):
                reader, writer = context.Pipe(duplex=False)
                process = context.Process(target=_run_rank,
                                          args=(fn, rank, world_size, args, timeout, detail, Path(folder), writer))
                with warnings.catch_warnings():  # Python 3.12 warns of any other thread, even an idle one of pytest's
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                writer.close()  # the rank now holds the only writing end: its death reads as end of file
                processes.append(process)
                readers.append(reader)
            return _collect(processes, readers, time.monotonic() + timeout, timeout, Path(folder))
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
            for reader in readers:
                reader.close()


def _collect(processes: list[Any], readers: list[Connection], deadline: float, timeout: float, folder: Path) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(readers):
        waiting = {reader: rank for rank, reader in enumerate(readers) if rank not in results}
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            stacks = _stacks(processes, list(waiting.values()), folder)
            raise RankFailure(f"ranks {sorted(waiting.values())} of {len(readers)} did not return in {timeout:g} s\n{stacks}")
        for reader in ready:
            rank = waiting[reader]
            try:
                succeeded, result = pickle.loads(reader.recv_bytes())
            except EOFError:
                processes[rank].join()
                raise RankFailure(f"rank {rank} of {len(readers)} died with exit code {processes[rank].exitcode}") from None
            if not succeeded:
                raise RankFailure(f"rank {rank} of {len(readers)} failed:\n{result}")
            results[rank] = result
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    return [results[rank] for rank in range(len(readers))]


def _stacks(processes: list[Any], ranks: list[int], folder: Path) -> str:
    for rank in ranks:
        os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(0.3)  # the handlers write as soon as the ranks are scheduled
    dumps = [f"rank {rank}:\n{path.read_text()}" for rank in ranks if (path := folder / f"stack_{rank}").exists()]
    return "\n".join(dumps)


def _run_rank(fn: Callable[..., Any], rank: int, world_size: int, args: tuple[Any, ...], timeout: float, detail: bool,
              folder: Path, writer: Connection) -> None:
    """The body of one child. multiprocessing ends it with os._exit, so that none of pytest's exit handlers run in it."""
    with open(folder / f"stack_{rank}", "w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=False)
        try:
            torch.manual_seed(1234)
            os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL" if detail else "OFF"
            dist.set_debug_level_from_env()
            dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size,
                                    timeout=datetime.timedelta(seconds=timeout))
            result = pickle.dumps((True, fn(rank, world_size, *args)))
            if dist.is_initialized():
                dist.barrier()  # with DETAIL: a collective that not every rank reached is an error here
            writer.send_bytes(result)
        except BaseException:  # the failure must reach the parent before the other ranks notice that this one is gone
            writer.send_bytes(pickle.dumps((False, traceback.format_exc())))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
