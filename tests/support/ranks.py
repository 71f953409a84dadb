"""Runs a function on several CPU ranks of one machine: `results = run_ranks(fn, world_size,
*args)`.

Each rank is a fork of the test process, so `fn` may be a closure over anything. Four ranks start in
about 0.2 s. They meet through a file and communicate through gloo.
Forking is safe only if the parent has never run an OpenMP loop on several threads, which
tests/conftest.py ensures. The ranks cannot use CUDA, since a forked process cannot.
"""

import datetime
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.limits import HANG_S
from tests.support.pairs import FULL_GRIDS

IS_LONG = "TEST_IS_LONG"  # tests/conftest.py sets this variable to "1" for tests marked `long`
LOST = "Connection closed by peer"  # what gloo says where another rank has ended


class RankFailure(RuntimeError):
    """A rank raised, died or did not return in time. The message holds the rank's own traceback."""


def run_ranks(fn, world_size, *args, timeout=HANG_S, detail=None):
    """Calls `fn(rank, world_size, *args)` in `world_size` processes that share a gloo group.

    Returns the results in rank order. Results come back pickled, tensors by value. Every rank
    starts from the same torch seed, independent of the parent's generator. No process outlives the
    call.
    detail: compare collectives between the ranks (TORCH_DISTRIBUTED_DEBUG=DETAIL), which makes each
        several times slower. None: the weekly run does so in the tests that every run has.
    Raises RankFailure as soon as one rank fails, or after `timeout` seconds. After a timeout the
    message has the place where each rank hangs.
    """
    if detail is None:
        detail = FULL_GRIDS and os.environ.get(IS_LONG) != "1"
    _import_once()
    assert torch.get_num_threads() == 1, (
        "the parent must be limited to one thread before it forks (tests/conftest.py)"
    )
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        processes, readers = [], []
        try:
            for rank in range(world_size):
                reader, writer = context.Pipe(duplex=False)
                process = context.Process(
                    target=_run_rank,
                    args=(fn, rank, world_size, args, timeout, detail, Path(folder), writer),
                )
                # Python 3.12 warns about a fork beside any other thread, even an idle one.
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                # the rank now holds the only writing end: its death reads as end of file
                writer.close()
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


def _import_once():
    """Imports the modules that torch imports late.

    Each rank would otherwise import them at its first optimizer, in one to four seconds.
    """
    importlib.import_module("torch._dynamo")
    importlib.import_module("torch.distributed.fsdp")


def _collect(processes, readers, deadline, timeout, folder):
    results = {}
    lost = None  # of a rank that another one's end has left alone
    while len(results) < len(readers):
        waiting = {reader: rank for rank, reader in enumerate(readers) if rank not in results}
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            if lost is not None:
                raise lost
            stacks = _stacks(processes, list(waiting.values()), folder)
            raise RankFailure(
                f"ranks {sorted(waiting.values())} of {len(readers)} did not return in "
                f"{timeout:g} s\n{stacks}"
            )
        for reader in ready:
            rank = waiting[reader]
            try:
                succeeded, result = pickle.loads(reader.recv_bytes())
            except EOFError:
                processes[rank].join()
                raise RankFailure(
                    f"rank {rank} of {len(readers)} died with exit code {processes[rank].exitcode}"
                ) from None
            if not succeeded:
                failure = RankFailure(f"rank {rank} of {len(readers)} failed:\n{result}")
                if LOST not in result:
                    raise failure
                lost = lost or failure
            results[rank] = result
    if lost is not None:
        raise lost
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    return [results[rank] for rank in range(len(readers))]


def _stacks(processes, ranks, folder):
    for rank in ranks:
        os.kill(processes[rank].pid, signal.SIGUSR1)
    files = [folder / f"stack_{rank}" for rank in ranks]
    deadline = time.monotonic() + HANG_S / 10
    while time.monotonic() < deadline and not all(
        path.exists() and path.stat().st_size for path in files
    ):
        time.sleep(0.05)  # the handlers write as soon as the ranks are scheduled
    time.sleep(0.3)  # a stack is written in several pieces
    return "\n".join(
        f"rank {rank}:\n{path.read_text()}"
        for rank, path in zip(ranks, files, strict=True)
        if path.exists()
    )


def _run_rank(fn, rank, world_size, args, timeout, detail, folder, writer):
    """Runs one child. multiprocessing ends it with os._exit: no exit handler of pytest runs."""
    with open(folder / f"stack_{rank}", "w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=False)
        try:
            # torch makes the thread pool of a forked process anew at its first use, which must not
            # be by two threads at a time ("Invalid thread pool!").
            torch.set_num_threads(1)
            torch.manual_seed(1234)
            gc.freeze()  # a collection would look through, and so copy, all that the parent has
            os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL" if detail else "OFF"
            dist.set_debug_level_from_env()
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/rendezvous",
                rank=rank,
                world_size=world_size,
                timeout=datetime.timedelta(seconds=timeout),
            )
            result = pickle.dumps((True, fn(rank, world_size, *args)))
            if dist.is_initialized():
                # with DETAIL: a collective that not every rank reached is an error here
                dist.barrier()
            writer.send_bytes(result)
        except BaseException:  # must reach the parent before other ranks see that this one is gone
            writer.send_bytes(pickle.dumps((False, traceback.format_exc())))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
