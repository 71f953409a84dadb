"""The job scripts of examples/slurm/ on a real Slurm: two nodes with two ranks each give what four
processes give, bitwise."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, until
from tests.slurm.jobs import ENDED, TINY, Run
from tests.support.commands import ROOT
from tests.support.limits import HANG_S

FLAGS = ("--train-iters", "12", "--save-interval", "5")


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "tp_size", "pp_size"), [("torchrun", 2, 1), ("srun", 1, 2)])
def test_a_job_on_two_nodes_equals_the_same_run_without_slurm(
    cluster: Cluster, tmp_path: Path, launcher: str, tp_size: int, pp_size: int
) -> None:
    """TP 2 x DP 2 with a TP group on each node; PP 2 x DP 2 with a stage on each."""
    with_slurm, without = (
        Run(folder=tmp_path / name, tp_size=tp_size, pp_size=pp_size, flags=FLAGS)
        for name in ("a", "b")
    )
    job = with_slurm.submit(cluster, launcher)
    without.without_slurm()
    with_slurm.complete(cluster, job)
    log = with_slurm.log.read_text()
    assert f"job {job} on node[1-2], restart 0: start 1 from iteration 0 of 12" in log
    assert "finished: iteration 12 of 12, status 0" in log and "span hosts" not in log
    assert with_slurm.iteration == 12 and with_slurm.results() == without.results()


@pytest.mark.long
def test_a_host_name_that_leads_to_the_loopback_is_said_before_gloo_fails(
    cluster: Cluster, tmp_path: Path
) -> None:
    """As on Debian, where /etc/hosts begins with `127.0.1.1 NAME`."""
    if not cluster.namespaces:
        pytest.skip(
            "needs root and network namespaces: each node must have a /etc/hosts of its own"
        )
    program = shlex.join(
        [sys.executable, str(ROOT / "pretrain_gpt.py"), *TINY, "--mock-data", "--train-iters", "1"]
    )
    hosts = f'{{ echo "127.0.1.1 $(hostname)"; cat /etc/hosts; }} >{tmp_path}/$(hostname)'
    wrapped = f"{hosts}; mount --bind {tmp_path}/$(hostname) /etc/hosts; exec {program}"
    job = cluster.submit(
        "--nodes=2",
        "--ntasks-per-node=1",
        f"--output={tmp_path}/log",
        "--wrap=srun --kill-on-bad-exit=1 unshare -m bash -c " + shlex.quote(wrapped),
        PYTHONPATH=str(ROOT),
    )
    assert (
        until(lambda: cluster.job(job)["JobState"] in ENDED, HANG_S)
        and cluster.job(job)["JobState"] == "FAILED"
    )
    log = (tmp_path / "log").read_text()
    assert (
        log.count("error: gloo would listen at 127.0.1.1 on node1") == 1
        and "set GLOO_SOCKET_IFNAME" in log
    )
    assert "Exception raised" not in log
