"""examples/slurm/restarts.sh without Slurm: which end of a step ends the job, and which puts it
back into the queue.

scontrol and scancel are programs of the test that write down how they were called.
"""

import subprocess
import sys

import pytest

from tests.support.commands import ROOT
from tests.support.limits import HANG_S

STATE = """#!/bin/bash
if [[ $1 == show && $STATE == DOWN && ! -e $CALLS ]]; then echo asked >>"$CALLS"; exit 1; fi
if [[ $1 == show ]]; then echo "JobId=7 JobState=${STATE/DOWN/RUNNING} Restarts=0"; exit; fi
echo "$@" >>"$CALLS"
"""


def bash(script, *words, **variables):
    """Runs a part of a job script with its words. Texts hold bytes as names of files do."""
    known = dict(root=str(ROOT), PATH="/usr/bin:/bin", SLURM_CPUS_PER_TASK="2")
    return subprocess.run(
        ["bash", "-c", f"set -euo pipefail; {script}", "job", *words],
        cwd=ROOT,
        env={**known, **variables},
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=HANG_S,
        check=False,
    )


class Job:
    """A job that trains to iteration 40 and saves in `save`."""

    def __init__(self, folder):
        self.folder, self.save, self.calls = folder, folder / "save", folder / "calls"
        for name, text in (
            ("scontrol", STATE),
            ("scancel", '#!/bin/bash\necho scancel "$@" >>"$CALLS"\n'),
        ):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)

    def start(self, step, state="RUNNING", **variables):
        """What the job script does where the job's step is `bash -c STEP`."""
        script = f'source examples/slurm/restarts.sh; GOAL=40 SAVE={self.save}; train bash -c "$1"'
        known = dict(
            PATH=f"{self.folder}:/usr/bin:/bin",
            SLURM_JOB_ID="7",
            SLURM_JOB_NODELIST="node[1-2]",
            CALLS=str(self.calls),
            STATE=state,
            VENV=str(self.folder),
        )
        return bash(script, step, **{**known, **variables})

    def saved(self, iteration):
        """A step that saves."""
        return f"echo {iteration} >{self.save}/latest_checkpointed_iteration.txt"

    def called(self):
        found = self.calls.read_text().splitlines() if self.calls.exists() else []
        self.calls.unlink(missing_ok=True)
        return found

    def outcome(self, step, *state, **variables):
        """The status of a start, and what it called."""
        return self.start(step, *state, **variables).returncode, self.called()

    def fails_twice(self):
        """Both starts are put back into the queue."""
        for _ in range(2):
            assert self.outcome("exit 5") == (5, ["requeue 7"])


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def test_a_fault_after_the_last_checkpoint_fails_the_job_and_is_not_repeated(job):
    assert job.outcome(f"{job.saved(40)}; exit 3") == (3, [])


@pytest.mark.parametrize("status", [0, 1, 143])
def test_a_step_that_ends_before_the_run_does_is_requeued_whatever_its_status(job, status):
    """0 too: ranks that were pre-empted, and saved, end with 0, and Slurm would take the job for
    completed."""
    done = job.start(f"{job.saved(8)}; exit {status}")
    assert (done.returncode, job.called()) == (status, ["requeue 7"])
    assert "requeued: job 7 continues from iteration 8 of 40" in done.stdout


def test_what_fails_each_time_at_the_same_iteration_is_requeued_only_so_often(job):
    job.fails_twice()
    done = job.start("exit 5")
    assert (done.returncode, job.called()) == (5, [])
    assert (
        "error: start 3 from iteration 0 came no further (status 5): the job is not requeued"
        in done.stderr
    )
    assert job.outcome("exit 0", MAX_STARTS="1") == (1, [])
    (job.save / "slurm_starts.txt.tmp").mkdir()  # a count that cannot be kept
    assert job.outcome("exit 5", SLURM_JOB_ID="9") == (5, [])


def test_progress_begins_a_new_count_and_so_does_another_job(job):
    for iteration in (8, 16):
        job.fails_twice()
        assert job.outcome(f"{job.saved(iteration)}; exit 5") == (5, ["requeue 7"])
    job.fails_twice()
    done = job.start("exit 5", SLURM_JOB_ID="9")
    assert "start 1 from iteration 16 of 40" in done.stdout and job.called()[-1] == "requeue 9"


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", "PENDING"])
def test_a_job_that_was_cancelled_stays_so(job, state):
    assert job.outcome("exit 1", state) == (1, [])


def test_a_controller_that_fails_is_asked_again(job):
    assert job.outcome("", "DOWN", ASK_PAUSES="0") == (0, ["asked", "requeue 7"])


@pytest.mark.parametrize("name", ["USR1", "TERM"])
def test_a_signal_to_the_script_stops_the_ranks_waits_for_them_and_requeues(job, name):
    """As often as it happens: it says nothing against the run."""
    step = f"kill -{name} $PPID; sleep 0.3; {job.saved(3)}; exit 1"
    for _ in range(5):
        done = job.start(step)
        assert job.called() == ["scancel --signal=TERM 7", "requeue 7"] and done.returncode == 1
        assert "requeued: job 7 continues from iteration 3 of 40" in done.stdout


def test_ranks_that_do_not_stop_in_time_do_not_keep_the_job_from_the_queue(job):
    step = (
        f"kill -USR1 $PPID; for _ in $(seq 100); do grep -q requeue {job.calls} && exit; "
        "sleep 0.1; done"
    )
    done = job.start(step, SAVE_SECONDS="0")
    assert job.called()[:2] == ["scancel --signal=TERM 7", "requeue 7"]
    assert "the ranks did not stop within 0 s" in done.stdout


def checked(save, *flags, **variables):
    """`check_flags` prints where the run ends and saves, by the flags, the last of which win."""
    script = (
        "source examples/slurm/workload.sh; source examples/slurm/restarts.sh; "
        'check_flags "${FLAGS[@]}" --train-iters 40 "$@"; printf "%s\\0%s" "$GOAL" "$SAVE"'
    )
    return bash(
        script,
        *flags,
        VENV=sys.prefix,
        RANKS_PER_NODE="2",
        SLURM_JOB_NAME="gpt",
        CHECKPOINT_PATH=save,
        **variables,
    )


@pytest.mark.parametrize(
    "flags, status, told",
    [
        ("--train-iters 8", 0, "8\0a b"),
        ("--help lr", 0, "--lr"),
        ("--num-heads 3", 2, "--num-heads"),
        ("--train-iters 8 --lr -1", 2, "--lr must be at least"),
    ],
)
def test_wrong_flags_end_the_job_before_a_rank_starts(flags, status, told):
    done = checked("a b", *flags.split())
    assert done.returncode == status and told in done.stdout + done.stderr


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_any_save_path_is_read_as_it_was_given(tmp_path, locale):
    """A finished job must be seen as finished: its pointer lies below this path."""
    given = f'{tmp_path}Läufe/東京 "a"\\b\tc\nd $(e) ünï\udcff '
    done = checked(given, LC_ALL=locale)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\0") == ["40", given]
