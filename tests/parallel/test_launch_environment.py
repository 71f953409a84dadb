"""read_launch on environments as torchrun and Slurm 22.05 really set them, and on broken ones."""

import os
from unittest.mock import patch

import pytest

from megatron_lite.config.checks import InputError
from megatron_lite.parallel.launch import Launch, first_host, read_launch


def launch_of(environ, **options):
    with patch.dict(os.environ, environ, clear=True):
        return read_launch(**options)


def environment(text):
    """Returns variables as a shell prints them."""
    return dict(one.split("=") for one in text.split())


TORCHRUN = environment("""
    RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=host0 MASTER_PORT=29501
    TORCHELASTIC_RESTART_COUNT=1 TORCHELASTIC_USE_AGENT_STORE=True
""")

# A job of 2 nodes x 2 tasks, seen from its batch script and from the last task of `srun --ntasks=3`
# in it.
SLURM_BATCH = environment("""
    SLURM_JOB_ID=1 SLURM_JOB_NODELIST=node[1-2] SLURM_LOCALID=0 SLURM_NODELIST=node[1-2]
    SLURM_NPROCS=4 SLURM_NTASKS=4 SLURM_NTASKS_PER_NODE=2 SLURM_PROCID=0 SLURM_TASKS_PER_NODE=2(x2)
""")
SRUN = SLURM_BATCH | environment("""
    SLURM_NPROCS=3 SLURM_NTASKS=3 SLURM_PROCID=2 SLURM_NODEID=1 SLURM_STEPID=0 SLURM_STEP_ID=0
    SLURM_STEP_NODELIST=node[1-2] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=3
    SLURM_STEP_TASKS_PER_NODE=2,1 SLURM_TASKS_PER_NODE=2,1
""")
SALLOC_SHELL = SLURM_BATCH | environment("""
    SLURM_NTASKS=1 SLURM_STEP_ID=4294967290 SLURM_STEPID=4294967290 SLURM_STEP_NODELIST=node1
    SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1
""")


TORCHRUNS = Launch(
    launcher="torchrun",
    rank=3,
    world_size=4,
    local_rank=1,
    master_addr="host0",
    master_port=29501,
    restart_count=1,
    agent_owns_store=True,
)
SRUNS = Launch(launcher="slurm", rank=2, world_size=3, master_addr="node1")
FOUR = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.parametrize(
    "environ, expected",
    [
        (TORCHRUN, TORCHRUNS),
        (
            {name: TORCHRUN[name] for name in FOUR},
            TORCHRUNS._replace(local_rank=3, restart_count=0, agent_owns_store=False),
        ),
        (SRUN, SRUNS),
        # The step's own size and nodes win over the job's.
        (
            {**SRUN, "SLURM_NTASKS": "8", "SLURM_STEP_NODELIST": "node[5,7]"},
            SRUNS._replace(master_addr="node5"),
        ),
        ({**SRUN, "MASTER_ADDR": "10.0.0.1"}, SRUNS._replace(master_addr="10.0.0.1")),
        ({**SRUN, "SLURM_RESTART_COUNT": "2"}, SRUNS._replace(restart_count=2)),
        ({**SRUN, **TORCHRUN}, TORCHRUNS),
        (dict(SRUN, PMI_RANK="2", PMI_SIZE="3", PMIX_RANK="2"), SRUNS),
        *(
            (environ, Launch(launcher="single"))
            for environ in ({}, {"HOME": "/root", "MASTER_PORT": "1"}, SLURM_BATCH, SALLOC_SHELL)
        ),
    ],
)
def test_the_environment_of_a_launcher_is_a_place_in_the_run(environ, expected):
    found = launch_of(environ)
    if expected.launcher == "slurm":  # its port follows from the job: see the next test
        expected = expected._replace(master_port=found.master_port)
    assert found == expected


def test_every_task_of_a_step_agrees_on_the_meeting_place_and_other_steps_meet_elsewhere():
    def place(**changes):
        launch = launch_of({**SRUN, **changes})
        return launch.master_addr, launch.master_port

    assert place(SLURM_PROCID="0") == place(SLURM_PROCID="1", SLURM_LOCALID="1")
    others = ({}, dict(SLURM_STEP_ID="1"), dict(SLURM_JOB_ID="2"))
    assert len({place(**changes) for changes in others}) == 3
    assert all(20000 <= place(SLURM_JOB_ID=str(job))[1] < 32000 for job in (0, 1, 999, 67_000_000))
    assert place(MASTER_PORT="1234") == ("node1", 1234)


@pytest.mark.parametrize(
    "environ, message",
    [
        ({**TORCHRUN, "MASTER_PORT": "65536"}, r"MASTER_PORT must be in \[0, 65536\)"),
        ({**TORCHRUN, "RANK": "4"}, r"rank 4 is not in \[0, 4\)"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR is not set.*torchrun or srun"),
        ({"LOCAL_RANK": "1"}, "RANK and WORLD_SIZE are not set"),
        ({"RANK": "1"}, "of RANK and WORLD_SIZE only one is set"),
        (
            {**SRUN, "SLURM_STEP_NODELIST": "[", "SLURM_JOB_NODELIST": "["},
            r"node list '\['.*set MASTER_ADDR",
        ),
        *(
            (half, "started this process, but .* is not set: set RANK")
            for half in map(environment, ["PMIX_RANK=1", "PALS_RANKID=1", "PMI_SIZE=2"])
        ),
    ],
)
def test_broken_variables_are_named(environ, message):
    with pytest.raises(InputError, match=message):
        launch_of(environ)


@pytest.mark.parametrize(
    "nodelist, host",
    [  # as `scontrol show hostnames` expands them
        ("n1,n2", "n1"),
        ("node[1-2]", "node1"),
        ("gpu[03-07,9],login", "gpu03"),
        ("a[1-2]b[3-4]", "a1b3"),
        ("ip-10-0-0-[12-13].ec2.internal", "ip-10-0-0-12.ec2.internal"),
        (" node[1-2]\n", "node1"),
    ],
)
def test_the_first_host_of_a_node_list(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize(
    "environ, local_rank, message",
    [
        (TORCHRUN, 0, "--local-rank 0 contradicts LOCAL_RANK 1 of the environment: leave the"),
        (SRUN, 1, "--local-rank 1 contradicts SLURM_LOCALID 0"),
        ({**SRUN, **TORCHRUN}, 0, "--local-rank 0 contradicts LOCAL_RANK 1"),
    ],
)
def test_a_local_rank_that_contradicts_the_environment_is_an_error(environ, local_rank, message):
    with pytest.raises(InputError, match=message):
        launch_of(environ, local_rank=local_rank)


MEETING = dict(MASTER_ADDR="host0", MASTER_PORT="29501")
# The third process of four, which is the first one of the second host.
MPI = {
    "Open MPI": dict(
        OMPI_COMM_WORLD_RANK="2",
        OMPI_COMM_WORLD_SIZE="4",
        OMPI_COMM_WORLD_LOCAL_RANK="0",
        PMIX_RANK="2",
    ),
    "MVAPICH": dict(
        MV2_COMM_WORLD_RANK="2", MV2_COMM_WORLD_SIZE="4", MV2_COMM_WORLD_LOCAL_RANK="0"
    ),
    "PMI": dict(PMI_RANK="2", PMI_SIZE="4", MPI_LOCALRANKID="0"),
    "Flux": dict(FLUX_TASK_RANK="2", FLUX_JOB_SIZE="4", FLUX_TASK_LOCAL_ID="0"),
    "JSM": dict(
        JSM_NAMESPACE_RANK="2", JSM_NAMESPACE_SIZE="4", JSM_NAMESPACE_LOCAL_RANK="0", PMIX_RANK="2"
    ),
}
PALS = dict(PALS_RANKID="2", PALS_LOCAL_RANKID="0", PMI_SIZE="4")


@pytest.mark.parametrize("launcher, environ", [*MPI.items(), ("PMI", PALS)])
def test_a_process_of_another_launcher_knows_its_place(launcher, environ):
    expected = Launch(
        launcher=launcher,
        rank=2,
        world_size=4,
        local_rank=0,
        master_addr="host0",
        master_port=29501,
    )
    assert launch_of({**environ, **MEETING}) == expected
    # A launcher in a Slurm job starts a daemon on each node by srun.
    daemon = dict(SRUN, SLURM_PROCID="1", SLURM_STEP_NUM_TASKS="2")
    assert launch_of({**daemon, **environ, **MEETING}) == expected
    with pytest.raises(InputError, match=r"--local-rank 1 contradicts \w+ 0 of the environment"):
        launch_of({**environ, **MEETING}, local_rank=1)
    with pytest.raises(InputError, match="MASTER_ADDR is not set.*mpirun -x"):
        launch_of(environ)


@pytest.mark.parametrize("launched", [*MPI.values(), SRUN])
def test_a_rank_left_over_in_the_environment_does_not_make_each_process_a_run(launched):
    stale = dict(RANK="0", WORLD_SIZE="1")
    with pytest.raises(InputError, match=r"WORLD_SIZE is 1, but .* started [34] processes"):
        launch_of({**launched, **stale})
    # Several runs of torchrun, each with its own ranks, are the user's choice.
    assert launch_of({**launched, **stale, "TORCHELASTIC_RUN_ID": "7"}).world_size == 1
