"""Checks the start of a run through the store, before the first process group is made.

A rank may be missing, have other flags, or listen at an address that no other host can reach.
Without a check such a fault shows as a hang, or as an error far from its cause. Each rank writes
its `Arrival` into the store. Rank 0 reads all arrivals and writes its verdict there. No collective
is issued, since the ranks may disagree on the groups.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_lite.config.checks import InputError, PeerError, flag
from megatron_lite.config.run import RunConfig
from megatron_lite.parallel.launch import Launch
from megatron_lite.parallel.one_voice import print_line
from megatron_lite.parallel.rank_names import ranks_text

# Flags that may differ between ranks. Each node may keep indices in its own place. Only rank 0
# writes to the other paths.
MAY_DIFFER = ("data_cache_path", "log_file", "metrics_jsonl", "tensorboard_dir", "memory_timeline")
NOTICE_EVERY = timedelta(seconds=30)
READERS_HAVE = timedelta(seconds=5)
VERDICT = "verdict"
VALUES_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """The facts that one rank writes into the store.

    gloo_address: the address where gloo will listen, or None if GLOO_SOCKET_IFNAME decides it.
    interfaces: the names of the host's network interfaces, without lo.
    digest: a digest of the settings. The settings are in the store too, and rank 0 reads them only
        if digests differ.
    """

    host: str
    gloo_address: str | None
    interfaces: tuple[str, ...]
    digest: str

    @classmethod
    def here(cls, settings: Mapping[str, str]) -> Arrival:
        """Returns the arrival of this process."""
        return cls(
            host=socket.gethostname(),
            gloo_address=None if os.environ.get("GLOO_SOCKET_IFNAME") else own_address(),
            interfaces=tuple(name for _, name in socket.if_nameindex() if name != "lo"),
            digest=hashlib.sha256(_settings_text(settings).encode()).hexdigest(),
        )


def settings_of(run: RunConfig | None, world_size: int) -> dict[str, str]:
    """Returns the settings that must be the same on every rank, as text.

    They are the flags, the world size, torch's version and a digest of this package's code.
    """
    topics = {} if run is None else asdict(run)
    flags = {
        flag(name): str(value)
        for topic in topics.values()
        for name, value in topic.items()
        if name not in MAY_DIFFER
    }
    return {
        "WORLD_SIZE": str(world_size),
        "torch": torch.__version__,
        "the code of megatron_lite": _code_digest(),
        **flags,
    }


def own_address() -> str:
    """Returns the address to which this host's name resolves, where gloo listens by default.

    Returns the loopback address if the name does not resolve.
    """
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return "127.0.0.1"


def check_start(
    store: dist.Store,
    launch: Launch,
    settings: Mapping[str, str],
    *,
    tp_size: int,
    timeout: timedelta,
    arrival: Arrival | None = None,
    notice_every: timedelta = NOTICE_EVERY,
    say: Callable[[str], object] = print_line,
) -> None:
    """Returns once every rank has arrived with the same settings, at an address others can reach.

    If a check fails, rank 0 raises InputError and the other ranks raise PeerError. The other ranks
    raise InputError if rank 0 does not join in time. Rank 0 prints for which ranks it waits, and
    warns if tensor-parallel groups span hosts. Each rank writes to the store twice and reads it
    twice. Rank 0 reads all arrivals once.
    """
    arrival = arrival or Arrival.here(settings)
    # The settings come first: rank 0 may read them as soon as the arrival is in the store.
    store.set(_settings_key(launch.rank), _settings_text(settings))
    store.set(_key(launch.rank), json.dumps(asdict(arrival)))
    if launch.rank > 0:
        _await_verdict(store, launch, timeout)
        return
    try:
        _await_arrivals(store, launch.world_size, timeout, notice_every, say)
        arrivals = [
            _read(value)
            for value in store.multi_get([_key(rank) for rank in range(launch.world_size)])
        ]
        _check_settings(store, arrivals)
        _check_addresses(arrivals)
    except InputError as error:
        # The others must read the verdict before rank 0 ends, since the store may end with it.
        store.set(VERDICT, str(error))
        _await_readers(store, launch.world_size)
        raise
    for warning in groups_over_hosts([one.host for one in arrivals], tp_size):
        say(warning)
    store.set(VERDICT, "")


def groups_over_hosts(hosts: Sequence[str], tp_size: int) -> list[str]:
    """Returns a warning if ranks of one tensor-parallel group are on several hosts, else [].

    hosts: the host of each rank.
    """
    groups = [
        range(first, min(first + tp_size, len(hosts))) for first in range(0, len(hosts), tp_size)
    ]
    spread = [group for group in groups if len({hosts[rank] for rank in group}) > 1]
    if not spread:
        return []
    names = ", ".join(dict.fromkeys(hosts[rank] for rank in spread[0]))
    return [
        f"warning: {len(spread)} of {len(groups)} tensor-parallel groups span hosts, the first of "
        f"them {ranks_text(spread[0])} on {names}: what each layer exchanges goes over the "
        f"network. Start a multiple of --tensor-model-parallel-size {tp_size} ranks on each host"
    ]


def _await_arrivals(
    store: dist.Store,
    world_size: int,
    timeout: timedelta,
    notice_every: timedelta,
    say: Callable[[str], object],
) -> None:
    started, missing = time.monotonic(), list(range(1, world_size))
    while missing:
        left = timeout.total_seconds() - (time.monotonic() - started)
        if left <= 0.0:
            raise InputError(
                f"{ranks_text(missing)} of {world_size} have not joined within {_minutes(timeout)} "
                "(--distributed-timeout-minutes): see what those processes or their hosts say"
            )
        try:
            store.wait(
                [_key(rank) for rank in missing],
                timedelta(seconds=min(left, notice_every.total_seconds())),
            )
            return
        except dist.DistStoreError:  # the wait has timed out
            missing = [rank for rank in missing if not store.check([_key(rank)])]
        if missing:
            say(
                f"waiting for {ranks_text(missing)} of {world_size} "
                f"({time.monotonic() - started:.0f} s)"
            )


def _await_verdict(store: dist.Store, launch: Launch, timeout: timedelta) -> None:
    try:
        store.wait([VERDICT], timeout + NOTICE_EVERY)  # longer than rank 0 waits: it reports first
        verdict = store.get(VERDICT).decode()
    except dist.DistStoreError as error:
        raise InputError(
            f"rank 0 of {launch.world_size} has not joined within {_minutes(timeout)} "
            "(--distributed-timeout-minutes)"
        ) from error
    except RuntimeError as error:
        raise PeerError(
            "the start: rank 0, which holds the store, is gone, and says why"
        ) from error
    if verdict:
        store.set(_heard_key(launch.rank), "")
        raise PeerError("the start: rank 0 has found a fault, and says which")


def _await_readers(store: dist.Store, world_size: int) -> None:
    """Waits until the ranks that have arrived have read the verdict, for at most READERS_HAVE.

    The store may end with this process, and torch would print long errors on the other ranks.
    """
    here = [rank for rank in range(1, world_size) if store.check([_key(rank)])]
    with suppress(dist.DistStoreError):
        store.wait([_heard_key(rank) for rank in here], READERS_HAVE)


def _check_settings(store: dist.Store, arrivals: Sequence[Arrival]) -> None:
    ranks_with: dict[str, list[int]] = {}
    for rank, arrival in enumerate(arrivals):
        ranks_with.setdefault(arrival.digest, []).append(rank)
    if len(ranks_with) == 1:
        return
    found = [
        (ranks, json.loads(store.get(_settings_key(ranks[0])))) for ranks in ranks_with.values()
    ]
    names = dict.fromkeys(name for _, settings in found for name in settings)
    lines = [
        line
        for name in names
        if (line := _difference(name, [(ranks, settings.get(name)) for ranks, settings in found]))
    ]
    raise InputError(
        "the ranks were not started alike: give all of them the same flags and the same code\n  "
        + "\n  ".join(lines)
    )


def _difference(name: str, found: Sequence[tuple[list[int], str | None]]) -> str | None:
    """Returns `--lr: 0.001 on ranks 0, 1; 0.01 on rank 3`, or None if all values are equal."""
    by_value: dict[str | None, list[int]] = {}
    for ranks, value in found:
        by_value.setdefault(value, []).extend(ranks)
    if len(by_value) == 1:
        return None
    parts = [f"{value} on {ranks_text(ranks)}" for value, ranks in by_value.items()]
    more = [f"{len(parts) - VALUES_SHOWN} other values"] if len(parts) > VALUES_SHOWN else []
    return f"{name}: " + "; ".join([*parts[:VALUES_SHOWN], *more])


def _check_addresses(arrivals: Sequence[Arrival]) -> None:
    hosts = dict.fromkeys(one.host for one in arrivals)
    for one in arrivals:
        if (
            len(hosts) > 1
            and one.gloo_address is not None
            and ipaddress.ip_address(one.gloo_address).is_loopback
        ):
            others = [host for host in hosts if host != one.host]
            raise InputError(
                f"gloo would listen at {one.gloo_address} on {one.host}, to which the host's name "
                f"resolves there, and {others[0]} cannot reach it: set GLOO_SOCKET_IFNAME on every "
                f"host to its interface in their network ({one.host} has "
                f"{', '.join(one.interfaces) or 'only lo'}), or mend /etc/hosts"
            )


def _read(value: bytes) -> Arrival:
    values = json.loads(value)
    return Arrival(**{**values, "interfaces": tuple(values["interfaces"])})


def _key(rank: int) -> str:
    return f"arrival{rank}"


def _heard_key(rank: int) -> str:
    return f"heard{rank}"


def _settings_key(rank: int) -> str:
    return f"settings{rank}"


def _settings_text(settings: Mapping[str, str]) -> str:
    return json.dumps(settings, sort_keys=True)


def _code_digest() -> str:
    package, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(
            f"{path.relative_to(package)} {path.stat().st_size}\n".encode() + path.read_bytes()
        )
    return digest.hexdigest()[:12]


def _minutes(time_limit: timedelta) -> str:
    minutes = time_limit.total_seconds() / 60.0
    return f"{minutes:g} minute{'' if minutes == 1.0 else 's'}"
