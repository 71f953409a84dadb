"""tests/fresh_machine.py runs each command of README.md, in order, and fails with the first one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests import fresh_machine
from tests.docs.marks import COMMANDS, blocks

PAGE = """
```bash
echo first \\
  word
bash tests/run.sh
```

```text
echo no command
```

```python
print("from Python, in", __name__)
```

```bash
source .venv/bin/activate
{last}
```
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(PAGE.format(last="echo last $MADE"))
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text("MADE=here\n")
    return path


def ran(page: Path, capfd: pytest.CaptureFixture[str]) -> tuple[int, list[str], str]:
    text = fresh_machine.script(page, without_tests=True)
    status = fresh_machine.run(text, page.parent, os.environ)
    printed = capfd.readouterr()
    return status, printed.out.splitlines(), printed.err


def test_the_first_failure_ends_it_and_is_named(
    page: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page.write_text(PAGE.replace("print(", "raise SystemExit(3) #").format(last="echo last"))
    status, out, error = ran(page, capfd)
    assert status == 3 and "status 3" in error
    assert out[-1] == ">>> page.md:13" and "last" not in out


def test_it_runs_all_commands_of_the_readme() -> None:
    text = fresh_machine.script(fresh_machine.README)
    found = [block for block in blocks(fresh_machine.README) if block.language in COMMANDS]
    assert len(found) >= 3
    for block in found:
        for line in block.text.splitlines():
            assert line.removesuffix("\\").strip() in text, block.name
    assert fresh_machine.TESTS in text
    short = fresh_machine.script(fresh_machine.README, without_tests=True)
    left_out = set(text.splitlines()) - set(short.splitlines())
    assert len(left_out) == 2 and all(fresh_machine.TESTS in line for line in left_out)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
