"""How many command lines of public launch scripts start here unchanged."""

import json
from functools import cache
from pathlib import Path

import pytest

from arguments import parse_args
from tests.docs.marks import text_of
from tests.support.commands import ended

FOLDER = Path(__file__).parent
# Of each file, the command lines that must at least reach a RunConfig.
LEAST = {
    "scripts": 69,
    "scripts_held_back": 23,
    "nvidia_gpt_tests": 145,
    "forks": 66,
    "nvidia_moe_tests": 41,
}


def command_lines(name):
    rows = json.loads((FOLDER / f"{name}.json").read_text())
    return [(row["source"], row["arguments"]) for row in rows]


@cache
def failures(name):
    """The command lines of a file that do not start, with the faults as they are printed."""
    found = []
    for source, arguments in command_lines(name):
        status, _, faults = ended(parse_args, arguments)
        assert status in (0, 2)
        if status:
            found.append((source, faults))
    return found


@pytest.mark.runs(daily=2, ci=4)
@pytest.mark.parametrize("name", LEAST)
def test_most_command_lines_of_public_scripts_start(name):
    failed, count = failures(name), len(command_lines(name))
    report = "" if "held_back" in name else "\n".join(map(str, failed))
    assert count - len(failed) >= LEAST[name], report


@pytest.mark.runs(daily=2, ci=4)
@pytest.mark.parametrize("name", LEAST)
def test_a_command_line_that_does_not_start_says_why(name):
    for source, faults in failures(name):
        assert faults.startswith("pretrain_gpt.py: error: "), source
        assert "unknown flag" not in faults, source


@pytest.mark.long
def test_the_page_has_these_numbers():
    started = {name: len(command_lines(name)) - len(failures(name)) for name in LEAST}
    public = ("scripts", "scripts_held_back")
    lines = sum(len(command_lines(name)) for name in public)
    text = (
        f"Of {lines} command lines of dense models, with Megatron's own flags, from public launch "
        f"scripts {sum(started[name] for name in public)} start, and of "
        f"{len(command_lines('nvidia_gpt_tests'))} functional tests of NVIDIA's "
        f"{started['nvidia_gpt_tests']} (`tests/command_lines/`). Of {len(command_lines('forks'))} "
        f"lines of forks {started['forks']} start, and of {len(command_lines('nvidia_moe_tests'))} "
        f"tests of NVIDIA's with experts {started['nvidia_moe_tests']}"
    )
    assert text in text_of("coming-from").replace("\n", " ")
