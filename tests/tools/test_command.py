import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from io import BytesIO, TextIOWrapper

import pytest

from megatron_lite.config.checks import InputError
from megatron_lite.parallel.messages import silent_unless
from megatron_lite.tools import generate
from megatron_lite.tools.command import RANK_0_SPEAKS_FIRST_S, exit_status
from tests.support.commands import MOCK, ROOT, SMALL_RUN, ended, environment, python
from tests.support.limits import HANG_S


@pytest.fixture
def waits(monkeypatch):
    """The seconds that were waited, without waiting."""
    seconds = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    return seconds


def become_rank(monkeypatch, rank):
    for pair in f"RANK={rank} WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1".split():
        monkeypatch.setenv(*pair.split("="))


def closed_pipe():
    """A pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "wb", buffering=0)


def fail():
    raise InputError("the file is empty")


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_reports_a_fault_at_once_and_the_others_after_it(monkeypatch, waits, rank, capsys):
    become_rank(monkeypatch, rank)
    assert exit_status(fail) == 2
    assert capsys.readouterr().err == "[rank 1] " * rank + "error: the file is empty\n"
    assert waits == [RANK_0_SPEAKS_FIRST_S] * rank


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_reports_a_bad_command_line(monkeypatch, waits, rank):
    become_rank(monkeypatch, rank)
    found = ended(generate.main, "--load x --prompt 1 --top-p much")
    assert found.status == 2
    assert found.err.count("error: ") == (rank == 0)
    assert waits == [RANK_0_SPEAKS_FIRST_S] * rank


def test_a_tool_of_one_process_does_not_mind_a_broken_launch(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert exit_status(lambda: None) == 0
    assert exit_status(fail) == 2
    assert capsys.readouterr().err == "error: the file is empty\n"


@pytest.mark.parametrize(
    "command",
    [
        ["pretrain_gpt.py", *SMALL_RUN, *MOCK, "--explain-recompute"],
        ["-m", "megatron_lite.tools.translate_recompute", "tests/tools/configs/oslo_v3.json"],
    ],
)
def test_a_command_whose_output_nobody_reads_dies_of_sigpipe_in_silence(command):
    done = subprocess.run(
        [sys.executable, *command],
        env=environment(),
        cwd=ROOT,
        stdout=closed_pipe(),
        stderr=subprocess.PIPE,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


def test_a_character_that_an_output_lacks_is_a_question_mark():
    with redirect_stdout(TextIOWrapper(BytesIO(), "ascii")) as out:
        exit_status(lambda: print("\xe9\udcff"))
        with silent_unless(False):
            print("\udcff")
    assert out.buffer.getvalue() == b"??\n"


@pytest.mark.parametrize("module", ["", "pretrain_gpt.py", "megatron_lite.tools.convert"])
def test_ctrl_c_during_the_imports_is_one_line_and_the_status_of_the_signal(module, tmp_path):
    """The process tells each import on stderr, so that the signal comes after the first ones."""
    script = tmp_path / "megatron-lite"  # as pip writes it
    script.write_text("import sys\nfrom megatron_lite.__main__ import main\nsys.exit(main())\n")
    words = {"": [str(script)], "pretrain_gpt.py": [module]}.get(module, ["-m", module])
    told = "megatron_lite.cli" if module == "pretrain_gpt.py" else "megatron_lite"
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", *words, "convert", "--help"],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines = iter(process.stderr)
    while not next(lines).endswith(f" {told}\n"):
        pass
    process.send_signal(signal.SIGINT)
    rest = [line for line in lines if not line.startswith("import time:")]
    assert process.wait(HANG_S) == -signal.SIGINT
    assert rest == ["error: stopped by SIGINT\n"]


def test_a_library_s_user_keeps_ctrl_c():
    code = "import signal, megatron_lite; print(signal.getsignal(signal.SIGINT).__name__)"
    assert python(code).stdout == "default_int_handler\n"
