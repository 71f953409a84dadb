"""docs/slurm.md explains every option of the job scripts in examples/slurm/, and nothing that is
not in them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.commands import ROOT
from tests.support.pairs import in_one_test

FOLDER = ROOT / "examples" / "slurm"
JOB_SCRIPTS = sorted(FOLDER.glob("*.sbatch"))
PAGE = (ROOT / "docs" / "slurm.md").read_text()


def section(title: str) -> str:
    return re.split(r"^#+ ", PAGE.split(f"# {title}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]


def explained(title: str) -> list[str]:
    """Code in the first cells of a section's tables."""
    return [
        code
        for line in section(title).splitlines()
        if line.startswith("|")
        for code in re.findall(r"`([^`]+)`", line.split("|")[1])
    ]


def asked_for(script: Path) -> list[str]:
    return re.findall(r"^#SBATCH (\S+)$", script.read_text(), flags=re.MULTILINE)


def code_of(*scripts: Path) -> str:
    """Their text without comments."""
    return "\n".join(
        re.sub(r"(^|\s)#.*", "", line)
        for script in scripts
        for line in script.read_text().splitlines()
    )


@in_one_test("script", JOB_SCRIPTS)
def test_every_line_for_sbatch_is_explained_with_its_value(script: Path) -> None:
    lines = asked_for(script)
    assert len(lines) == script.read_text().count("#SBATCH") > 10
    assert set(lines) <= set(explained("What sbatch is asked for"))


def test_what_is_explained_stands_in_the_scripts() -> None:
    code = code_of(*JOB_SCRIPTS, *FOLDER.glob("*.sh"))
    for title in ("What the scripts say", "The flags that make it continue"):
        assert [text for text in explained(title) if text not in code] == []


def test_the_ranks_have_less_time_to_save_than_slurm_gives_them() -> None:
    seconds = [
        int(found)
        for script in JOB_SCRIPTS
        for found in re.findall(r"--signal=B:USR1@(\d+)", script.read_text())
    ]
    default = re.search(r"SAVE_SECONDS:-(\d+)", (FOLDER / "restarts.sh").read_text())
    assert default and len(seconds) == len(JOB_SCRIPTS) and min(seconds) > int(default[1])
