"""translate_recompute: what it prints, that the flags are ours, and one line for each fault."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lite.tools import translate_recompute

DEEPSPEED = {
    "train_batch_size": 8,
    "activation_checkpointing": {"partition_activations": True, "number_checkpoints": 4},
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DEEPSPEED))
    return path


def fault(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr of a run that must end with status 2 and print no flags."""
    assert translate_recompute.main(arguments) == 2
    shown = capsys.readouterr()
    assert (
        shown.out == ""
        and shown.err.startswith("python -m megatron_lite.tools.translate_recompute: error: ")
        and shown.err.count("\n") == 1
        and len(shown.err) < 800
    )
    return shown.err


def test_flags_go_to_stdout_and_notes_to_stderr(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        translate_recompute.main(["--from", "deepspeed", "--json", str(config), "--tp", "2"]) == 0
    )
    shown = capsys.readouterr()
    assert shown.out == "--recompute-policy '*:full@split'\n"
    assert shown.err == (
        "note: deepspeed: number_checkpoints has no counterpart: the buffer is sized by the plan\n"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe\x00", "not a text in UTF-8 (byte 0)"),
        (b"[" * 100_000, "not JSON"),
        (b"1" * 5000, "not JSON"),
        (b"[]", "expected an object"),
        (b"{}", "no section activation_checkpointing"),
        (b'{"activation_checkpointing": {"a": 1, "a": 2}}', "'a' is given twice"),
        (b'{"activation_checkpointing": {"profil": true}}', "unknown key 'profil'"),
        (
            b'{"activation_checkpointing": {"profile": "' + b"y" * 9000 + b'"}}',
            "profile must be bool",
        ),
        (b'{"activation_checkpointing": {"' + b"y" * 9000 + b'": "a\\nb"}}', "unknown key"),
        (
            b'{"activation_checkpointing": {"partition_activations": true}}',
            "the file does not say how many there are: give --tp N",
        ),
        (
            b'{"activation_checkpointing": {"number_checkpoints": true}}',
            "number_checkpoints must be int or null (got True)",
        ),
    ],
)
def test_a_file_that_will_not_do_is_one_line(
    config: Path, capsys: pytest.CaptureFixture[str], text: bytes, message: str
) -> None:
    config.write_bytes(text)
    error = fault(["--from", "deepspeed", "--json", str(config)], capsys)
    assert message in error and "config.json" in error


def test_a_huge_file_is_one_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(config, "wb") as file:
        file.truncate(2**33)
    assert "longer than 262144 bytes" in fault(["--from", "oslo", "--json", str(config)], capsys)


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_a_file_that_cannot_be_read_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert str(tmp_path / name) in fault(["--from", "oslo", "--json", str(tmp_path / name)], capsys)


@pytest.mark.parametrize("size", ["0", "-2"])
def test_a_size_below_one_is_one_line(
    config: Path, capsys: pytest.CaptureFixture[str], size: str
) -> None:
    assert "must be at least 1" in fault(
        ["--from", "deepspeed", "--json", str(config), "--tp", size], capsys
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "fairscale"], "invalid choice: 'fairscale'"),
        (["again.json"], "give the config once: FILE, or --json FILE"),
        (
            ["--from", "torchtune", "--tp", "2"],
            "--tp belongs to deepspeed and oslo (got a config of torchtune)",
        ),
        (
            ["--from", "oslo", "--component", "a"],
            "--component belongs to modalities (got a config of oslo)",
        ),
        (["--from", "oslo", "--tp", "two"], "invalid int value: 'two'"),
    ],
)
def test_a_bad_command_line_ends_with_status_2(
    config: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        translate_recompute.main([*arguments, "--json", str(config)])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-layers", "0"], "--num-layers must be at least 1 (got 0)"),
        (["--tp", "3"], "contradicts tensor_parallel_size 2"),
        (["--component", "a"], "--component belongs to modalities (got a config of oslo)"),
    ],
)
def test_an_option_that_does_not_fit_the_file_is_one_line(
    config: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    config.write_text('{"tensor_parallel_size": 2, "activation_checkpointing": {"enable": true}}')
    assert message in fault([str(config), *arguments], capsys)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.yaml",
            "ac_variant: selective_layer_activation_checkpointing\nac_fun_params:\n  ac_freq: true",
            "ac_freq must be int",
        ),
        (
            "a.yaml",
            "ac_variant: &a\n  b: 1\nlayers_fqn: *a",
            "ac_variant must be str (got {'b': 1})",
        ),
        ("a.toml", "[activation_checkpoint]\nmode = true", "mode must be str (got True)"),
        ("a.json", '{"activation_checkpointing": {"enable": 1}}', "enable must be bool (got 1)"),
    ],
)
def test_a_value_of_the_wrong_type_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    assert message in fault([str(tmp_path / name)], capsys)


def test_it_runs_as_a_command_without_torch(config: Path) -> None:
    program = (
        "import runpy, sys; sys.argv[1:] = sys.argv[2:]; sys.modules['torch'] = None\n"
        "runpy.run_module('megatron_lite.tools.translate_recompute', run_name='__main__')"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            program,
            "-",
            "--from",
            "deepspeed",
            "--json",
            str(config),
            "--tp",
            "2",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "--recompute-policy '*:full@split'\n"), done.stderr
