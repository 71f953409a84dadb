"""The start of a run: who is missing, who was started with other flags, and where gloo would
listen, each said before any group is made. Real TCP stores; the ranks of the first half are
threads, since none of it is a collective."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_lite.config.checks import InputError
from megatron_lite.config.run import RunConfig
from megatron_lite.parallel.launch import Launch
from megatron_lite.parallel.rank_names import ranks_text
from megatron_lite.parallel.startup import Arrival, check_start, settings_of
from megatron_lite.parallel.state import parallel_state
from tests.support.limits import HANG_S, patiently
from tests.support.ports import free_port
from tests.support.ranks import run_ranks
from tests.support.runs import tiny_run

LONG = timedelta(seconds=HANG_S)
RUN = tiny_run(learning_rate=0.001)


def arrive(
    world_size: int,
    *,
    ranks: Iterable[int] | None = None,
    settings: Callable[[int], dict[str, str]] | None = None,
    timeout: timedelta = LONG,
    tp_size: int = 1,
    **arrival: Callable[[int], object],
) -> tuple[list[str | None], list[str]]:
    """What each rank raised, as "InputError: text", and what rank 0 said. Of a world of
    `world_size` only `ranks` come."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    said: list[str] = []

    def join(rank: int) -> str | None:
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
        mine = settings(rank) if settings else settings_of(RUN, world_size)
        here = replace(Arrival.here(mine), **{name: value(rank) for name, value in arrival.items()})  # type: ignore[arg-type]
        try:
            check_start(
                store,
                Launch(launcher="slurm", rank=rank, world_size=world_size),
                mine,
                tp_size=tp_size,
                timeout=timeout,
                arrival=here,
                notice_every=timedelta(seconds=0.25),
                say=said.append,
            )
        except InputError as error:
            return f"{type(error).__name__}: {error}"
        return None

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(join, range(world_size) if ranks is None else ranks)), said


def with_lr(value: float) -> RunConfig:
    return replace(RUN, lr_schedule=replace(RUN.lr_schedule, lr=value))


def told(outcomes: list[str | None]) -> str:
    """What rank 0 says, where the others leave it to rank 0."""
    assert outcomes[0] is not None and all(
        text is not None and text.startswith("PeerError") for text in outcomes[1:]
    )
    return outcomes[0]


def test_a_differing_field_is_named_with_every_value_and_its_ranks() -> None:
    outcomes, said = arrive(
        4, settings=lambda rank: settings_of(with_lr(0.01 if rank == 2 else 0.001), 4)
    )
    lines = told(outcomes).splitlines()
    assert lines[0].startswith("InputError: the ranks were not started alike")
    assert [line.strip() for line in lines[1:]] == [
        "--lr: 0.001 on ranks 0, 1, 3; 0.01 on rank 2"
    ] and said == []


def test_every_flag_counts_but_those_that_each_node_may_set_for_itself() -> None:
    compared = set(settings_of(RUN, 2))
    fields = {
        f"--{name.replace('_', '-')}"
        for topic in json.loads(RUN.to_json()).values()
        for name in topic
    }
    assert fields - compared == {
        "--data-cache-path",
        "--log-file",
        "--metrics-jsonl",
        "--tensorboard-dir",
        "--memory-timeline",
    }


def test_ranks_that_do_not_come_are_named_after_the_timeout_and_before() -> None:
    def check(limit: float) -> None:
        outcomes, said = arrive(4, ranks=[0, 2], timeout=timedelta(seconds=limit))
        assert told(outcomes) == (
            f"InputError: ranks 1, 3 of 4 have not joined within {limit / 60:g} minutes "
            "(--distributed-timeout-minutes): see what those processes or their hosts say"
        )
        assert said[0].startswith("waiting for ranks 1, 3 of 4 (") and len(said) >= 2

    patiently(check, 0.6)


def test_a_name_that_leads_to_the_loopback_is_an_error_on_several_hosts() -> None:
    addresses = ["10.0.0.1", "127.0.1.1"]
    names = dict(host=lambda rank: f"node{rank}", interfaces=lambda rank: ("eth0", "ib0"))
    outcomes, _ = arrive(2, gloo_address=lambda rank: addresses[rank], **names)
    assert told(outcomes).startswith("InputError: gloo would listen at 127.0.1.1 on node1")
    assert "node0 cannot reach it: set GLOO_SOCKET_IFNAME" in told(
        outcomes
    ) and "(node1 has eth0, ib0)" in told(outcomes)
    assert arrive(2, gloo_address=lambda rank: None, **names) == ([None, None], [])


def test_a_tensor_parallel_group_over_two_hosts_is_a_warning() -> None:
    outcomes, said = arrive(
        4,
        tp_size=2,
        host=lambda rank: "node1" if rank < 3 else "node2",
        gloo_address=lambda rank: None,
    )
    assert outcomes == [None] * 4
    assert said == [
        "warning: 1 of 2 tensor-parallel groups span hosts, the first of them ranks 2, 3 on "
        "node1, node2: what each "
        "layer exchanges goes over the network. Start a multiple of "
        "--tensor-model-parallel-size 2 ranks on each "
        "host"
    ]


def test_no_more_stretches_of_ranks_are_named_than_asked_for() -> None:
    assert ranks_text([0, 1, 2, 4, 6, 7], at_most=2) == "ranks 0-2, 4 and 2 more"
    assert (
        ranks_text(range(100), at_most=1) == "ranks 0-99" and ranks_text([5], at_most=8) == "rank 5"
    )


def _join(rank: int, world_size: int, runs: list[RunConfig]) -> str:
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


def test_ranks_that_disagree_on_the_groups_stop_before_they_make_any() -> None:
    runs = [tiny_run(tp_size=1 if rank == 3 else 2) for rank in range(4)]
    first, *others = run_ranks(_join, 4, runs)
    assert "--tensor-model-parallel-size: 2 on ranks 0-2; 1 on rank 3" in first
    assert others == ["the start: rank 0 has found a fault, and says which"] * 3


def test_ranks_that_agree_make_their_groups() -> None:
    cached = replace(RUN, data=replace(RUN.data, data_cache_path="/scratch/of/this/node"))
    assert run_ranks(_join, 2, [RUN, cached]) == ["2.0", "2.0"]
