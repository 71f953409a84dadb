"""The scripts of examples/: they are valid bash, and the program accepts every flag that they pass.

`DRY_RUN=1 bash examples/x.sh` prints the command that the script would start.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from arguments import parse_args

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [*sorted((ROOT / "examples").glob("*.sh")), ROOT / "tests" / "run.sh", ROOT / ".ci" / "run"]
LAUNCHERS = [path for path in SCRIPTS if path.parent.name == "examples" and path.name != "environment.sh"]
ARRAYS = ("GPT_MODEL_ARGS", "TRAINING_ARGS", "MODEL_PARALLEL_ARGS", "DATA_ARGS", "EVAL_AND_LOGGING_ARGS")


def run_script(path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # From another directory, and with nothing that the caller may have set for the scripts.
    known = {"PATH", "HOME", "TMPDIR"}
    return subprocess.run(["bash", str(path), *arguments], cwd="/", capture_output=True, text=True, timeout=60,
                          env={**{name: value for name, value in os.environ.items() if name in known}, **environment})


def command_of(path: Path, *arguments: str, **environment: str) -> list[str]:
    completed = run_script(path, *arguments, DRY_RUN="1", **environment)
    assert completed.returncode == 0, completed.stderr
    return shlex.split(completed.stdout)


def training_flags(command: list[str]) -> list[str]:
    script = next(index for index, word in enumerate(command) if word.endswith("pretrain_gpt.py"))
    assert Path(command[script]) == ROOT / "pretrain_gpt.py"
    return command[script + 1:]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_valid_bash(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--severity=warning", "--external-sources", "--exclude=SC1091", str(path)], check=True)


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.name)
def test_the_program_accepts_every_flag_of_an_example_as_the_flag_it_is(path: Path) -> None:
    parsed = parse_args(training_flags(command_of(path)))
    assert parsed.config.parallel.tensor_model_parallel_size == 2
    assert not parsed.notices, "an example uses a flag without effect"


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.name)
def test_an_example_starts_as_many_processes_as_its_tensor_parallel_size_needs(path: Path) -> None:
    command = command_of(path, TP="4", NPROC_PER_NODE="8")
    processes = int(command[command.index("--nproc_per_node") + 1])
    config = parse_args(training_flags(command)).config
    data_parallel_size = config.parallel.data_parallel_size(processes)
    assert config.parallel.tensor_model_parallel_size == 4 and config.training.num_microbatches(data_parallel_size) >= 1


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.name)
def test_an_example_passes_every_array_in_megatrons_names(path: Path) -> None:
    source = path.read_text()
    for name in ARRAYS:
        assert f"{name}=(\n" in source and f'"${{{name}[@]}}"' in source, name


@pytest.mark.parametrize("name", ["pretrain_gpt_small.sh", "pretrain_llama_small.sh"])
def test_flags_after_an_example_win(name: str) -> None:
    config = parse_args(training_flags(command_of(ROOT / "examples" / name, "--train-iters", "7"))).config
    assert config.training.train_iters == 7


def test_quickstart_takes_each_option_as_a_flag_or_from_the_environment(tmp_path: Path) -> None:
    script = ROOT / "examples" / "quickstart.sh"
    by_flag = command_of(script, "--corpus", "stdlib", "--steps", "30", "--tp", "1", "--output", str(tmp_path))
    by_environment = command_of(script, CORPUS="stdlib", STEPS="30", TP="1", OUTPUT=str(tmp_path))
    assert by_flag == by_environment != command_of(script)
    config = parse_args(training_flags(by_flag)).config
    assert config.training.train_iters == 30 and config.data.data_path == (f"{tmp_path}/data-stdlib/corpus_text_document",)
    assert list(tmp_path.iterdir()) == []


def test_quickstart_help_names_every_option_and_its_variable() -> None:
    completed = run_script(ROOT / "examples" / "quickstart.sh", "--help")
    assert completed.returncode == 0
    for option in ("corpus", "steps", "tp", "output", "venv"):
        assert f"--{option} " in completed.stdout and f" {option.upper()} " in completed.stdout


@pytest.mark.parametrize(("arguments", "message"), [
    (["--corpus", "bible"], "auto, shakespeare or stdlib (got bible)"),
    (["--steps", "0"], "positive number (got 0)"),
    (["--tp", "3"], "divides the model's 8 heads (got 3)"),
    (["--tp"], "--tp needs a value"),
    (["--tpu", "2"], "unknown option --tpu"),
])
def test_quickstart_refuses_a_bad_option_with_status_2(arguments: list[str], message: str) -> None:
    completed = run_script(ROOT / "examples" / "quickstart.sh", *arguments)
    assert completed.returncode == 2 and message in completed.stderr


def test_a_missing_python_is_one_clear_line(tmp_path: Path) -> None:
    completed = run_script(ROOT / "examples" / "quickstart.sh", "--venv", str(tmp_path / "venv"), PYTHON="python2.0")
    assert completed.returncode == 1 and "no Python of at least 3.10 found (tried: python2.0)" in completed.stderr


def test_an_occupied_directory_is_not_turned_into_an_environment(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("important")
    completed = run_script(ROOT / "tests" / "run.sh", VENV=str(tmp_path))
    assert completed.returncode == 1 and "neither a virtual environment nor empty" in completed.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
