"""A job that loses a task, a node or its place continues by itself, and ends with the bytes of a
run that lost nothing."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.slurm.cluster import until
from tests.slurm.jobs import Run
from tests.support.limits import HANG_S

pytestmark = pytest.mark.long
FLAGS = ("--train-iters", "40", "--save-interval", "10")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing happens to."""
    run = Run(folder=tmp_path_factory.mktemp("whole") / "run", flags=FLAGS, ranks_per_node=1)
    run.without_slurm()
    return run


@pytest.fixture
def run(whole, tmp_path):
    return Run(folder=tmp_path / "run", flags=FLAGS, ranks_per_node=1)


def in_its_middle(run):
    """Waits until it has saved, and is not yet near its end."""
    assert until(lambda: run.iteration > 0, HANG_S) and run.iteration < 30, run.log.read_text()


def processes(run, **variables):
    """The ids of the run's processes with these variables."""
    wanted = {
        f"{name}={value}"
        for name, value in {**variables, "CHECKPOINT_PATH": str(run.folder)}.items()
    }
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (
                wanted <= set((path / "environ").read_text().split("\0"))
                and b"pretrain_gpt" in (path / "cmdline").read_bytes()
            ):
                yield int(path.name)
        except OSError:  # it has ended
            continue


def continues(run, cluster, job, whole):
    """Checks that the job started twice and ends as if nothing had happened. Returns its log."""
    assert run.complete(cluster, job)["Restarts"] == "1"
    log = run.log.read_text()
    begun = [
        int(number)
        for number in re.findall(rf"job {job} on .*: start 1 from iteration (\d+) of 40", log)
    ]
    assert (
        len(begun) == 2
        and begun[0] == 0 < begun[1]
        and f"loaded the checkpoint of iteration {begun[1]}" in log
    )
    assert "finished: iteration 40 of 40, status 0" in log
    assert run.results() == whole.results()
    return log


def test_a_killed_task(cluster, run, whole):
    job = run.submit(cluster, "torchrun")
    in_its_middle(run)
    victims = list(processes(run, RANK="1"))
    assert len(victims) == 1
    os.kill(victims[0], signal.SIGKILL)
    log = continues(run, cluster, job, whole)
    assert f"requeued: job {job} continues from iteration" in log


def test_a_lost_node(cluster, run, whole):
    """The one where rank 0 and the job's script run, so that Slurm has to notice it by itself."""
    if not cluster.namespaces:
        pytest.skip(
            "needs root and network namespaces: on the loopback interface a node cannot be killed"
        )
    job = run.submit(cluster, "srun")
    in_its_middle(run)
    cluster.kill_node("node1")
    assert until(lambda: cluster.job(job)["JobState"] == "PENDING", HANG_S), cluster.job(job)
    assert list(processes(run)) == []
    cluster.boot_node("node1")
    log = continues(run, cluster, job, whole)
    assert "requeued:" not in log


@pytest.mark.parametrize("why", ["its time", pytest.param("another job", marks=pytest.mark.weekly)])
def test_a_job_that_has_to_stop(cluster, run, whole, why):
    """`--signal=B:USR1@180` signals the job's script alone; here a command does so, which need not
    wait for a minute to pass. A pre-empted job's tasks get SIGTERM. They save and end with status
    0, and the job must not count as completed."""
    job = run.submit(cluster, "torchrun" if why == "its time" else "srun")
    in_its_middle(run)
    if why == "its time":
        cluster.run("scancel", "--batch", "--signal=USR1", str(job))
    else:
        high = ("--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null")
        cluster.submit(*high, "--wrap=true")
    log = continues(run, cluster, job, whole)
    saved = re.search(r"exiting at iteration (\d+): SIGTERM", log)
    assert saved and f"start 1 from iteration {saved[1]} of 40" in log
