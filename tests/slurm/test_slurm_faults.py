"""A job that loses a task, its time, a node or its place continues by itself, and ends with the
bytes of a run that lost nothing."""

import os
import re
import signal
from functools import cache
from pathlib import Path

import pytest

from tests.slurm.cluster import until
from tests.slurm.jobs import Run
from tests.support.limits import HANG_S

pytestmark = pytest.mark.long
FLAGS = ("--train-iters", "60", "--save-interval", "10")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A function that returns the run that nothing happens to, which its first call makes."""

    @cache
    def made():
        run = Run(folder=tmp_path_factory.mktemp("whole") / "run", flags=FLAGS, ranks_per_node=1)
        run.without_slurm()
        return run

    return made


@pytest.fixture
def run(tmp_path):
    return Run(folder=tmp_path / "run", flags=FLAGS, ranks_per_node=1)


def in_its_middle(run, last=0):
    """Waits until it has saved after the iteration `last`, and is not yet near its end."""
    assert until(lambda: run.iteration > last, HANG_S) and run.iteration < 50, run.log.read_text()


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


def continues(run, cluster, job, whole, restarts=1):
    """Checks that the job started again so often and ends as if nothing had happened. Returns its
    log, and the iterations from which it started."""
    assert run.complete(cluster, job)["Restarts"] == str(restarts)
    log = run.log.read_text()
    begun = [
        int(number)
        for number in re.findall(rf"job {job} on .*: start 1 from iteration (\d+) of 60", log)
    ]
    assert begun[0] == 0 and begun == sorted({*begun}) and len(begun) == restarts + 1
    assert all(f"loaded the checkpoint of iteration {number}" in log for number in begun[1:])
    assert "finished: iteration 60 of 60, status 0" in log
    assert run.results() == whole().results()
    return log, begun


def restarted(run, cluster, job, restarts):
    """Waits for another start of the job, and until that has saved."""
    assert until(lambda: cluster.job(job)["Restarts"] == str(restarts), HANG_S), cluster.job(job)
    in_its_middle(run, run.iteration)


@pytest.mark.parametrize("launcher", ["srun", pytest.param("torchrun", marks=pytest.mark.weekly)])
def test_a_job_that_loses_a_task_its_time_and_a_node(cluster, run, whole, launcher):
    """One after the other. `--signal=B:USR1@180` signals the job's script alone; here a command
    does so, which need not wait for a minute to pass: the ranks save and end with status 0, and the
    job must not count as completed. The node is the one where rank 0 and the job's script run, so
    that Slurm has to notice it by itself."""
    job = run.submit(cluster, launcher)
    in_its_middle(run)
    name = "RANK" if launcher == "torchrun" else "SLURM_PROCID"
    victims = list(processes(run, **{name: "1"}))
    assert len(victims) == 1
    os.kill(victims[0], signal.SIGKILL)
    restarted(run, cluster, job, 1)
    cluster.run("scancel", "--batch", "--signal=USR1", str(job))
    if cluster.namespaces:  # on the loopback interface a node cannot be killed
        restarted(run, cluster, job, 2)
        cluster.kill_node("node1")
        whole()  # while Slurm finds out
        assert until(lambda: cluster.job(job)["JobState"] == "PENDING", HANG_S), cluster.job(job)
        assert list(processes(run)) == []
        cluster.boot_node("node1")
    log, begun = continues(run, cluster, job, whole, restarts=2 + cluster.namespaces)
    assert log.count(f"requeued: job {job} continues from iteration") == 2
    assert f"exiting at iteration {begun[2]}: SIGTERM" in log


@pytest.mark.weekly
def test_a_job_that_another_one_displaces(cluster, run, whole):
    """Its tasks get SIGTERM. They save and end with status 0."""
    job = run.submit(cluster, "srun")
    in_its_middle(run)
    high = ("--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null")
    cluster.submit(*high, "--wrap=true")
    log, begun = continues(run, cluster, job, whole)
    assert f"exiting at iteration {begun[1]}: SIGTERM" in log
