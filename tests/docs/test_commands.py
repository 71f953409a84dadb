"""The commands of the pages work, one after the other, and their flags exist."""

import re

import pytest

from arguments import build_parser, supported_flags
from tests.docs.marks import COMMANDS, PAGES, blocks
from tests.docs.outputs import folder, run

RUN = {page: [block for block in blocks(page) if block.kind == "run"] for page in PAGES}

LAUNCHER = r"pretrain_gpt\.py |megatron[-_]lite train "


def script(block, where, number):
    """The command that runs a block in a folder."""
    if block.language == "bash":
        # torchrun by itself needs a host name that resolves, which not every machine has
        return block.text.replace("torchrun --nproc", "torchrun --local-addr 127.0.0.1 --nproc")
    (where / f"program{number}.py").write_text(block.text, encoding="utf-8")
    return f"python program{number}.py"


# .ci/run itself runs the commands of README.md, the first page: here they come last, and weekly.
@pytest.mark.runs(daily=0)
@pytest.mark.parametrize("page", [page for page in reversed(PAGES) if RUN[page]])
def test_the_commands_of_a_page_work_one_after_the_other(page):
    with folder() as where:
        blocks = enumerate(RUN[page])
        printed = [run(script(block, where, number), where) for number, block in blocks]
    assert all(printed), "a command of the page does nothing that its reader sees"


def test_the_flags_of_the_launcher_exist_on_every_page():
    """Also in commands that no test runs. Flags of other programs stand before its name."""
    known = set(supported_flags(build_parser())) | {"--help"}
    found = 0
    for page in PAGES:
        for block in blocks(page):
            if block.language in COMMANDS:
                for line in re.sub(r"\\\n", " ", block.text).splitlines():
                    words = " ".join(re.split(LAUNCHER, line)[1:])
                    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", words))
                    found += len(named)
                    assert named <= known, (block.name, named - known)
    assert found > 50
