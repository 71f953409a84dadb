"""Runs the commands of README.md as a new user types them, from the top to the bottom:
`python -m tests.fresh_machine`

It clones the repository into an empty folder, which has no `.venv`, and runs every block of
commands and of Python there, in one shell. The first command that fails ends it with its status.

    --here            uses this checkout, and its `.venv` or $VENV, instead of a clone
    --without-tests   leaves out the command that runs the tests

Variables of examples/quickstart.sh, such as STEPS and OUTPUT, reach it. `.ci/run` calls this. It
needs bash, git and a package index, and nothing else than Python's standard library.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.docs.marks import COMMANDS, ROOT, blocks

README = ROOT / "README.md"
TESTS = "bash tests/run.sh"
# What belongs to the environment that runs this module, and not to a new user's shell.
OF_THIS_PROCESS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "VENV")


def main(argv=None):
    """Runs the blocks and returns the exit status of the first command that fails, or 0."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fresh_machine",
        description="Runs the commands of README.md, in order, in a new clone of the repository.",
    )
    parser.add_argument("--here", action="store_true", help="use this checkout, without a clone")
    parser.add_argument("--without-tests", action="store_true", help=f"leave out {TESTS}")
    args = parser.parse_args(argv)
    if args.here:
        venv = os.environ.get("VENV", ".venv")
        return run(script(README, without_tests=args.without_tests, venv=venv), ROOT, os.environ)
    with tempfile.TemporaryDirectory() as name:
        clone = Path(name, "megatron_lite")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        text = script(clone / "README.md", without_tests=args.without_tests)
        return run(text, clone, new_shell(os.environ))


def script(page, *, without_tests=False, venv=".venv"):
    """Returns the blocks of a page as one program of bash, which stops at the first failure.

    venv: the environment that commands activate instead of `.venv`.
    """
    parts = ["set -eo pipefail"]
    for block in blocks(page):
        if block.language in COMMANDS:
            parts += _commands(block, without_tests=without_tests)
    parts.append(f"echo '>>> every command of {page.name} has run'")
    return "\n".join(parts).replace("source .venv/", f"source {shlex.quote(venv)}/") + "\n"


def _commands(block, *, without_tests):
    where = f"{block.page.name}:{block.start + 1}"
    if block.language == "python":
        return [f"echo {shlex.quote(f'>>> {where}')}", "python - <<'END'", block.text, "END"]
    lines = [line for line in block.lines if not (without_tests and line.startswith(TESTS))]
    # An echo inside of a command that spans several lines would be a part of it.
    whole = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [
        part for line in whole for part in (f"echo {shlex.quote(f'>>> {where}: {line}')}", line)
    ]


def new_shell(variables):
    """Returns these variables without those of a Python environment that is active."""
    own = {Path(sys.prefix, "bin"), Path(variables.get("VIRTUAL_ENV", sys.prefix), "bin")}
    path = os.pathsep.join(
        folder
        for folder in variables.get("PATH", "").split(os.pathsep)
        if sys.prefix == sys.base_prefix or Path(folder) not in own
    )
    kept = {name: value for name, value in variables.items() if name not in OF_THIS_PROCESS}
    return {**kept, "PATH": path}


def run(text, where, variables):
    """Runs a program of bash in a folder. Returns its exit status, and names a failure."""
    with tempfile.NamedTemporaryFile("w", suffix=".sh", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        done = subprocess.run(
            ["bash", file.name], cwd=where, env=dict(variables), stdin=subprocess.DEVNULL
        )
    if done.returncode:
        print(
            f"tests.fresh_machine: error: the last command above (>>>) ended with status "
            f"{done.returncode}",
            file=sys.stderr,
        )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
