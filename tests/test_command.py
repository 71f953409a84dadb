"""The command megatron-lite: its subcommands, what they import, and its wheel."""

import shlex
import sys
import sysconfig
import zipfile
from functools import partial
from pathlib import Path

import pytest

from megatron_lite import __main__ as command
from megatron_lite import __version__
from megatron_lite.cli import pretrain
from megatron_lite.config.invocation import shell_lines
from tests.support.commands import MOCK, ROOT, SMALL_RUN, ended, fault_of, python, run

# What a wheel holds besides Python's modules.
DATA_FILES = {
    str(path.relative_to(ROOT))
    for kind in ("*.json", "*.html", "py.typed")
    for path in (ROOT / "megatron_lite").rglob(kind)
}


main = partial(command.main, started="/usr/bin/megatron-lite")
module = partial(command.main, started="/x/megatron_lite/__main__.py")


def test_help_lists_the_subcommands_and_version_is_the_packages():
    text = ended(main, "--help")
    assert text == ended(main, "") and text.status == 0
    assert all(f"\n  {name} " in text.out for name in command.SUBCOMMANDS)
    assert ended(main, "--version") == (0, f"megatron-lite {__version__}\n", "")
    assert "did you mean generate?" in fault_of(main, "genrate")


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
def test_a_fault_begins_with_the_command_as_typed(words, tmp_path, monkeypatch):
    """The rest of the line has the value at fault, or what is missing."""
    monkeypatch.chdir(tmp_path)
    for started, name in ((main, "megatron-lite"), (module, "python -m megatron_lite")):
        status, out, error = ended(started, words)
        assert (status, out) == (2, "")
        assert error.startswith(f"{name} {words.split()[0]}: error: "), error
        assert "pretrain_gpt.py: " not in error and "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_a_command_in_lines_has_the_words_that_it_was_given():
    words = [
        "python",
        "-m",
        "megatron_lite",
        "train",
        "--save",
        "a  b\tc\nd",
        *["--x-y", "-1"] * 30,
    ]
    lines = shell_lines(words)
    assert shlex.split(lines.replace("\\\n", "")) == words
    assert max(map(len, lines.splitlines())) <= 80 and lines.count("\\\n") >= 3


def test_train_and_explain_are_pretrain_gpt():
    words = [*SMALL_RUN, *MOCK]
    dumped = ended(module, ["train", *words, "--dump-config"])
    explained = ended(module, ["explain", *words])
    assert dumped == ended(pretrain.main, [*words, "--dump-config"])
    assert explained == ended(pretrain.main, [*words, "--explain-recompute"])
    assert dumped.status == explained.status == 0 and dumped.out != explained.out


def test_help_the_planner_and_explanations_import_no_torch():
    """And the other commands say how to install it."""
    run = shlex.join([*SMALL_RUN, *MOCK])
    fine = [
        *(f"{name} --help" for name in command.SUBCOMMANDS if name != "preprocess"),
        "train --help all",
        f"train {run} --dump-config",
        f"explain {run}",
        "plan --model gpt2 --gpu h100-80gb --gpus 1",
        "preprocess --help",
    ]
    lacking = [
        f"train {run}",
        "convert --from hf --to hf --load nowhere --save x",
        "generate --load nowhere --prompt 1",
    ]
    program = f"""if True:
        import sys
        sys.modules["torch"] = sys.modules["numpy"] = None  # importing them fails
        import megatron_lite.api, pretrain_gpt
        from megatron_lite.__main__ import main
        for line in {fine + lacking!r}:
            if line == "preprocess --help":  # it alone needs numpy for its help
                del sys.modules["numpy"]
            try:
                status = main(line.split(), "megatron-lite")
            except SystemExit as stop:
                status = stop.code
            assert status == (2 if line in {lacking!r} else 0), (line, status)
    """
    done = python(program)
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if ": error: " in line]
    for line, words in zip(lines, lacking, strict=True):
        assert line.startswith(f"megatron-lite {words.split()[0]}: error: it needs PyTorch")
        assert line.endswith("-m pip install torch`")


@pytest.mark.weekly
def test_a_wheel_is_complete_and_its_command_runs_elsewhere(tmp_path):
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

    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"), cwd=elsewhere)
    python = str(tmp_path / "venv" / "bin" / "python")
    program = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = run(python, "-c", program, cwd=elsewhere).stdout
    # A .pth file adds to the end of the path: the wheel's own package is found first.
    Path(site.strip(), "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    installing = ["install", "--no-deps", "--no-index", str(wheel)]
    run(*pip, "--python", python, *installing, cwd=elsewhere)

    found = "import importlib.util as u; print(*(u.find_spec(n) for n in {!r}))"
    names = ["arguments", "pretrain_gpt"]
    assert run(python, "-c", found.format(names), cwd=elsewhere).stdout == "None None\n"
    installed = str(tmp_path / "venv" / "bin" / "megatron-lite")
    assert run(installed, "--version", cwd=elsewhere).stdout == f"megatron-lite {__version__}\n"
    run(installed, "train", *SMALL_RUN, *MOCK, "--metrics-jsonl", "metrics.jsonl", cwd=elsewhere)
    run(installed, "report", ".", "--output", "page.html", cwd=elsewhere)
    assert (elsewhere / "page.html").stat().st_size > 10_000
    planning = shlex.split("plan --model gpt2 --gpu a100-80gb --gpus 1")
    assert "fits" in run(installed, *planning, cwd=elsewhere).stdout
