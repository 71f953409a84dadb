"""The command megatron-lite: its subcommands, what they import, and its wheel."""

from __future__ import annotations

import email
import subprocess
import sys
import sysconfig
import zipfile
from functools import partial
from pathlib import Path

import pytest

from megatron_lite import __main__ as command
from megatron_lite import __version__
from megatron_lite.cli import pretrain
from tests.support.commands import MOCK, SMALL_RUN, environment
from tests.support.limits import HANG_S

ROOT = Path(__file__).resolve().parent.parent
# What a wheel holds besides Python's modules.
DATA_FILES = {
    str(path.relative_to(ROOT))
    for kind in ("*.json", "*.html", "py.typed")
    for path in (ROOT / "megatron_lite").rglob(kind)
}


main = partial(command.main, started="/usr/bin/megatron-lite")


def test_help_lists_the_subcommands_and_version_is_the_packages(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0 == main([])
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in command.SUBCOMMANDS)
    assert max(map(len, text.splitlines())) <= 100
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"megatron-lite {__version__}\n"


def test_a_misspelt_subcommand_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["genrate"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "did you mean generate?" in error


@pytest.mark.parametrize(
    "words",
    [
        "train --num-layers 0",
        "train --num-layers nothing",
        "train --no-such-flag",
        "train --help no-such-word",
        "train --mock-data --tokenizer-type HuggingFaceTokenizer --tokenizer-model nowhere"
        " --num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 4"
        " --max-position-embeddings 4 --micro-batch-size 1 --lr 1e-3 --train-iters 1",
        "explain --num-layers 0",
        "plan --model gpt2",
        "convert --from hf --to megatron-lite --load nowhere --save x",
        "preprocess --input nowhere --output-prefix x --vocab-size 8",
        "generate --load nowhere --prompt 1",
        "plot nowhere",
        "report nowhere",
    ],
)
def test_a_fault_begins_with_the_command_as_typed(
    words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the line has the value at fault, or what is missing."""
    monkeypatch.chdir(tmp_path)
    for started, name in (
        ("/usr/bin/megatron-lite", "megatron-lite"),
        ("/x/megatron_lite/__main__.py", "python -m megatron_lite"),
    ):
        try:
            status = command.main(words.split(), started)
        except SystemExit as stop:
            status = int(str(stop.code))
        out, error = capsys.readouterr()
        assert (status, out) == (2, "")
        assert error.startswith(f"{name} {words.split()[0]}: error: "), error
        assert "pretrain_gpt.py: " not in error and "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_train_and_explain_are_pretrain_gpt(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL_RUN, *MOCK]
    module = partial(command.main, started="/x/megatron_lite/__main__.py")
    printed = []
    for main, line in (
        (module, ["train", *words, "--dump-config"]),
        (pretrain.main, [*words, "--dump-config"]),
        (module, ["explain", *words]),
        (pretrain.main, [*words, "--explain-recompute"]),
    ):
        assert main(line) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2] == printed[3]


def test_help_the_planner_and_explanations_import_no_torch() -> None:
    lines = [
        *([name, "--help"] for name in command.SUBCOMMANDS),
        ["train", "--help", "all"],
        ["train", *SMALL_RUN, *MOCK, "--dump-config"],
        ["explain", *SMALL_RUN, *MOCK],
        ["plan", "--model", "gpt2", "--gpu", "h100-80gb", "--gpus", "1"],
    ]
    program = f"""if True:
        import sys
        sys.modules["torch"] = None  # importing it fails
        import megatron_lite.api, pretrain_gpt
        from megatron_lite.__main__ import main
        for line in {lines!r}:
            try:
                status = main(line)
            except SystemExit as stop:
                status = stop.code
            assert status == 0, (line, status)
    """
    run(sys.executable, "-c", program)


@pytest.mark.parametrize(
    "words",
    [
        ["train", *SMALL_RUN, *MOCK],
        ["convert", *["--from", "hf", "--to", "hf", "--load", "nowhere", "--save", "x"]],
        ["generate", *["--load", "nowhere", "--prompt", "1"]],
    ],
)
def test_without_torch_a_subcommand_that_needs_it_says_how_to_install_it(words: list[str]) -> None:
    program = f"""if True:
        import sys
        sys.modules["torch"] = None  # importing it fails
        from megatron_lite.__main__ import main
        sys.exit(main({words!r}))
    """
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    (line,) = ended.stderr.splitlines()[-1:]
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert line.startswith(f"megatron-lite {words[0]}: error: it needs PyTorch")
    assert line.endswith("-m pip install torch`")


@pytest.mark.long
def test_a_wheel_is_complete_and_its_command_runs_elsewhere(tmp_path: Path) -> None:
    """Its dependencies are those of the environment of the tests."""
    source, elsewhere = tmp_path / "source", tmp_path / "elsewhere"
    elsewhere.mkdir()
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "megatron_lite").rglob("*.py")}
    for name in modules | DATA_FILES | {"setup.py", "pyproject.toml", "README.md", "LICENSE"}:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    building = ["--no-deps", "--no-index", "--no-build-isolation"]
    run(*pip, "wheel", *building, "--wheel-dir", str(tmp_path), ".", cwd=source)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == modules | DATA_FILES  # so no top-level `arguments` or `tests`
    _check_metadata(zipfile.ZipFile(wheel))

    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"), cwd=elsewhere)
    python = str(tmp_path / "venv" / "bin" / "python")
    site = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=elsewhere
    )
    # A .pth file adds to the end of the path: the wheel's own package is found first.
    Path(site.strip(), "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    installing = ["install", "--no-deps", "--no-index", str(wheel)]
    run(*pip, "--python", python, *installing, cwd=elsewhere)

    found = "import importlib.util as u; print(*(u.find_spec(n) for n in {!r}))"
    names = ["arguments", "pretrain_gpt"]
    assert run(python, "-c", found.format(names), cwd=elsewhere) == "None None\n"
    installed = str(tmp_path / "venv" / "bin" / "megatron-lite")
    assert run(installed, "--version", cwd=elsewhere) == f"megatron-lite {__version__}\n"
    run(installed, "train", *SMALL_RUN, *MOCK, "--metrics-jsonl", "metrics.jsonl", cwd=elsewhere)
    run(installed, "report", ".", "--output", "page.html", cwd=elsewhere)
    assert (elsewhere / "page.html").stat().st_size > 10_000
    planned = run(
        installed, "plan", "--model", "gpt2", "--gpu", "a100-80gb", "--gpus", "1", cwd=elsewhere
    )
    assert "fits" in planned


def _check_metadata(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    about = email.message_from_bytes(wheel.read(name))
    versions = {f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 15)}
    assert versions <= set(about.get_all("Classifier", []))
    assert about["Requires-Python"] == ">=3.10" and about["Version"] == __version__
    assert about["Description-Content-Type"] == "text/markdown"
    assert str(about.get_payload(decode=True), "utf-8") == (ROOT / "README.md").read_text()
    assert {"plot", "tensorboard", "hf", "wandb", "tokenizers", "test", "parity"} == set(
        about.get_all("Provides-Extra", [])
    )
    assert about.get_all("Project-URL", []) == []  # the project has no address


@pytest.mark.long
def test_train_runs_on_two_ranks_as_a_module() -> None:
    words = ["--nproc_per_node", "2", "-m", "megatron_lite", "train", *SMALL_RUN, *MOCK]
    log = run(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *words,
        *("--tensor-model-parallel-size", "2"),
    )
    assert "finished at iteration 12 of 12" in log


def run(*words: str, cwd: Path = ROOT) -> str:
    """The standard output of a command that must not fail.

    In another folder than the checkout, the checkout's modules are not on the path.
    """
    variables = environment()
    if cwd != ROOT:
        variables.pop("PYTHONPATH", None)
    done = subprocess.run(
        words, cwd=cwd, env=variables, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout
