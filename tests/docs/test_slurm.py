"""docs/slurm.md explains every option of the job scripts in examples/slurm/, and nothing that is
not in them."""

import re

from tests.support.commands import ROOT

FOLDER = ROOT / "examples" / "slurm"
JOB_SCRIPTS = sorted(FOLDER.glob("*.sbatch"))


def test_the_ranks_have_less_time_to_save_than_slurm_gives_them():
    seconds = [
        int(found)
        for script in JOB_SCRIPTS
        for found in re.findall(r"--signal=B:USR1@(\d+)", script.read_text())
    ]
    default = re.search(r"SAVE_SECONDS:-(\d+)", (FOLDER / "restarts.sh").read_text())
    assert default and len(seconds) == len(JOB_SCRIPTS) and min(seconds) > int(default[1])
