"""What the ranks tell each other before the first process group is made, through the store where they meet.

A rank that is missing, has other flags, or listens where no other host can reach it would show as a hang or as an error far from
its cause. Here each rank leaves its `Arrival` in the store; rank 0 reads all of them and leaves its verdict there. No collective
is issued: the ranks may disagree on the groups.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_lite.config.checks import InputError, PeerError, flag
from megatron_lite.config.run import RunConfig
from megatron_lite.parallel.launch import Launch

# Each node may keep indices in a place of its own; to the other paths rank 0 alone writes.
MAY_DIFFER = ("data_cache_path", "metrics_jsonl", "tensorboard_dir", "memory_timeline")
NOTICE_EVERY = timedelta(seconds=30)
READERS_HAVE = timedelta(seconds=5)
VERDICT = "verdict"
VALUES_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """What one rank says of itself. gloo_address: where gloo will listen; None where GLOO_SOCKET_IFNAME decides it.

    digest: of the settings, which lie in the store beside it and are read only where digests differ.
    """

    host: str
    gloo_address: str | None
    interfaces: tuple[str, ...]
    digest: str

    @classmethod
    def here(cls, settings: Mapping[str, str]) -> Arrival:
        """Of this process."""
        return cls(host=socket.gethostname(), gloo_address=None if os.environ.get("GLOO_SOCKET_IFNAME") else own_address(),
                   interfaces=tuple(name for _, name in socket.if_nameindex() if name != "lo"),
                   digest=hashlib.sha256(_settings_text(settings).encode()).hexdigest())


def settings_of(run: RunConfig | None, world_size: int) -> dict[str, str]:
    """All that must be the same on every rank, as text: the flags, the size of the world, torch and this package's code."""
    flags = {} if run is None else {flag(name): str(value) for topic in asdict(run).values() for name, value in topic.items()
                                    if name not in MAY_DIFFER}
    return {"WORLD_SIZE": str(world_size), "torch": torch.__version__, "the code of megatron_lite": _code_digest(), **flags}


def own_address() -> str:
    """What this host's name resolves to, where gloo listens by itself; the loopback address where it does not resolve."""
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return "127.0.0.1"


def _say(line: str) -> None:
    print(line, flush=True)


def check_start(store: dist.Store, launch: Launch, settings: Mapping[str, str], *, tp_size: int, timeout: timedelta,
                arrival: Arrival | None = None, notice_every: timedelta = NOTICE_EVERY,
                say: Callable[[str], object] = _say) -> None:
    """Returns once every rank has arrived, with the same settings, where the others can reach it.

    InputError on rank 0 where that is not so, PeerError on the others. Rank 0 says whom it waits for, and warns where
    tensor-parallel groups span hosts. Costs each rank two writes and two reads of the store, rank 0 one read of all arrivals.
    """
    arrival = arrival or Arrival.here(settings)
    store.set(_settings_key(launch.rank), _settings_text(settings))
    store.set(_key(launch.rank), json.dumps(asdict(arrival)))
    if launch.rank > 0:
        _await_verdict(store, launch, timeout)
        return
    try:
        _await_arrivals(store, launch.world_size, timeout, notice_every, say)
        arrivals = [_read(value) for value in store.multi_get([_key(rank) for rank in range(launch.world_size)])]
        _check_settings(store, arrivals)
        _check_addresses(arrivals)
    except InputError as error:
        store.set(VERDICT, str(error))
        _await_readers(store, launch.world_size)
        raise
    for warning in groups_over_hosts([one.host for one in arrivals], tp_size):
        say(warning)
    store.set(VERDICT, "")


def groups_over_hosts(hosts: Sequence[str], tp_size: int) -> list[str]:
    """A warning where ranks of one tensor-parallel group are on several of the `hosts` (of each rank)."""
    groups = [range(first, min(first + tp_size, len(hosts))) for first in range(0, len(hosts), tp_size)]
    spread = [group for group in groups if len({hosts[rank] for rank in group}) > 1]
    if not spread:
        return []
    names = ", ".join(dict.fromkeys(hosts[rank] for rank in spread[0]))
    return [f"warning: {len(spread)} of {len(groups)} tensor-parallel groups span hosts, the first of them "
            f"{ranks_text(spread[0])} on {names}: what each layer exchanges goes over the network. Start a multiple of "
            f"--tensor-model-parallel-size {tp_size} ranks on each host"]


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0, 1`, `ranks 0-3, 8`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if sum(map(len, runs)) > 1 else ''} {', '.join(parts)}"


def _await_arrivals(store: dist.Store, world_size: int, timeout: timedelta, notice_every: timedelta,
                    say: Callable[[str], object]) -> None:
    started, missing = time.monotonic(), list(range(1, world_size))
    while missing:
        left = timeout.total_seconds() - (time.monotonic() - started)
        if left <= 0.0:
            raise InputError(f"{ranks_text(missing)} of {world_size} have not joined within {_minutes(timeout)} "
                             "(--distributed-timeout-minutes): see what those processes or their hosts say")
        try:
            store.wait([_key(rank) for rank in missing], timedelta(seconds=min(left, notice_every.total_seconds())))
            return
        except dist.DistStoreError:  # the time is over
            missing = [rank for rank in missing if not store.check([_key(rank)])]
        if missing:
            say(f"waiting for {ranks_text(missing)} of {world_size} ({time.monotonic() - started:.0f} s)")


def _await_verdict(store: dist.Store, launch: Launch, timeout: timedelta) -> None:
    try:
        store.wait([VERDICT], timeout + NOTICE_EVERY)  # rank 0 speaks first
        verdict = store.get(VERDICT).decode()
    except dist.DistStoreError as error:
        raise InputError(f"rank 0 of {launch.world_size} has not joined within {_minutes(timeout)} "
                         "(--distributed-timeout-minutes)") from error
    except RuntimeError as error:
        raise PeerError("the start: rank 0, which holds the store, is gone, and says why") from error
    if verdict:
        store.set(_heard_key(launch.rank), "")
        raise PeerError("the start: rank 0 has found a fault, and says which")


def _await_readers(store: dist.Store, world_size: int) -> None:
    """Until the ranks that are here have read the verdict: the store may end with this process, and torch says so at length."""
    here = [rank for rank in range(1, world_size) if store.check([_key(rank)])]
    with suppress(dist.DistStoreError):
        store.wait([_heard_key(rank) for rank in here], READERS_HAVE)


def _check_settings(store: dist.Store, arrivals: Sequence[Arrival]) -> None:
    ranks_with: dict[str, list[int]] = {}
    for rank, arrival in enumerate(arrivals):
        ranks_with.setdefault(arrival.digest, []).append(rank)
    if len(ranks_with) == 1:
        return
    found = [(ranks, json.loads(store.get(_settings_key(ranks[0])))) for ranks in ranks_with.values()]
    names = dict.fromkeys(name for _, settings in found for name in settings)
    lines = [line for name in names if (line := _difference(name, [(ranks, settings.get(name)) for ranks, settings in found]))]
    raise InputError("the ranks were not started alike: give all of them the same flags and the same code\n  "
                     + "\n  ".join(lines))


def _difference(name: str, found: Sequence[tuple[list[int], str | None]]) -> str | None:
    """`--lr: 0.001 on ranks 0, 1; 0.01 on rank 3`; None where all are the same."""
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
        if len(hosts) > 1 and one.gloo_address is not None and ipaddress.ip_address(one.gloo_address).is_loopback:
            others = [host for host in hosts if host != one.host]
            raise InputError(f"gloo would listen at {one.gloo_address} on {one.host}, to which the host's name resolves there, "
                             f"and {others[0]} cannot reach it: set GLOO_SOCKET_IFNAME on every host to its interface in their "
                             f"network ({one.host} has {', '.join(one.interfaces) or 'only lo'}), or mend /etc/hosts")


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
        digest.update(f"{path.relative_to(package)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _minutes(time_limit: timedelta) -> str:
    minutes = time_limit.total_seconds() / 60.0
    return f"{minutes:g} minute{'' if minutes == 1.0 else 's'}"
