"""The way to the store where the ranks meet: whatever is wrong with the address is said once,
within a bounded time."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_lite.config.checks import InputError
from megatron_lite.parallel import rendezvous
from megatron_lite.parallel.launch import Launch
from megatron_lite.parallel.rendezvous import OutOfTime, join_store, within
from tests.support.commands import MOCK, ROOT, SMALL_RUN, environment
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


def test_a_store_that_comes_late_is_joined_and_the_wait_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "NOTICE_EVERY_S", 0.05)
    port, said, stores = free_port(), list[str](), list[dist.TCPStore]()
    waiting = threading.Event()

    def make() -> None:
        waiting.wait(HANG_S)
        stores.append(join_store(launch(port, rank=0), timedelta(seconds=HANG_S)))
        stores[0].set("key", "value")

    def say(line: str) -> None:
        said.append(line)
        waiting.set()

    thread = threading.Thread(target=make)
    thread.start()
    store = join_store(launch(port), timedelta(seconds=HANG_S), say=say)
    thread.join()
    assert store.get("key") == b"value" and store.timeout == timedelta(seconds=HANG_S)
    assert said[0].startswith(f"[rank 1] waiting for rank 0 to listen at 127.0.0.1:{port} (")


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


@pytest.mark.parametrize(("value", "used"), [(None, True), ("1", True), ("0", False)])
def test_use_libuv_chooses_the_server_of_the_store(
    value: str | None, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian builds torch without libuv. There torch's message is to set the variable to 0."""
    monkeypatch.delenv("USE_LIBUV", raising=False)
    if value is not None:
        monkeypatch.setenv("USE_LIBUV", value)
    store = join_store(launch(free_port(), rank=0), timedelta(seconds=HANG_S))
    assert store.libuvBackend is used


def test_a_name_that_the_name_server_learns_a_little_later_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, resolve = list[object](), socket.getaddrinfo

    def late(host: str, *args: object, **options: object) -> object:
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return resolve(host, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", late)
    monkeypatch.setattr(rendezvous, "PAUSE_S", 0.01)
    rendezvous._resolve(launch(1), time.monotonic() + HANG_S)
    assert len(asked) == 3


def test_within_returns_raises_and_gives_up() -> None:
    assert within(HANG_S, lambda: 3) == 3
    with pytest.raises(KeyError):
        within(HANG_S, lambda: {}[1])
    with pytest.raises(OutOfTime, match="0.05 s"):
        within(0.05, lambda: threading.Event().wait(HANG_S))


@pytest.mark.long
@pytest.mark.slow
def test_the_program_says_one_line_and_ends_with_status_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, which must end although a thread of it waits in torch's client."""
    with listener() as port:
        program = (
            "from megatron_lite.parallel import rendezvous; rendezvous.HANDSHAKE_S = 1.0; "
            "import sys, pretrain_gpt; "
            "sys.exit(pretrain_gpt.main(sys.argv[1:]))"
        )
        place = environment(
            PYTHONPATH=str(ROOT),
            RANK="1",
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        done = subprocess.run(
            [sys.executable, "-c", program, *SMALL_RUN, *MOCK],
            cwd=ROOT,
            env=place,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == (
        f"pretrain_gpt.py: [rank 1] error: what listens at 127.0.0.1:{port} does not answer "
        "within 1 s as the "
        "store of the ranks does: another program may hold that port. Set MASTER_PORT to a "
        "free port of rank "
        "0's host\n"
    )


def test_a_store_that_is_stopped_in_the_middle_of_the_start_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its host has frozen: the kernel still takes requests, and nobody answers them."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(store.port).encode())
        signal.pause()
    try:
        assert select.select([reading], [], [], HANG_S)[0]
        port = int(os.read(reading, 16))
        store = join_store(launch(port), timedelta(seconds=HANG_S))
        os.kill(pid, signal.SIGSTOP)
        # the signal takes effect a little later: until then it answers
        assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
        with pytest.raises(OutOfTime):
            within(0.5, lambda: store.check(["key"]))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)
