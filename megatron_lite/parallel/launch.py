"""Reads this process's place among the processes of the run.

The place comes from the environment variables of torchrun, of Slurm, or of a launcher in
`LAUNCHERS`. Without any of them, the run has one process.
"""

import re
from os import environ
from typing import NamedTuple

from megatron_lite.config.checks import InputError

# Slurm reserves step ids from here on. The shell that salloc opens on a node is step 4294967290 and
# not a task of the run.
FIRST_RESERVED_STEP = 0xFFFFFFF0
# The second since torch 2.9, the third on ROCm.
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


class _Variables(NamedTuple):
    """The names of a launcher's variables. Of several names for one thing the first that is set."""

    launcher: str
    rank: str
    size: str
    local_rank: str


TORCHRUN = _Variables("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK")
SLURM = _Variables("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS SLURM_NTASKS", "SLURM_LOCALID")
# The first row with a variable in the environment counts, since launchers set those of PMI and PMIx
# beside their own. ALPS and PMIx give no size, so a process that has only their rank is refused.
LAUNCHERS = """
Open MPI | OMPI_COMM_WORLD_RANK | OMPI_COMM_WORLD_SIZE | OMPI_COMM_WORLD_LOCAL_RANK
MVAPICH | MV2_COMM_WORLD_RANK | MV2_COMM_WORLD_SIZE | MV2_COMM_WORLD_LOCAL_RANK
MVAPICH | MVP_COMM_WORLD_RANK | MVP_COMM_WORLD_SIZE | MVP_COMM_WORLD_LOCAL_RANK
JSM | JSM_NAMESPACE_RANK | JSM_NAMESPACE_SIZE | JSM_NAMESPACE_LOCAL_RANK
Horovod | HOROVOD_RANK | HOROVOD_SIZE | HOROVOD_LOCAL_RANK
Flux | FLUX_TASK_RANK | FLUX_JOB_SIZE | FLUX_TASK_LOCAL_ID
PMI | PMI_RANK PALS_RANKID PMI_ID | PMI_SIZE | MPI_LOCALRANKID PALS_LOCAL_RANKID PMI_LOCAL_RANK
Platform MPI | MPI_RANKID | MPI_NRANKS | MPI_LOCALRANKID
PMIx | PMIX_RANK | PMIX_SIZE | PMIX_LOCAL_RANK
ALPS | ALPS_APP_PE | ALPS_APP_SIZE | ALPS_LOCAL_RANK
"""


class Launch(NamedTuple):
    """One process's place in the run.

    launcher: "torchrun", "slurm", "single", or the name of a row of LAUNCHERS. "PMI" is MPICH,
        Intel MPI or PALS.
    master_addr, master_port: the host and the port of the store where the ranks meet.
    restart_count: how often the launcher has restarted the run.
    agent_owns_store: whether torchrun's agent runs the store, not rank 0.
    """

    launcher: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    restart_count: int = 0
    agent_owns_store: bool = False


def read_launch(*, local_rank: int | None = None) -> Launch:
    """Returns the launch that the environment describes.

    Raises InputError if the environment is incomplete or contradicts itself. Slurm's variables
    count only inside an `srun` step: those of a batch script describe the job, not one of its
    tasks. A launcher in a Slurm job may start its own processes by srun, so its variables count
    before Slurm's.

    local_rank: the value of --local_rank, which DeepSpeed's launcher and old launchers of torch
        pass to each process. It is used if the environment has no local rank; otherwise it must be
        equal to the environment's.
    """
    if ("RANK" in environ) != ("WORLD_SIZE" in environ):
        raise InputError(
            "of RANK and WORLD_SIZE only one is set: start with torchrun or srun, or unset it "
            "for one process"
        )
    names = _with_set_names(TORCHRUN) if "RANK" in environ else _variables()
    if names is None and (own := _integer(TORCHRUN.local_rank, 0)) > 0:
        raise InputError(
            f"LOCAL_RANK is {own}, so several processes were started, but RANK and WORLD_SIZE are "
            "not set: start with torchrun or srun, or unset it for one process"
        )
    launch = Launch(launcher="single") if names is None else _launch(names)
    if local_rank is None:
        return launch
    if local_rank < 0:
        raise InputError(
            f"--local-rank must be at least 0 (got {local_rank}): leave it out where no "
            "launcher passes it"
        )
    name = (names or TORCHRUN).local_rank
    if _integer(name, local_rank) != local_rank:
        raise InputError(
            f"--local-rank {local_rank} contradicts {name} {environ[name]} of the "
            "environment: leave the flag out, or unset the variable"
        )
    return launch._replace(local_rank=local_rank)


def _variables() -> _Variables | None:
    """Returns the variables of the launcher other than torchrun that started this process.

    srun sets the variables of PMI too. They count only if they differ from Slurm's own.
    """
    rows = (_Variables(*map(str.strip, row.split("|"))) for row in LAUNCHERS.strip().splitlines())
    known = (_with_set_names(row) for row in rows)
    own = next((row for row in known if environ.get(row.rank) or environ.get(row.size)), None)
    if "SLURM_PROCID" not in environ or _integer("SLURM_STEP_ID", FIRST_RESERVED_STEP) >= (
        FIRST_RESERVED_STEP
    ):
        return own
    step = _with_set_names(SLURM)
    if own is not None and any(
        environ.get(mine) and _integer(mine) != _integer(theirs)
        for mine, theirs in ((own.rank, step.rank), (own.size, step.size))
    ):
        return own
    return step


def _with_set_names(row: _Variables) -> _Variables:
    launcher, *columns = row
    names = [max(column.split(), key=lambda name: bool(environ.get(name))) for column in columns]
    return _Variables(launcher, *names)


def _launch(names: _Variables) -> Launch:
    for name in (names.rank, names.size):
        if not environ.get(name):
            raise InputError(
                f"{names.launcher} started this process, but {name} is not set: set RANK, "
                "WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process, or start it with "
                "torchrun or srun"
            )
    rank, world_size = _integer(names.rank), _integer(names.size)
    if not 0 <= rank < world_size:
        raise InputError(
            f"rank {rank} is not in [0, {world_size}), the world size that {names.launcher} gives"
        )
    # A RANK that is left from somewhere else must not make each process a run of its own. The
    # processes of torchrun are not checked: a launcher may start several runs of it.
    if names == TORCHRUN and "TORCHELASTIC_RUN_ID" not in environ:
        other = _variables()
        if other is not None and world_size < (started := _integer(other.size, 1)):
            raise InputError(
                f"WORLD_SIZE is {world_size}, but {other.launcher} started {started} processes: "
                "unset RANK and WORLD_SIZE, or set them for each process"
            )
    is_slurm, address, port = names.launcher == "slurm", "127.0.0.1", 0
    if is_slurm:
        nodes = environ.get("SLURM_STEP_NODELIST") or _text("SLURM_JOB_NODELIST")
        job, step = (_integer(f"SLURM_{what}_ID", 0) for what in ("JOB", "STEP"))
        address = environ.get("MASTER_ADDR") or first_host(nodes)
        # One port per job and step: two jobs that share a node must not meet.
        port = _integer("MASTER_PORT", 20000 + (job * 7 + step) % 12000)
    elif world_size > 1:
        address, port = _text("MASTER_ADDR"), _integer("MASTER_PORT")
    if not 0 <= port < 2**16:
        raise InputError(f"MASTER_PORT must be in [0, {2**16}) (got {port})")
    by_agent = not is_slurm and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts = "SLURM_RESTART_COUNT" if is_slurm else "TORCHELASTIC_RESTART_COUNT"
    return Launch(
        launcher=names.launcher,
        rank=rank,
        world_size=world_size,
        local_rank=_integer(names.local_rank, 0 if is_slurm else rank),
        master_addr=address,
        master_port=port,
        restart_count=_integer(restarts, 0),
        agent_owns_store=by_agent,
    )


def first_host(nodelist: str) -> str:
    """Returns the first host of a Slurm node list: `gpu[03-07,9],login` -> `gpu03`.

    Raises InputError if the list cannot be read.
    """
    match = re.match(r"((?:[^\[\],\s]|\[\d[^\[\]]*\])+)(?:,|$)", nodelist.strip())
    if match is None:
        raise InputError(
            f"cannot read the first host of the Slurm node list {nodelist!r}: set MASTER_ADDR"
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[1])


def _text(name: str) -> str:
    if not environ.get(name):
        raise InputError(
            f"{name} is not set, but this process was started as one of several: start it with "
            "torchrun or srun, or give every process MASTER_ADDR and MASTER_PORT (mpirun -x, "
            "mpiexec -env)"
        )
    return environ[name]


def _integer(name: str, default: int | None = None) -> int:
    if default is not None and not environ.get(name):
        return default
    text = _text(name)
    if not re.fullmatch(r"-?\d{1,10}", text):
        raise InputError(f"{name} must be an integer (got {text!r})")
    return int(text)


def use_expandable_segments() -> None:
    """Makes CUDA's allocator grow its pieces of memory in place, so that no gaps lie between them.

    The user's own setting goes first. To be called before torch is imported.
    """
    if not allocator_settings():
        environ[ALLOCATOR[0]] = "expandable_segments:True"


def allocator_settings() -> list[str]:
    """Returns the settings of torch's allocator in the environment."""
    return [f"{name}={environ[name]}" for name in ALLOCATOR if name in environ]
