"""Who am I among the processes of this run: read from torchrun's variables, from Slurm's, or from neither."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_lite.config.checks import InputError

# Step ids from here on are Slurm's own: the shell that salloc opens on a node is step 4294967290, and not a task of the run.
FIRST_RESERVED_STEP = 0xFFFFFFF0


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One process's place in the run. `launcher` is "torchrun", "slurm" or "single"."""

    launcher: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    restart_count: int = 0
    agent_owns_store: bool = False


def read_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """The launch that the environment describes. InputError where it is incomplete or contradicts itself.

    Slurm counts only inside an `srun` step: a batch script's own variables describe the job, not a task of it.
    """
    env = os.environ if environ is None else environ
    if ("RANK" in env) != ("WORLD_SIZE" in env):
        raise InputError("of RANK and WORLD_SIZE only one is set: start with torchrun or srun, or unset it for one process")
    if "RANK" in env:
        launch = _from_torchrun(env)
    elif "SLURM_PROCID" in env and _integer(env, "SLURM_STEP_ID", FIRST_RESERVED_STEP) < FIRST_RESERVED_STEP:
        launch = _from_slurm(env)
    else:
        return Launch(launcher="single")
    if not 0 <= launch.rank < launch.world_size:
        raise InputError(f"rank {launch.rank} is not in [0, {launch.world_size}), the world size that {launch.launcher} gives")
    if not 0 <= launch.master_port < 2**16:
        raise InputError(f"MASTER_PORT must be in [0, {2**16}) (got {launch.master_port})")
    return launch


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
    world_size = _integer(env, "SLURM_STEP_NUM_TASKS", _integer(env, "SLURM_NTASKS", 1))
    return Launch(
        launcher="slurm",
        rank=_integer(env, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_integer(env, "SLURM_LOCALID", 0),
        master_addr=env.get("MASTER_ADDR") or first_host(nodes),
        # One port per job and step: two jobs that share a node must not meet.
        master_port=_integer(env, "MASTER_PORT", 20000 + (_integer(env, "SLURM_JOB_ID", 0) * 7
                                                          + _integer(env, "SLURM_STEP_ID", 0)) % 12000),
        restart_count=_integer(env, "SLURM_RESTART_COUNT", 0),
    )


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: `gpu[03-07,9],login` -> `gpu03`. InputError where it cannot be read."""
    match = re.match(r"((?:[^\[\],\s]|\[\d[^\[\]]*\])+)(?:,|$)", nodelist.strip())
    if match is None:
        raise InputError(f"cannot read the first host of the Slurm node list {nodelist!r}: set MASTER_ADDR")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[1])


def _text(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        raise InputError(f"{name} is not set, but this process was started as one of several: start it with torchrun or srun")
    return env[name]


def _integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and not env.get(name):
        return default
    text = _text(env, name)
    if not re.fullmatch(r"-?\d{1,10}", text):
        raise InputError(f"{name} must be an integer (got {text!r})")
    return int(text)
