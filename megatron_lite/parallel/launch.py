"""Reads this process's place among the processes of the run.

The place comes from the environment variables of torchrun, of Slurm, or of a launcher in
`LAUNCHERS`. Without any of them, the run has one process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_lite.config.checks import InputError

# Slurm reserves step ids from here on. The shell that salloc opens on a node is step 4294967290 and
# not a task of the run.
FIRST_RESERVED_STEP = 0xFFFFFFF0


class _Variables(NamedTuple):
    """The names of a launcher's variables."""

    launcher: str
    ranks: str
    sizes: str
    local_ranks: str


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


@dataclass(frozen=True, kw_only=True)
class Launch:
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


def read_launch(
    environ: Mapping[str, str] | None = None, *, local_rank: int | None = None
) -> Launch:
    """Returns the launch that the environment describes.

    Raises InputError if the environment is incomplete or contradicts itself. Slurm's variables
    count only inside an `srun` step: those of a batch script describe the job, not one of its
    tasks. A launcher in a Slurm job may start its own processes by srun, so its variables count
    before Slurm's.

    local_rank: the value of --local_rank, which DeepSpeed's launcher and old launchers of torch
        pass to each process. It is used if the environment has no local rank; otherwise it must be
        equal to the environment's.
    """
    env = os.environ if environ is None else environ
    if local_rank is not None:
        return replace(read_launch(env), local_rank=_agreed_local_rank(env, local_rank))
    if ("RANK" in env) != ("WORLD_SIZE" in env):
        raise InputError(
            "of RANK and WORLD_SIZE only one is set: start with torchrun or srun, or unset it "
            "for one process"
        )
    if "RANK" in env:
        launch = _from_torchrun(env)
        _check_not_alone(env, launch)
    elif (own := _own_variables(env)) is not None:
        launch = _from_launcher(env, own)
    elif _in_step(env):
        launch = _from_slurm(env)
    else:
        return Launch(launcher="single")
    if not 0 <= launch.rank < launch.world_size:
        raise InputError(
            f"rank {launch.rank} is not in [0, {launch.world_size}), the world size that "
            f"{launch.launcher} gives"
        )
    if not 0 <= launch.master_port < 2**16:
        raise InputError(f"MASTER_PORT must be in [0, {2**16}) (got {launch.master_port})")
    return launch


def _in_step(env: Mapping[str, str]) -> bool:
    """Returns whether this process is a task of an `srun` step."""
    step = _integer(env, "SLURM_STEP_ID", FIRST_RESERVED_STEP)
    return "SLURM_PROCID" in env and step < FIRST_RESERVED_STEP


def _variables(env: Mapping[str, str]) -> _Variables | None:
    """Returns the first row of LAUNCHERS that has a rank or a size here.

    Of several names for one thing it has the one that is set.
    """
    for line in LAUNCHERS.strip().splitlines():
        launcher, *columns = map(str.strip, line.split("|"))
        names = [max(column.split(), key=lambda name: bool(env.get(name))) for column in columns]
        if env.get(names[0]) or env.get(names[1]):
            return _Variables(launcher, *names)
    return None


def _own_variables(env: Mapping[str, str]) -> _Variables | None:
    """Returns the variables of a launcher; None if srun set them too, as it does for PMI."""
    own = _variables(env)
    if own is not None and _in_step(env):
        theirs = {own.ranks: _integer(env, "SLURM_PROCID"), own.sizes: _step_size(env)}
        if all(not env.get(name) or _integer(env, name) == theirs[name] for name in theirs):
            return None
    return own


def _check_not_alone(env: Mapping[str, str], launch: Launch) -> None:
    """Raises InputError if WORLD_SIZE is less than the processes that a launcher started.

    Such a RANK is left from somewhere else, and each process would train by itself. torchrun's own
    processes are not checked: a launcher may start several runs of torchrun.
    """
    own, started = _own_variables(env), 1
    if own is not None:
        started = _integer(env, own.sizes, 1)
    elif _in_step(env):
        started = _step_size(env)
    if launch.world_size < started and "TORCHELASTIC_RUN_ID" not in env:
        raise InputError(
            f"WORLD_SIZE is {launch.world_size}, but {own.launcher if own else 'srun'} started "
            f"{started} processes: unset RANK and WORLD_SIZE, or set them for each process"
        )


def _agreed_local_rank(env: Mapping[str, str], local_rank: int) -> int:
    """Returns `local_rank`.

    Raises InputError if it is negative, or if a variable of the launcher has another value.
    """
    if local_rank < 0:
        raise InputError(
            f"--local-rank must be at least 0 (got {local_rank}): leave it out where no "
            "launcher passes it"
        )
    name = "LOCAL_RANK"
    if "RANK" not in env and (own := _own_variables(env)) is not None:
        name = own.local_ranks
    elif "RANK" not in env and _in_step(env):
        name = "SLURM_LOCALID"
    if env.get(name) and _integer(env, name) != local_rank:
        raise InputError(
            f"--local-rank {local_rank} contradicts {name} {_integer(env, name)} of the "
            "environment: leave the flag out, or unset the variable"
        )
    return local_rank


def _from_launcher(env: Mapping[str, str], own: _Variables) -> Launch:
    for name in (own.ranks, own.sizes):
        if not env.get(name):
            raise InputError(
                f"{own.launcher} started this process, but {name} is not set: set RANK, "
                "WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process, or start it with "
                "torchrun or srun"
            )
    rank = _integer(env, own.ranks)
    place = {
        "RANK": env[own.ranks],
        "WORLD_SIZE": env[own.sizes],
        "LOCAL_RANK": str(_integer(env, own.local_ranks, rank)),
    }
    return replace(_from_torchrun({**env, **place}), launcher=own.launcher)


def _from_torchrun(env: Mapping[str, str]) -> Launch:
    world_size = _integer(env, "WORLD_SIZE")
    return Launch(
        launcher="torchrun",
        rank=_integer(env, "RANK"),
        world_size=world_size,
        local_rank=_integer(env, "LOCAL_RANK", _integer(env, "RANK")),
        master_addr=_text(env, "MASTER_ADDR") if world_size > 1 else "127.0.0.1",
        master_port=_integer(env, "MASTER_PORT") if world_size > 1 else 0,
        restart_count=_integer(env, "TORCHELASTIC_RESTART_COUNT", 0),
        agent_owns_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _from_slurm(env: Mapping[str, str]) -> Launch:
    nodes = env.get("SLURM_STEP_NODELIST") or _text(env, "SLURM_JOB_NODELIST")
    return Launch(
        launcher="slurm",
        rank=_integer(env, "SLURM_PROCID"),
        world_size=_step_size(env),
        local_rank=_integer(env, "SLURM_LOCALID", 0),
        master_addr=env.get("MASTER_ADDR") or first_host(nodes),
        # One port per job and step: two jobs that share a node must not meet.
        master_port=_integer(
            env,
            "MASTER_PORT",
            20000
            + (_integer(env, "SLURM_JOB_ID", 0) * 7 + _integer(env, "SLURM_STEP_ID", 0)) % 12000,
        ),
        restart_count=_integer(env, "SLURM_RESTART_COUNT", 0),
    )


def _step_size(env: Mapping[str, str]) -> int:
    return _integer(env, "SLURM_STEP_NUM_TASKS", _integer(env, "SLURM_NTASKS", 1))


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


def _text(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        raise InputError(
            f"{name} is not set, but this process was started as one of several: start it with "
            "torchrun or srun, or give every process MASTER_ADDR and MASTER_PORT (mpirun -x, "
            "mpiexec -env)"
        )
    return env[name]


def _integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and not env.get(name):
        return default
    text = _text(env, name)
    if not re.fullmatch(r"-?\d{1,10}", text):
        raise InputError(f"{name} must be an integer (got {text!r})")
    return int(text)
