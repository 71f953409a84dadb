"""The way to the store where the ranks meet: whatever is wrong with the address is said once,
within a bounded time."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_lite.config.checks import InputError
from megatron_lite.parallel import rendezvous
from megatron_lite.parallel.launch import Launch
from megatron_lite.parallel.rendezvous import join_store
from tests.support.limits import HANG_S
from tests.support.ports import free_port

LIMIT = timedelta(seconds=1)


def launch(port: int, *, rank: int = 1, host: str = "127.0.0.1") -> Launch:
    return Launch(launcher="slurm", rank=rank, world_size=2, master_addr=host, master_port=port)


@contextlib.contextmanager
def listener(*, says: bytes | None = None) -> Iterator[int]:
    """The port of a program that accepts connections and says nothing, or this."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(16)
        held = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    held.append(server.accept()[0])
                    if says is not None:
                        held[-1].sendall(says)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        for connection in held:
            connection.close()


@pytest.mark.parametrize("says", [None, b"SSH-2.0-OpenSSH_9.2\r\n"])
def test_a_program_that_is_no_store_is_named_within_the_timeout(says: bytes | None) -> None:
    """torch's own client waits without a limit for one that says nothing."""
    began = time.monotonic()
    with (
        listener(says=says) as port,
        pytest.raises(
            InputError,
            match=rf"what listens at 127\.0\.0\.1:{port} does not answer within 1 s as the "
            r"store of the ranks does: "
            r"another program may hold that port\. Set MASTER_PORT to a free port",
        ),
    ):
        join_store(launch(port), LIMIT)
    assert time.monotonic() - began < HANG_S


def test_nobody_who_listens_is_named_with_the_flag() -> None:
    began = time.monotonic()
    with pytest.raises(
        InputError,
        match=r"nobody listens at 127\.0\.0\.1:\d+ after 0\.0166667 minutes "
        r"\(--distributed-timeout-"
        r"minutes; Connection refused\): see what rank 0 says",
    ):
        join_store(launch(free_port()), LIMIT)
    assert time.monotonic() - began < HANG_S


def test_rank_0_names_a_port_that_is_taken() -> None:
    with (
        listener() as port,
        pytest.raises(
            InputError, match=rf"rank 0 cannot make the store .* at 127\.0\.0\.1:{port} \("
        ),
    ):
        join_store(launch(port, rank=0), LIMIT)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (
            socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
            "Name or service not known",
        ),
        (UnicodeError("label too long"), "label too long"),
        (None, "its name server does not answer"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_leads_nowhere_is_named_within_seconds(
    monkeypatch: pytest.MonkeyPatch, rank: int, answer: Exception | None, reason: str
) -> None:
    """None: the name server never answers. Before torch's client is asked at all, which warns once
    a second."""

    def resolve(*args: object, **options: object) -> None:
        if answer is None:
            threading.Event().wait(HANG_S)
        else:
            raise answer

    monkeypatch.setattr(rendezvous, "RESOLVE_S", 0.5)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(
        dist, "TCPStore", lambda *args, **options: pytest.fail("torch's client was asked")
    )
    with pytest.raises(InputError) as fault:
        join_store(launch(1, rank=rank, host="head.cluster"), timedelta(minutes=10))
    assert str(fault.value) == (
        f"MASTER_ADDR head.cluster cannot be resolved on {socket.gethostname()} ({reason}): "
        "set it to a "
        "name or an address of rank 0's host that every host knows"
    )
