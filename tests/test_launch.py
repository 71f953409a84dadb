"""pretrain_gpt.py from the outside: torchrun, srun's variables, one process; killed and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.commands import MOCK, ROOT, SMALL_RUN, command, environment, run_command
from tests.support.limits import HANG_S
from tests.support.ports import free_port
from tests.support.programs import run_program
from tests.support.runs import rows

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_a_killed_run_resumes_and_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """SIGKILL to both ranks and their launcher, somewhere after the first checkpoint. Dropout is
    on."""
    common = [*SMALL_RUN, *MOCK, "--tensor-model-parallel-size", "2", "--train-iters", "40"]

    def saving(name: str) -> list[str]:
        path = str(tmp_path / name)
        more = ["--save-interval", "5", "--save", path, "--metrics-jsonl", f"{path}.jsonl"]
        return [*common, *more]

    whole = run_program(*saving("a"), ranks=2)
    assert whole.returncode == 0, whole.stderr
    process = subprocess.Popen(
        command(*saving("b"), ranks=2),
        env=environment(),
        cwd=ROOT,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    pointer = tmp_path / "b" / "latest_checkpointed_iteration.txt"
    deadline = time.monotonic() + HANG_S
    while not pointer.exists():
        assert process.poll() is None and time.monotonic() < deadline, (
            "the run ended before it could be killed"
        )
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert int(pointer.read_text()) < 40

    resumed = run_command(*saving("b"), "--load", str(tmp_path / "b"), ranks=2)
    assert resumed.returncode == 0, resumed.stderr
    assert rows(tmp_path / "b.jsonl") == rows(tmp_path / "a.jsonl")
    names = (f"{kind}_pp00_tp{rank:02d}of02" for kind in ("model", "optimizer") for rank in (0, 1))
    for name in (*names, "rng_00000", "rng_00001"):
        file = f"iter_0000040/{name}.safetensors"
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), name


def run_tasks(*of_each_rank: list[str]) -> tuple[list[int], list[str]]:
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
def test_srun_variables_start_a_run_without_torchrun(tmp_path: Path) -> None:
    arguments = ["--tensor-model-parallel-size", "2", "--metrics-jsonl", str(tmp_path / "m")]
    statuses, outputs = run_tasks(arguments, arguments)
    assert statuses == [0, 0], outputs
    assert "2 ranks: tensor-parallel 2" in outputs[0] and outputs[1].count("iteration") == 0
    assert len(rows(tmp_path / "m")) == 12
