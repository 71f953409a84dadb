"""The start of a run: a wrong address of the store, who is missing, who was started with other
flags, and where gloo would listen. Each is said once, in a bounded time, before any group is made.
Real TCP stores; the ranks of most tests are threads, since none of it is a collective."""

import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_lite.config.checks import InputError
from megatron_lite.parallel import messages, startup
from megatron_lite.parallel.launch import Launch
from megatron_lite.parallel.startup import check_start, join_store, meet, own_place, settings_of
from megatron_lite.parallel.state import parallel_state
from tests.support.limits import HANG_S, patiently
from tests.support.ports import free_port
from tests.support.ranks import run_ranks
from tests.support.runs import tiny_run

LONG = timedelta(seconds=HANG_S)
RUN = tiny_run(learning_rate=0.001)


def launch(port, *, rank=1, host="127.0.0.1"):
    return Launch(launcher="slurm", rank=rank, world_size=2, master_addr=host, master_port=port)


@contextlib.contextmanager
def listener(says):
    """The port of a program that accepts connections and says nothing, or this."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(16)
        held = []

        def serve():
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


@pytest.mark.parametrize(
    "rank, says, message",
    [
        (1, None, r"127\.0\.0\.1:{} does not answer within 1 s .* Set MASTER_PORT to a free"),
        (1, b"SSH-2.0-OpenSSH_9.2\r\n", r"{} does not answer within 1 s .* Set MASTER_PORT"),
        (0, None, r"rank 0 cannot make the store .*:{} \(.* MASTER_PORT to a free port of it"),
    ],
)
def test_a_port_of_another_program_is_named(rank, says, message):
    """torch's own client waits without a limit for one that says nothing."""
    began = time.monotonic()
    with listener(says) as port, pytest.raises(InputError, match=message.format(port)):
        join_store(launch(port, rank=rank), timedelta(seconds=1))
    assert time.monotonic() - began < HANG_S


def test_a_run_reads_nothing_of_one_before_it_in_the_same_store():
    """torchrun counts no restart where hosts join; a process may also start several runs."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    own = launch(server.port, rank=0)._replace(world_size=1, agent_owns_store=True)
    for process in 0, 0, 1:  # another launch has its own connection, as a new process has
        assert meet(own._replace(local_rank=process), {}, tp_size=1, timeout=LONG).add("", 1) == 1


def test_nobody_who_listens_is_named_with_the_flag():
    message = r"nobody listens at 127.* --distributed-timeout-minutes .*refused\): see what rank 0"
    with pytest.raises(InputError, match=message):
        join_store(launch(free_port()), timedelta(seconds=1))


@pytest.mark.parametrize(
    "answer, reason",
    [
        (socket.gaierror(socket.EAI_NONAME, "Name not known"), "Name not known"),
        (UnicodeError("label too long"), "label too long"),
        (None, "no answer"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_leads_nowhere_is_named_within_seconds(monkeypatch, rank, answer, reason):
    """None: the name server never answers. torch's client, which warns once a second, is not
    asked."""

    def resolve(*args, **options):
        if answer is None:
            threading.Event().wait(HANG_S)
        else:
            raise answer

    monkeypatch.setattr(startup, "RESOLVE_S", 0.5)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(dist, "TCPStore", lambda *_, **__: pytest.fail("torch's client was asked"))
    with pytest.raises(InputError, match=rf"MASTER_ADDR head.cluster cannot .*\({reason}\): set"):
        join_store(launch(1, rank=rank, host="head.cluster"), timedelta(minutes=10))


@pytest.fixture
def arrive(monkeypatch, capsys):
    """A function that returns what each rank raised, as "InputError: text", and the lines that
    rank 0 printed. Of a world of `world_size` only `ranks` come."""
    monkeypatch.setattr(startup, "NOTICE_EVERY_S", 0.25)

    def arrive(
        world_size,
        *,
        ranks=None,
        settings=None,
        timeout=LONG,
        tp_size=1,
        place=lambda _: own_place(),
    ):
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

        def join(rank):
            own = settings(rank) if settings else settings_of(RUN, world_size)
            try:
                check_start(
                    dist.TCPStore("127.0.0.1", server.port, is_master=False),
                    Launch(launcher="slurm", rank=rank, world_size=world_size),
                    {**place(rank), "settings": own},
                    tp_size=tp_size,
                    timeout=timeout,
                )
            except InputError as error:
                return f"{type(error).__name__}: {error}"
            return None

        with ThreadPoolExecutor(world_size) as threads:
            outcomes = list(threads.map(join, range(world_size) if ranks is None else ranks))
        return outcomes, capsys.readouterr().out.splitlines()

    return arrive


def told(outcomes):
    """What rank 0 says, where the others leave it to rank 0."""
    assert outcomes[0] is not None and all(
        text is not None and text.startswith("PeerError") for text in outcomes[1:]
    )
    return outcomes[0]


def test_every_flag_counts_but_those_that_each_node_may_set_for_itself():
    topics = json.loads(RUN.to_json()).values()
    fields = {f"--{name.replace('_', '-')}" for topic in topics for name in topic}
    assert fields - set(settings_of(RUN, 2)) == {
        "--data-cache-path",
        "--log-file",
        "--metrics-jsonl",
        "--tensorboard-dir",
        "--memory-timeline",
    }


def test_ranks_that_do_not_come_are_named_after_the_timeout_and_before(arrive):
    def check(limit):
        outcomes, said = arrive(4, ranks=[0, 2], timeout=timedelta(seconds=limit))
        assert "ranks 1, 3 of 4 have not joined within --distributed-timeout-minutes" in told(
            outcomes
        )
        assert said[0].startswith("waiting for ranks 1, 3 of 4 (") and len(said) >= 2

    patiently(check, 0.6)


def test_a_rank_that_dies_while_groups_are_made_is_named(monkeypatch):
    monkeypatch.setattr(startup, "READERS_HAVE_S", 0)
    with (
        pytest.raises(InputError, match="rank 0 of 2 met the others, but"),
        startup.absent_named(dist.HashStore(), launch(1), LONG),
    ):
        raise RuntimeError("wait timeout")


def test_a_name_that_leads_to_the_loopback_is_an_error_on_several_hosts(arrive):
    def place(rank, address):
        return {"host": f"node{rank}", "gloo_address": address}

    outcomes, _ = arrive(2, place=lambda rank: place(rank, ["10.0.0.1", "127.0.1.1"][rank]))
    assert "gloo would listen at 127.0.1.1 on node1" in told(outcomes)
    assert "node0 cannot reach it: set GLOO_SOCKET_IFNAME" in told(outcomes)
    assert arrive(2, place=lambda rank: place(rank, None)) == ([None, None], [])


def test_a_tensor_parallel_group_over_two_hosts_is_a_warning(arrive):
    outcomes, said = arrive(
        4,
        tp_size=2,
        place=lambda rank: {"host": "node1" if rank < 3 else "node2", "gloo_address": None},
    )
    assert outcomes == [None] * 4 and len(said) == 1
    assert said[0].startswith("warning: 1 of 2 tensor-parallel groups span hosts")
    assert "node1, node2" in said[0] and "--tensor-model-parallel-size 2 ranks" in said[0]


def _join(rank, world_size, runs):
    """Joins for itself, as the program does: a sum over the ranks, or why there is none."""
    port = [free_port() if rank == 0 else 0]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    launch = Launch(launcher="slurm", rank=rank, world_size=world_size, master_port=port[0])
    try:
        with parallel_state(runs[rank].parallel, seed=1, launch=launch, run=runs[rank]) as parallel:
            total = torch.ones(1)
            dist.all_reduce(total, group=parallel.world_group)
            return str(total.item())
    except InputError as error:
        return str(error)


def test_ranks_that_disagree_on_the_groups_stop_before_they_make_any():
    runs = [tiny_run(tp_size=1 if rank == 3 else 2) for rank in range(4)]
    first, *others = run_ranks(_join, 4, runs)
    assert "--tensor-model-parallel-size: 2 on ranks 0-2; 1 on rank 3" in first
    assert others == ["the start: rank 0 has found a fault, and says which"] * 3


def test_slow_work_is_told_while_it_runs_and_when_it_has_ended(monkeypatch):
    said, told = [], threading.Event()
    with messages.told_if_slow("short work", said.append):
        pass
    monkeypatch.setattr(messages, "FIRST_AFTER_S", 0.01)
    with messages.told_if_slow("an index", lambda line: (said.append(line), told.set())):
        assert told.wait(HANG_S)
    assert said[0].endswith("so far") and "done after" in said[-1]
    assert all(line.startswith("an index: ") for line in said)
