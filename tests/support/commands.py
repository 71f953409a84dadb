"""Starts the program as a user does."""

import io
import os
import shlex
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

from arguments import parse_args
from tests.support.limits import HANG_S

ROOT = Path(__file__).resolve().parents[2]

SMALL_MODEL = shlex.split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16"
)
SMALL_RUN = SMALL_MODEL + shlex.split(
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 12 --lr 1e-2 --eval-iters 1 "
    "--log-interval 4 --distributed-backend gloo"
)
MOCK = ["--mock-data", "--vocab-size", "98"]


def words_of(words):
    """Returns the words of a command line, or of a text of them as a shell splits it."""
    return shlex.split(words) if isinstance(words, str) else list(words)


def parsed_line(words):
    """Returns what pretrain_gpt.py reads in the words, or in a text of them."""
    return parse_args(words_of(words))


def status_of(main, arguments):
    """Returns the exit status of a main function, called in this process."""
    try:
        return main(arguments)
    except SystemExit as stopped:
        return stopped.code


class Ended(NamedTuple):
    """The exit status of a command, and what it printed."""

    status: int
    out: str
    err: str


def ended(main, words):
    """Runs the main function of a command in this process.

    words: its arguments, or a text of them as a shell splits it.
    """
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        status = status_of(main, words_of(words))
    code = status if isinstance(status, int) else int(isinstance(status, str))
    return Ended(code, out.getvalue(), err.getvalue())


def fault_of(main, words):
    """Returns the one line of a command that must print nothing else and end with status 2."""
    found = ended(main, words)
    assert (found.status, found.out) == (2, ""), found
    assert found.err.count("\n") == 1 and found.err.endswith("\n"), found.err
    assert ": error: " in found.err and len(found.err) < 1000, found.err
    return found.err


def environment(**variables):
    """Returns this environment with one thread per process and without a launcher's variables.

    variables: variables to add.
    """
    launchers = ("SLURM_", "TORCHELASTIC", "MASTER_", "LOCAL_", "RANK", "WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    return {**kept, "OMP_NUM_THREADS": "1", **variables}


def command(*arguments, ranks=1):
    """Returns the command `python pretrain_gpt.py ...`, under torchrun for more than one rank."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    words = [str(ROOT / "pretrain_gpt.py"), *arguments]
    return [sys.executable, *(launcher if ranks > 1 else ()), *words]


def run_command(*arguments, ranks=1, timeout=HANG_S):
    """Runs the program to its end. Returns its status and output."""
    return started(*command(*arguments, ranks=ranks), timeout=timeout)


def python(program, *arguments):
    """Runs a program of Python that must not fail. Returns its output."""
    return run(sys.executable, "-c", program, *arguments)


def run(*words, cwd=ROOT):
    """Runs a command that must not fail. Returns its output."""
    done = started(*words, cwd=cwd)
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done


def started(*words, cwd=ROOT, timeout=HANG_S):
    """Runs a command to its end. Returns its status and output.

    In another folder than the checkout, the checkout's modules are not on the path.
    """
    variables = environment()
    if cwd != ROOT:
        variables.pop("PYTHONPATH", None)
    return subprocess.run(
        words, cwd=cwd, env=variables, capture_output=True, text=True, timeout=timeout, check=False
    )
