"""pretrain_gpt.py from the outside: torchrun, srun's variables, one process."""

import subprocess

import pytest

from tests.support.commands import MOCK, ROOT, SMALL_RUN, command, environment
from tests.support.limits import HANG_S
from tests.support.ports import free_port
from tests.support.runs import rows

pytestmark = pytest.mark.slow


def run_tasks(*of_each_rank):
    """Statuses and outputs of the program under srun's variables, with these arguments on each
    rank."""
    port = free_port()
    tasks, size = [], str(len(of_each_rank))
    for rank, arguments in enumerate(of_each_rank):
        variables = {
            **dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID"), str(rank)),
            **dict.fromkeys(("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"), size),
            **dict(SLURM_STEP_ID="0", SLURM_STEP_NODELIST="localhost", SLURM_JOB_ID="11"),
            "MASTER_PORT": str(port),
        }
        tasks.append(
            subprocess.Popen(
                command(*SMALL_RUN, *MOCK, *arguments),
                env=environment(**variables),
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [task.communicate(timeout=HANG_S)[0] for task in tasks]
    return [task.returncode for task in tasks], outputs


@pytest.mark.long
def test_srun_variables_start_a_run_without_torchrun(tmp_path):
    arguments = ["--tensor-model-parallel-size", "2", "--metrics-jsonl", str(tmp_path / "m")]
    statuses, outputs = run_tasks(arguments, arguments)
    assert statuses == [0, 0], outputs
    assert "2 ranks: tensor-parallel 2" in outputs[0] and outputs[1].count("iteration") == 0
    assert len(rows(tmp_path / "m")) == 12
