"""The ranks of a run meet at a store and compare their settings, before any process group is made.

A rank may be missing, have other flags, or listen at an address that no other host can reach. Each
fault becomes one error, within a bounded time.

    join_store     Connects to the store, or names what is wrong with its address. torch's own
                   client repeats a failing attempt for the whole timeout, with a page of warnings
                   each time, and waits without a limit for a program that never answers. The name
                   and the port are therefore tried first, and the client has a time limit.
    absent_named   Names the ranks that die after they have met, while the groups are made.
    check_start    Each rank draws a ticket, and rank 0 answers it with the number of the meeting: a
                   store that outlives its ranks has the keys of those before. Each rank writes its
                   place and its settings there. Rank 0 reads all of them and writes its verdict. No
                   collective is issued, since the ranks may disagree on the groups.
"""

import concurrent.futures
import contextlib
import hashlib
import ipaddress
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_lite.config.checks import InputError, PeerError, flag, parse_json
from megatron_lite.config.run import RunConfig

from .launch import Launch
from .messages import print_line, ranks_text, told_by_rank_0

# Flags that may differ between ranks. Each node may keep indices in its own place. Only rank 0
# writes to the other paths.
MAY_DIFFER = ("data_cache_path", "log_file", "metrics_jsonl", "tensorboard_dir", "memory_timeline")
RESOLVE_S = 10.0  # a name server may learn of a host a little after the host has started
HANDSHAKE_S = 60.0  # limit for an answer after a connection was accepted
NOTICE_EVERY_S = 30.0
PAUSE_S = 0.2  # between two attempts
READERS_HAVE_S = 2.0  # the other ranks need so long to read a verdict at most
TICKETS, VERDICT = "tickets", "verdict"
VALUES_SHOWN = 8

Result = TypeVar("Result")


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """Returns the result of `call`, or raises its error.

    Raises concurrent.futures.TimeoutError after `seconds`, even if the call never returns: its
    thread is abandoned, and does not keep the process alive.
    """
    result: concurrent.futures.Future[Result] = concurrent.futures.Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="start", daemon=True).start()
    return result.result(timeout=seconds)


# The stores of this process: the first run's store goes on holding its port.
MET = dict[Launch, dist.Store]()


def meet(
    launch: Launch, settings: Mapping[str, str], *, tp_size: int, timeout: timedelta
) -> dist.Store:
    """Returns the store of this run, once every rank has arrived there with the same settings."""
    if launch not in MET:
        MET[launch] = join_store(launch, timeout)
    # A rank that an earlier attempt has left behind must not meet those of a later one.
    store = dist.PrefixStore(f"attempt{launch.restart_count}", MET[launch])
    arrival = {**own_place(), "settings": settings}
    limit = timeout.total_seconds() + NOTICE_EVERY_S + READERS_HAVE_S + 10.0
    try:  # a request to a store has no time limit of its own
        return within(
            limit, lambda: check_start(store, launch, arrival, tp_size=tp_size, timeout=timeout)
        )
    except concurrent.futures.TimeoutError as error:
        raise InputError(
            f"the store at {_place(launch)} does not answer any more "
            f"({_limit(timeout)}): see what happened to rank 0's host"
        ) from error


def join_store(launch: Launch, timeout: timedelta) -> dist.Store:
    """Returns the store of this run. Rank 0 makes it, unless its launcher has made it.

    Ranks that do not make it wait up to `timeout` for a listener. The first rank of each host
    prints a line if it is long. Raises InputError in four cases:

        the host name cannot be resolved within 10 s
        another program holds the port
        no program listens at the port within `timeout`
        the listener does not answer like a store within 60 s
    """
    deadline = time.monotonic() + timeout.total_seconds()
    is_master = launch.rank == 0 and not launch.agent_owns_store
    _await_address(launch, timeout.total_seconds(), connects=not is_master)
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
    except (concurrent.futures.TimeoutError, RuntimeError) as error:
        if is_master:
            raise InputError(
                f"rank 0 cannot make the store where the ranks meet at {_place(launch)} "
                f"({str(error).partition(chr(10))[0]}): set MASTER_ADDR to its host and "
                "MASTER_PORT to a free port of it"
            ) from error
        raise InputError(
            f"what listens at {_place(launch)} does not answer within {seconds:.0f} s as the store "
            "of the ranks does: another program may hold that port. Set MASTER_PORT to a free port "
            "of rank 0's host"
        ) from error
    store.set_timeout(timeout)
    return store


def _await_address(launch: Launch, seconds: float, *, connects: bool) -> None:
    """Returns once the name of rank 0's host resolves and a program accepts connections there.

    The connection is closed at once, which does not disturb a store.
    connects: False for the rank that makes the store; the name must resolve for it too.
    """
    address = launch.master_addr, launch.master_port
    _repeat(
        min(RESOLVE_S, seconds),
        lambda: socket.getaddrinfo(*address),
        f"MASTER_ADDR {launch.master_addr} cannot be resolved on {socket.gethostname()}",
        "set it to a name or an address of rank 0's host that every host knows",
    )
    if connects:  # one rank of each host tells that it waits
        what = f"[rank {launch.rank}] waiting for rank 0 at {_place(launch)}"
        with told_by_rank_0(what, launch.local_rank):
            _repeat(
                seconds,
                lambda: socket.create_connection(address, timeout=min(seconds, 5.0)).close(),
                f"nobody listens at {_place(launch)} after "
                f"--distributed-timeout-minutes {seconds / 60.0:g}",
                "see what rank 0 says, and whether MASTER_ADDR is its host and MASTER_PORT open "
                "between the hosts",
            )


def _repeat(seconds: float, attempt: Callable[[], object], fault: str, fix: str) -> None:
    """Returns once `attempt` succeeds. Raises InputError with its last error after `seconds`."""
    began = time.monotonic()
    while True:
        try:
            within(min(RESOLVE_S, seconds), attempt)
            return
        except (OSError, UnicodeError, concurrent.futures.TimeoutError) as error:
            # UnicodeError: a label of more than 63 characters
            reason = getattr(error, "strerror", None) or str(error) or "no answer"
        if time.monotonic() - began + PAUSE_S > seconds:
            raise InputError(f"{fault} ({reason}): {fix}")
        time.sleep(PAUSE_S)


def settings_of(run: RunConfig | None, world_size: int) -> dict[str, str]:
    """Returns the settings that must be the same on every rank, as text.

    They are the flags, the world size, torch's version and a digest of this package's code.
    """
    values = {} if run is None else run.values
    flags = {flag(name): str(value) for name, value in values.items() if name not in MAY_DIFFER}
    package, code = Path(__file__).resolve().parents[1], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        code.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return {
        "WORLD_SIZE": str(world_size),
        "torch": torch.__version__,
        "the code of megatron_lite": code.hexdigest()[:12],
        **flags,
    }


def own_place() -> dict[str, str | None]:
    """Returns the host of this process, and the address where gloo will listen.

    gloo listens where the host's name leads, or on the loopback address if the name leads nowhere.
    None: GLOO_SOCKET_IFNAME decides it.
    """
    host, address = socket.gethostname(), None
    if not os.environ.get("GLOO_SOCKET_IFNAME"):
        try:
            address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError:
            address = "127.0.0.1"
    return {"host": host, "gloo_address": address}


def check_start(
    store: dist.Store,
    launch: Launch,
    arrival: Mapping[str, object],
    *,
    tp_size: int,
    timeout: timedelta,
) -> dist.Store:
    """Returns the part of the store for this run, once every rank has arrived with the same
    settings, at an address that others can reach.

    torchrun counts no restart when hosts join or leave, and a process may start several runs.
    Therefore rank 0 gives each meeting a number.

    If a check fails, rank 0 raises InputError and the other ranks raise PeerError. The other ranks
    raise InputError if rank 0 does not join in time. Rank 0 prints for which ranks it waits, and
    warns if tensor-parallel groups span hosts. Rank 0 reads all that the others have written.

    arrival: `own_place()` and, as "settings", `settings_of(..)`.
    """
    tickets = store
    if launch.rank > 0:
        number = _from_rank_0(tickets, f"ticket{tickets.add(TICKETS, 1)}", launch, timeout)
    else:
        number = str(tickets.add("meetings", 1))
    store = dist.PrefixStore(f"meeting{number}", tickets)
    store.set(_key(launch.rank), json.dumps(arrival))
    if launch.rank > 0:
        if _from_rank_0(store, VERDICT, launch, timeout):
            raise PeerError("the start: rank 0 has found a fault, and says which")
        return store
    try:
        _await_arrivals(store, tickets, number, launch.world_size, timeout)
        keys = [_key(rank) for rank in range(launch.world_size)]
        arrivals = [parse_json(value) for value in store.multi_get(keys)]
        _check_settings([one["settings"] for one in arrivals])
        _check_addresses(arrivals)
    except InputError:
        # The others must read the verdict before rank 0 ends, since the store may end with it and
        # torch would print long errors.
        store.set(VERDICT, "a fault")
        time.sleep(READERS_HAVE_S)
        raise
    hosts = [one["host"] for one in arrivals]
    groups = [set(hosts[first : first + tp_size]) for first in range(0, len(hosts), tp_size)]
    spread = [group for group in groups if len(group) > 1]
    if spread:
        print_line(
            f"warning: {len(spread)} of {len(groups)} tensor-parallel groups span hosts, the first "
            f"of them {', '.join(sorted(spread[0]))}: what each layer exchanges goes over the "
            f"network. Start a multiple of --tensor-model-parallel-size {tp_size} ranks on each "
            "host"
        )
    store.set(VERDICT, "")
    return store


def _await_arrivals(
    store: dist.Store, tickets: dist.Store, number: str, world_size: int, timeout: timedelta
) -> None:
    """Returns once every rank has written its arrival; answers all tickets meanwhile."""
    began, missing = time.monotonic(), list(range(1, world_size))
    notice_at, answered = NOTICE_EVERY_S, 0
    while missing:
        waited = time.monotonic() - began
        left = timeout.total_seconds() - waited
        if left <= 0.0:
            raise InputError(
                f"{ranks_text(missing)} of {world_size} have not joined within {_limit(timeout)}: "
                "see what those processes or their hosts say"
            )
        if waited >= notice_at:
            notice_at += NOTICE_EVERY_S
            print_line(f"waiting for {ranks_text(missing)} of {world_size} ({waited:.0f} s)")
        before, answered = answered, tickets.add(TICKETS, 0)
        for ticket in range(before, answered):  # also those of ranks that were killed
            tickets.set(f"ticket{ticket + 1}", number)
        try:
            store.wait([_key(rank) for rank in missing], timedelta(seconds=min(left, PAUSE_S)))
            return
        except dist.DistStoreError:  # the wait has timed out
            missing = [rank for rank in missing if not store.check([_key(rank)])]


def _from_rank_0(store: dist.Store, key: str, launch: Launch, timeout: timedelta) -> str:
    try:  # longer than rank 0 waits: it reports first
        store.wait([key], timeout + timedelta(seconds=NOTICE_EVERY_S))
        return store.get(key).decode()
    except dist.DistStoreError as error:
        raise InputError(
            f"rank 0 of {launch.world_size} has not joined within {_limit(timeout)}"
        ) from error
    except RuntimeError as error:
        raise PeerError(
            "the start: rank 0, which holds the store, is gone, and says why"
        ) from error


@contextlib.contextmanager
def absent_named(store: dist.Store, launch: Launch, timeout: timedelta) -> Iterator[None]:
    """Names the ranks that do not come while the others make the process groups in the block.

    The ranks whose wait has timed out write so to the store. Raises InputError if a rank has not.
    """
    try:
        yield
    except RuntimeError as error:  # of the store, gloo or NCCL
        if not re.search("timeout|timed out", str(error), re.IGNORECASE):
            raise
        try:
            store.set(f"waited{launch.rank}", "")
            # Rank 0 may hold the store, so it stays until the others have read.
            time.sleep(READERS_HAVE_S * (1 if launch.rank else 2))
            ranks = range(launch.world_size)
            absent = [rank for rank in ranks if not store.check([f"waited{rank}"])]
        except RuntimeError:
            absent = [0]
        if not absent:
            raise
        raise InputError(
            f"{ranks_text(absent)} of {launch.world_size} met the others, but did not make the "
            f"process groups within {_limit(timeout)}: see what those processes or their hosts say"
        ) from error


def _check_settings(by_rank: Sequence[Mapping[str, str]]) -> None:
    lines = []
    for name in dict.fromkeys(name for settings in by_rank for name in settings):
        ranks_with: dict[str | None, list[int]] = {}
        for rank, settings in enumerate(by_rank):
            ranks_with.setdefault(settings.get(name), []).append(rank)
        if len(ranks_with) > 1:
            found = [f"{value} on {ranks_text(ranks)}" for value, ranks in ranks_with.items()]
            more = [f"{len(found) - VALUES_SHOWN} other values"] * (len(found) > VALUES_SHOWN)
            lines.append(f"\n  {name}: " + "; ".join([*found[:VALUES_SHOWN], *more]))
    if lines:
        raise InputError(
            "the ranks were not started alike: give all of them the same flags and the same code"
            + "".join(lines)
        )


def _check_addresses(places: Sequence[Mapping[str, str | None]]) -> None:
    for one in places:
        others = [other["host"] for other in places if other["host"] != one["host"]]
        address = one["gloo_address"]
        if others and address is not None and ipaddress.ip_address(address).is_loopback:
            raise InputError(
                f"gloo would listen at {address} on {one['host']}, to which the host's name "
                f"resolves there, and {others[0]} cannot reach it: set GLOO_SOCKET_IFNAME on every "
                "host to its interface in their network (`ip address` lists them), or mend "
                "/etc/hosts"
            )


def _key(rank: int) -> str:
    return f"arrival{rank}"


def _place(launch: Launch) -> str:
    return f"{launch.master_addr}:{launch.master_port}"


def _limit(timeout: timedelta) -> str:
    return f"--distributed-timeout-minutes {timeout.total_seconds() / 60.0:g}"
