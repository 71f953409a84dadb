"""translate_recompute: what it prints, that the flags are ours, and one line for each fault."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lite.tools import translate_recompute

DEEPSPEED = {"train_batch_size": 8, "activation_checkpointing": {"partition_activations": True, "number_checkpoints": 4}}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DEEPSPEED))
    return path


def fault(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr of a run that must end with status 2 and print no flags."""
    assert translate_recompute.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("error: ") and shown.err.count("\n") == 1 and len(shown.err) < 800
    return shown.err


def test_flags_go_to_stdout_and_notes_to_stderr(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert translate_recompute.main(["--from", "deepspeed", "--json", str(config), "--tp", "2"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "--recompute-policy '*:full@split'\n"
    assert shown.err == "note: deepspeed: number_checkpoints has no counterpart: the buffer is sized by the plan\n"


@pytest.mark.parametrize(("system", "text", "words"), [
    ("torchtune", '{"ac_mode": "selective", "ac_option": 2}', ["--recompute-policy", "every-2+1:full"]),
    ("torchtitan", '{"activation_checkpoint": {"selective_ac_option": "op"}}',
     ["--recompute-policy", "*:ops(matmul/2,attention,collective,max)"]),
    ("modalities", '{"ac_variant": "full_activation_checkpointing"}', ["--recompute-policy", "*:full"]),
    ("oslo", '{"activation_checkpointing": {"enable": true}}', ["--recompute-policy", "*:full"]),
])
def test_a_shell_splits_the_line_into_the_flags(config: Path, capsys: pytest.CaptureFixture[str], system: str, text: str,
                                                words: list[str]) -> None:
    config.write_text(text)
    assert translate_recompute.main(["--from", system, "--json", str(config)]) == 0
    assert shlex.split(capsys.readouterr().out) == words


@pytest.mark.parametrize(("text", "message"), [
    (b"", "not JSON"), (b"{", "not JSON"), (b"\xff\xfe\x00", "not JSON"), (b"[" * 100_000, "not JSON"),
    (b"1" * 5000, "not JSON"), (b"[]", "expected an object"), (b"{}", "no section activation_checkpointing"),
    (b'{"activation_checkpointing": {"a": 1, "a": 2}}', "the key 'a' stands twice"),
    (b'{"activation_checkpointing": {"profil": true}}', "unknown key 'profil'"),
    (b'{"activation_checkpointing": {"profile": "' + b"y" * 9000 + b'"}}', "profile must be bool"),
    (b'{"activation_checkpointing": {"' + b"y" * 9000 + b'": "a\\nb"}}', "unknown key"),
    (b'{"activation_checkpointing": {"partition_activations": true}}', "needs a tensor-parallel size > 1 (got 1)"),
])
def test_a_file_that_will_not_do_is_one_line(config: Path, capsys: pytest.CaptureFixture[str], text: bytes, message: str) -> None:
    config.write_bytes(text)
    error = fault(["--from", "deepspeed", "--json", str(config)], capsys)
    assert message in error and "config.json" in error


def test_a_huge_file_is_one_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(config, "wb") as file:
        file.truncate(2**33)
    assert "larger than 1 MiB" in fault(["--from", "oslo", "--json", str(config)], capsys)


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert str(tmp_path / name) in fault(["--from", "oslo", "--json", str(tmp_path / name)], capsys)


@pytest.mark.parametrize("size", ["0", "-2"])
def test_a_size_below_one_is_one_line(config: Path, capsys: pytest.CaptureFixture[str], size: str) -> None:
    assert "must be at least 1" in fault(["--from", "deepspeed", "--json", str(config), "--tp", size], capsys)


@pytest.mark.parametrize(("arguments", "message"), [
    (["--from", "fairscale"], "invalid choice: 'fairscale'"), ([], "--from"), (["--from", "torchtune", "--tp", "2"],
                                                                            "--tp belongs to deepspeed and oslo"),
    (["--from", "oslo", "--tp", "two"], "invalid int value: 'two'")])
def test_a_bad_command_line_ends_with_status_2(config: Path, capsys: pytest.CaptureFixture[str], arguments: list[str],
                                               message: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        translate_recompute.main([*arguments, "--json", str(config)])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_it_runs_as_a_command_without_torch(config: Path) -> None:
    program = ("import runpy, sys; sys.argv[1:] = sys.argv[2:]; sys.modules['torch'] = None\n"
               "runpy.run_module('megatron_lite.tools.translate_recompute', run_name='__main__')")
    done = subprocess.run([sys.executable, "-c", program, "-", "--from", "deepspeed", "--json", str(config), "--tp", "2"],
                          capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "--recompute-policy '*:full@split'\n"), done.stderr
