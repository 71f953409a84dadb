"""Connects to the store where the ranks of a run meet, or fails with a reason in a bounded time.

torch's own client repeats a failing attempt for the whole timeout, with a page of warnings each
time. If a program accepts the connection and never answers, the client waits without a limit. This
module therefore resolves the host name and tries the port first. It runs torch's client in a thread
with a time limit, and abandons the thread after that limit.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from megatron_lite.config.checks import InputError
from megatron_lite.parallel.launch import Launch
from megatron_lite.parallel.one_voice import print_line

RESOLVE_S = 10.0  # a name server may learn of a host a little after the host has started
HANDSHAKE_S = 60.0  # limit for an answer after a connection was accepted
NOTICE_EVERY_S = 30.0
PAUSE_S = 0.2  # between two attempts

Result = TypeVar("Result")


class OutOfTime(Exception):
    """A call did not return within its time limit. Its thread is abandoned."""


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """Returns the result of `call`, or raises its error.

    Raises OutOfTime after `seconds`, even if the call never returns.
    """
    results: queue.SimpleQueue[tuple[bool, Result | BaseException]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((True, call()))
        except BaseException as error:
            results.put((False, error))

    # A daemon thread does not keep the process alive, even if the call never returns.
    threading.Thread(target=run, name="start", daemon=True).start()
    try:
        succeeded, result = results.get(timeout=seconds)
    except queue.Empty:
        raise OutOfTime(f"{seconds:g} s") from None
    if not succeeded:
        assert isinstance(result, BaseException)
        raise result
    return result  # type: ignore[return-value]


def join_store(
    launch: Launch, timeout: timedelta, *, say: Callable[[str], object] = print_line
) -> dist.TCPStore:
    """Returns the store of this run. Rank 0 makes it, unless its launcher has made it.

    Ranks that do not make it wait up to `timeout` for a listener. The first rank of each host
    prints a line every 30 s. Raises InputError in four cases:

        the host name cannot be resolved within 10 s
        another program holds the port
        no program listens at the port within `timeout`
        the listener does not answer like a store within 60 s
    """
    deadline = time.monotonic() + timeout.total_seconds()
    is_master = launch.rank == 0 and not launch.agent_owns_store
    _resolve(launch, deadline)
    if not is_master:
        _await_listener(launch, timeout, deadline, say)
    # torch's client ignores its own timeout while a listener stays silent: `within` is the limit.
    seconds = max(1.0, min(HANDSHAKE_S, deadline - time.monotonic()))
    try:
        store = within(
            seconds + 1.0,
            lambda: dist.TCPStore(
                launch.master_addr,
                launch.master_port,
                launch.world_size,
                timeout=timedelta(seconds=seconds),
                is_master=is_master,
                wait_for_workers=False,
                # torch asks users of a build without libuv to set the variable.
                use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
            ),
        )
    except (OutOfTime, RuntimeError) as error:
        if is_master:
            raise InputError(
                f"rank 0 cannot make the store where the ranks meet at {_place(launch)} "
                f"({str(error).splitlines()[0]}): set MASTER_ADDR to its host and MASTER_PORT to a "
                "free port of it"
            ) from error
        raise InputError(
            f"what listens at {_place(launch)} does not answer within {seconds:.0f} s as the store "
            "of the ranks does: another program may hold that port. Set MASTER_PORT to a free port "
            "of rank 0's host"
        ) from error
    store.set_timeout(timeout)
    return store


def _resolve(launch: Launch, deadline: float) -> None:
    stop = min(deadline, time.monotonic() + RESOLVE_S)
    while True:
        try:
            within(
                max(0.1, stop - time.monotonic()),
                lambda: socket.getaddrinfo(launch.master_addr, launch.master_port),
            )
            return
        except OutOfTime:
            reason = "its name server does not answer"
        except (OSError, UnicodeError) as error:  # UnicodeError: a label of more than 63 characters
            reason = getattr(error, "strerror", None) or str(error)
        if time.monotonic() + PAUSE_S > stop:
            raise InputError(
                f"MASTER_ADDR {launch.master_addr} cannot be resolved on {socket.gethostname()} "
                f"({reason}): set it to a name or an address of rank 0's host that every host knows"
            )
        time.sleep(PAUSE_S)


def _await_listener(
    launch: Launch, timeout: timedelta, deadline: float, say: Callable[[str], object]
) -> None:
    """Returns once a program accepts connections at the port.

    It closes its connection at once, which does not disturb a store.
    """
    began, notices = time.monotonic(), 0
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection(
                (launch.master_addr, launch.master_port), timeout=max(0.1, min(left, 5.0))
            ).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() + PAUSE_S > deadline:
            raise InputError(
                f"nobody listens at {_place(launch)} after {timeout.total_seconds() / 60.0:g} "
                f"minutes (--distributed-timeout-minutes; {reason}): see what rank 0 says, and "
                "whether MASTER_ADDR is its host and MASTER_PORT open between the hosts"
            )
        waited = time.monotonic() - began
        if waited > (notices + 1) * NOTICE_EVERY_S and launch.local_rank == 0:  # one line per host
            notices += 1
            say(
                f"[rank {launch.rank}] waiting for rank 0 to listen at {_place(launch)} "
                f"({waited:.0f} s)"
            )
        time.sleep(PAUSE_S)


def _place(launch: Launch) -> str:
    return f"{launch.master_addr}:{launch.master_port}"
