"""Every --help is at most 100 columns wide, and fits a terminal of 80 columns."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

from megatron_lite import __main__ as command
from megatron_lite.cli.help import LISTS, TOPICS
from megatron_lite.config.parser import for_stream
from tests.support.limits import HANG_S

ROOT = Path(__file__).resolve().parent.parent
FURTHER = ("calibrate", "corpus", "train_tokenizer", "translate_recompute", "unigram_entropy")
COLUMNS = (80, 200)
SCRIPTS = [
    path
    for path in sorted((ROOT / "examples").rglob("*.sh"))
    if path.name not in ("environment.sh", "launch.sh", "restarts.sh", "workload.sh")
]


def help_of(main: Callable[[Sequence[str]], int], words: Sequence[str]) -> list[str]:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main(words)
    assert text.getvalue()
    return text.getvalue().splitlines()


def too_wide(lines: Sequence[str], columns: int) -> list[str]:
    """The lines that do not fit. A single long word, such as a flag, has a line of its own."""
    limit = min(columns, 100)
    return [line for line in lines if len(line) > limit and len(line.split()) > 1]


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize(
    "words", [[], *([name] for name in command.SUBCOMMANDS)], ids=lambda words: " ".join(words)
)
def test_the_help_of_a_subcommand_fits(
    words: list[str], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", f"{columns}")
    lines = help_of(partial(command.main, started="megatron-lite"), [*words, "--help"])
    # The texts that are written by hand have 80 columns in every terminal.
    assert too_wide(lines, max(columns, 80)) == []


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("name", FURTHER)
def test_the_help_of_a_tool_fits(name: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", f"{columns}")
    main = import_module(f"megatron_lite.tools.{name}").main
    assert too_wide(help_of(main, ["--help"]), columns) == []


def test_no_tool_is_left_out() -> None:
    runnable = {
        path.stem
        for path in (ROOT / "megatron_lite" / "tools").glob("*.py")
        if '__name__ == "__main__"' in path.read_text()
    }
    subcommands = {one.module.rpartition(".")[2] for one in command.SUBCOMMANDS.values()}
    assert runnable - subcommands == set(FURTHER)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize(
    "topic", [*TOPICS, *LISTS, "--tokenizer-type", "bf16", "--moe-router-topk"]
)
def test_the_help_of_a_topic_fits(
    topic: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", f"{columns}")
    lines = help_of(command.main, ["train", "--help", topic])
    assert too_wide(lines, columns) == []


def test_long_choices_stand_behind_the_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = " ".join(" ".join(help_of(command.main, ["train", "--help", "recompute"])).split())
    assert "--recompute-modules NAME [NAME ...]" in text
    assert "one of core_attn, layernorm, mlp, activation, dropout, pointwise" in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_message_is_broken_between_words_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = "tool: error: 2 faults:\n  - " + "one-word two " * 5 + "\n" + " " * 50 + "^\n"
    assert for_stream(text, None) == for_stream(text, io.StringIO()) == text
    lines = for_stream(text, Terminal()).split("\n")
    assert lines[0] == "tool: error: 2 faults:" and lines[1].startswith("  - one-word two one-word")
    assert lines[2].startswith("    ") and max(map(len, lines[:-2])) <= 40
    assert lines[-2:] == [" " * 50 + "^", ""]


@pytest.mark.slow
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_help_of_an_example_has_at_most_80_columns(path: Path) -> None:
    done = subprocess.run(
        ["bash", str(path.relative_to(ROOT)), "--help"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "OUTPUT": "runs/quickstart", "VENV": ".venv"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    assert too_wide(done.stdout.splitlines(), 80) == []
