"""The job scripts of examples/slurm/ on a real Slurm: two nodes with two ranks each give what four
processes give, bitwise."""

import pytest

from tests.slurm.jobs import Run

FLAGS = ("--train-iters", "12", "--save-interval", "5")


@pytest.mark.runs(daily=0, ci=1)
@pytest.mark.parametrize("launcher, tp_size, pp_size", [("torchrun", 2, 1), ("srun", 1, 2)])
def test_a_job_on_two_nodes_equals_the_same_run_without_slurm(
    cluster, tmp_path, launcher, tp_size, pp_size
):
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
