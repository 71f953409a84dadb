"""Runs of examples/slurm/ on the test cluster: the flags, the job, its end, and the same run
without Slurm."""

import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from arguments import parse_args
from tests.slurm.cluster import until
from tests.support.commands import ROOT
from tests.support.limits import HANG_S
from tests.support.runs import rows, run_on_ranks, step_bytes

SCRIPTS = {"torchrun": "train_multinode.sbatch", "srun": "train_multinode_srun.sbatch"}
TINY = shlex.split(
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --vocab-size 98 --micro-batch-size 1 --global-batch-size 4 "
    "--lr 1e-2 --eval-iters 1 --log-interval 5 --distributed-backend gloo "
    "--distributed-timeout-minutes 5"
)
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run with tiny sizes on two nodes that saves in `folder`."""

    folder: Path
    flags: tuple[str, ...]
    ranks_per_node: int = 2
    tp_size: int = 1
    pp_size: int = 1

    @property
    def variables(self):
        """What decides the flags of examples/slurm/workload.sh."""
        return dict(
            TP=str(self.tp_size),
            PP=str(self.pp_size),
            CHECKPOINT_PATH=str(self.folder),
            RANKS_PER_NODE=str(self.ranks_per_node),
        )

    @property
    def iteration(self):
        """That of the newest checkpoint, 0 without one."""
        pointer = self.folder / "latest_checkpointed_iteration.txt"
        return int(pointer.read_text()) if pointer.exists() else 0

    @property
    def log(self):
        """What the job writes, in all of its starts."""
        return self.folder.with_suffix(".log")

    def submit(self, cluster, launcher, *options):
        """The number of the job that runs it."""
        tasks = 1 if launcher == "torchrun" else self.ranks_per_node
        return cluster.submit(
            f"--ntasks-per-node={tasks}",
            "--cpus-per-task=1",
            "--gpus-per-node=2",
            f"--output={self.log}",
            *options,
            str(ROOT / "examples" / "slurm" / SCRIPTS[launcher]),
            *TINY,
            *self.flags,
            **self.variables,
            VENV=sys.prefix,
            ROOT=str(ROOT),
        )

    def complete(self, cluster, job, seconds=HANG_S):
        """What Slurm knows of the job once it is completed."""
        until(lambda: cluster.job(job)["JobState"] in ENDED, seconds)
        state = cluster.job(job)
        assert state["JobState"] == "COMPLETED", (
            f"{state}\n{self.log.read_text() if self.log.exists() else ''}\n{cluster.logs()}"
        )
        return state

    def without_slurm(self):
        """The same flags in as many processes of this machine."""
        script = 'source examples/slurm/workload.sh; printf "%s\\0" "${FLAGS[@]}"'
        words = subprocess.run(
            ["bash", "-c", script],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            env={**self.variables, "PATH": "/usr/bin:/bin", "SLURM_JOB_NAME": "gpt"},
        ).stdout.split("\0")[:-1]
        config = parse_args([*words, *TINY, *self.flags]).config
        self.folder.mkdir()
        run_on_ranks(config, 2 * self.ranks_per_node, detail=False)

    def results(self):
        """The files of the last checkpoint, and every logged number."""
        found = step_bytes(self.folder, self.iteration)
        assert found
        return found, rows(self.folder / "metrics.jsonl")
