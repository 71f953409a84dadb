"""Opens the shared memory of a group (shared_memory.py), if all its ranks are on one host.

Each rank makes a region of memory that has no name in any file system (memfd), and a listening
socket with a random name outside any file system (an abstract one). A killed rank therefore leaves
nothing behind, and no limit of /dev/shm applies. The ranks exchange the names through the group's
gloo, connect, and pass each other their regions through the sockets.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import secrets
import socket
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.config.parallel import SHARED_REGION_BYTES
from megatron_lite.parallel.collectives import all_gather_bytes
from megatron_lite.parallel.shared_memory import CHANNELS, Channel

CONNECT_S = 60.0  # the limit for one step of a connection; both ranks have arrived before
HELLO = struct.Struct("<I16s")  # a rank, and its secret
CREDENTIALS = struct.Struct("3i")  # process, user and group of the other end of a socket
BOOT_ID, NETWORK = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
Sockets = dict[int, socket.socket]


@contextmanager
def shared_memory_of(
    groups: Iterable[ProcessGroup | None], *, timeout: float, say: Callable[[str], object]
) -> Iterator[None]:
    """Lets collectives of CPU tensors of these groups use shared memory inside the block.

    It leaves out groups of None, and groups with ranks on several hosts. If the ranks of a group
    cannot share memory, its first rank prints the reason, and the group stays with gloo. Every rank
    of a group must enter at the same time. Issues a few all-gathers of texts for each group.

    timeout: limit in seconds for one wait; parallel/timeouts.py changes it.
    """
    with ExitStack() as opened:
        # With DETAIL, torch compares the collectives of the ranks, and must see them.
        if dist.get_debug_level() != dist.DebugLevel.DETAIL:
            for group in dict.fromkeys(group for group in groups if group is not None):
                channel = open_channel(group, timeout=timeout, say=say)
                if channel is not None:
                    opened.callback(channel.close)
                    CHANNELS[group] = channel
                    opened.callback(CHANNELS.pop, group, None)
        yield


def open_channel(
    group: ProcessGroup, *, timeout: float, say: Callable[[str], object]
) -> Channel | None:
    """Returns this rank's end of the group's shared memory, or None on every rank of the group.

    Prints a line if the ranks are on one host and something fails. Raises no OSError.
    """
    if not _all_on_one_host(group):
        return None
    with ExitStack() as made:
        sockets: Sockets = {}
        made.callback(_close, sockets)
        regions: list[Tensor] = []
        fault, secret, name = "", secrets.token_hex(8), ""
        try:
            memory = made.enter_context(_new_memory())
            listener = made.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind("\0megatron_lite." + secrets.token_hex(16))
            # The names are exchanged after this line, so every rank that connects is heard.
            listener.listen(group.size())
            name = listener.getsockname()[1:].decode()
        except OSError as error:
            fault = _text(error)
        offers = _gather({"fault": fault, "secret": secret, "name": name}, group)
        if not _fault_of(offers):
            try:
                _connect(group, offers, listener, sockets)
                regions = _exchange_memory(group.rank(), memory, sockets)
            except OSError as error:
                fault = _text(error)
            offers = _gather({"fault": fault}, group)
        reason = _fault_of(offers)
        if reason:
            if group.rank() == 0:
                say(f"{group.size()} ranks of this host cannot share memory and use gloo: {reason}")
            return None
        for one in sockets.values():  # CONNECT_S ends here: the channel has a limit of its own
            one.setblocking(True)
        channel = Channel(
            group.rank(),
            regions,
            [sockets.get(rank) for rank in range(group.size())],
            timeout=timeout,
        )
        sockets.clear()  # the channel closes them
        return channel


def _close(sockets: Sockets) -> None:
    for one in sockets.values():
        one.close()


def _all_on_one_host(group: ProcessGroup) -> bool:
    """Returns whether the ranks see the same kernel and the same names of abstract sockets."""
    place = ""
    # Abstract sockets belong to a network namespace, and two containers of a host may have two.
    if hasattr(os, "memfd_create") and BOOT_ID.exists() and NETWORK.exists():
        place = f"{BOOT_ID.read_text().strip()} {NETWORK.stat().st_ino}"
    places = {offer["place"] for offer in _gather({"place": place}, group)}
    return places == {place} and place != ""


def _gather(offer: Mapping[str, str], group: ProcessGroup) -> list[dict[str, str]]:
    return [json.loads(data) for data in all_gather_bytes(json.dumps(offer).encode(), group)]


def _fault_of(offers: Sequence[Mapping[str, str]]) -> str:
    faults = [f"{one['fault']} (rank {rank})" for rank, one in enumerate(offers) if one["fault"]]
    return faults[0] if faults else ""


@contextmanager
def _new_memory() -> Iterator[int]:
    """Yields the file descriptor of SHARED_REGION_BYTES of memory without a name, and closes it.

    Raises OSError if the memory is not available now. No later write can fail.
    """
    descriptor = os.memfd_create("megatron_lite", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, SHARED_REGION_BYTES)
        # No rank that gets the descriptor can make the memory shorter. A read beyond its end would
        # kill the process that reads.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        yield descriptor
    finally:
        os.close(descriptor)


def _connect(
    group: ProcessGroup,
    offers: Sequence[Mapping[str, str]],
    listener: socket.socket,
    sockets: Sockets,
) -> None:
    """Fills `sockets` with a connection to every other rank. The lower of two ranks listens."""
    rank = group.rank()
    for other in range(rank):
        one = sockets[other] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        one.settimeout(CONNECT_S)
        one.connect("\0" + offers[other]["name"])
        one.send(HELLO.pack(rank, offers[rank]["secret"].encode()))
    listener.settimeout(CONNECT_S)
    while len(sockets) < group.size() - 1:
        one, _ = listener.accept()
        one.settimeout(CONNECT_S)
        hello = one.recv(HELLO.size)
        other, secret = HELLO.unpack(hello) if len(hello) == HELLO.size else (rank, b"")
        if not (
            rank < other < group.size()
            and other not in sockets
            and secrets.compare_digest(secret, offers[other]["secret"].encode())
        ):
            one.close()  # another program of this host has found the name
            continue
        sockets[other] = one
    for one in sockets.values():
        _, user, _ = CREDENTIALS.unpack(
            one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        )
        if user != os.getuid():
            raise PermissionError(f"a rank runs as user {user}, and this one as {os.getuid()}")


def _exchange_memory(rank: int, memory: int, sockets: Sockets) -> list[Tensor]:
    """Returns the region of every rank. This rank's is writable."""
    regions = {rank: _mapped(memory, mmap.PROT_READ | mmap.PROT_WRITE)}
    # Each rank sends to all others before it receives, so no two ranks wait for each other.
    for one in sockets.values():
        socket.send_fds(one, [b"m"], [memory])
    for other, one in sockets.items():
        _, descriptors, _, _ = socket.recv_fds(one, 1, 1)
        if not descriptors:
            raise ConnectionError(f"rank {other} of the group has ended")
        try:
            regions[other] = _mapped(descriptors[0], mmap.PROT_READ)
        finally:
            os.close(descriptors[0])
    return [regions[other] for other in sorted(regions)]


def _mapped(descriptor: int, protection: int) -> Tensor:
    """Returns the memory as uint8 [SHARED_REGION_BYTES]. It is unmapped with its last tensor."""
    mapped = mmap.mmap(descriptor, SHARED_REGION_BYTES, prot=protection)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(mapped, dtype=torch.uint8)


def _text(error: OSError) -> str:
    return f"{type(error).__name__}: {error}"
