"""Every tool, with each file that it opens replaced by a pipe, a device or a link out of its
folder: one clear error, status 2, and no wait. What a tool opens is found by recording, so that no
new file is forgotten."""

import json
import os
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_lite.tools import (
    convert,
    generate,
    plan,
    plot_memory,
    preprocess_data,
    report,
    train_tokenizer,
    translate_recompute,
)
from tests.support.commands import status_of
from tests.support.conversions import converted, save_tokenizer, saved_peer
from tests.support.runs import run_to_end, tiny_run, with_checkpoint

_recording = []


def _hook(event, arguments):
    if event != "open" or not _recording:
        return
    path, _, flags = arguments
    if not isinstance(path, (str, os.PathLike)) or not isinstance(flags, int):
        return
    absolute = os.path.abspath(path)
    if flags & (os.O_WRONLY | os.O_CREAT | os.O_DIRECTORY):
        return
    for root, found in _recording:
        if absolute.startswith(root + os.sep) and os.path.isfile(absolute):
            found.add(Path(absolute))


sys.addaudithook(_hook)  # a hook stays for ever, so there is one for all tests


@contextmanager
def opened_below(root):
    """Yields the set of regular files below `root` that are opened to read during the block."""
    entry = (str(root), set())
    _recording.append(entry)
    try:
        yield entry[1]
    finally:
        _recording.remove(entry)


def hf_model(folder):
    pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    saved_peer("llama", folder / "in")
    save_tokenizer(folder / "in")
    (folder / "in" / "merges.txt").write_text("#version: 0.2\na b\n")


def converted_to(target):
    def prepare(folder):
        hf_model(folder)
        assert converted(folder, f"hf in -> {target} mid") == 0
        shutil.rmtree(folder / "in")

    return prepare


def run(folder):
    config = tiny_run(train_iters=2, eval_iters=0, metrics=folder / "in" / "m.jsonl")
    (folder / "in").mkdir()
    run_to_end(with_checkpoint(config, save=str(folder / "in" / "steps"), save_interval=1))


def lines(folder):
    pytest.importorskip("tokenizers")
    (folder / "in.jsonl").write_text('{"text": "to be or not to be"}\n')
    save_tokenizer(folder)


def config(folder):
    (folder / "ds.json").write_text(json.dumps({"activation_checkpointing": {"cpu_offload": True}}))
    (folder / "run.json").write_text(tiny_run().to_json())
    (folder / "timeline.json").write_text("{}")


CONVERT = "--load {0}/%s --save {0}/out --from %s --to %s"
PREPROCESS = "--input {0}/in.jsonl --output-prefix {0}/out --tokenizer-type HuggingFaceTokenizer"
# by name: the command, what makes its files in a folder, and its words, with {} for that folder
TOOLS = {
    "convert hf": (convert.main, hf_model, CONVERT % ("in", "hf", "megatron-lite")),
    **{
        f"convert {kind}": (convert.main, converted_to(kind), CONVERT % ("mid", kind, "hf"))
        for kind in ("megatron-lite", "megatron", "megatron-dist")
    },
    "report": (report.main, run, "{0}/in --output {0}/out.html"),
    "generate": (
        generate.main,
        converted_to("megatron-lite"),
        "--load {}/mid --prompt to --max-new-tokens 1",
    ),
    "preprocess": (
        preprocess_data.main,
        lines,
        PREPROCESS + " --tokenizer-model {0}/tokenizer.json",
    ),
    "train_tokenizer": (
        train_tokenizer.main,
        lines,
        "--input {0}/in.jsonl --output {0}/out --vocab-size 260",
    ),
    "plan": (plan.main, config, "--config-json {}/run.json --gpus 1 --gpu cpu"),
    "translate": (translate_recompute.main, config, "--from deepspeed --json {}/ds.json"),
    "plot": (plot_memory.main, config, "{0}/timeline.json --output {0}/out.svg"),
}


def pipe(path, outside):
    os.mkfifo(path)


def device(path, outside):
    path.symlink_to("/dev/zero")


def link(path, outside):
    path.symlink_to(outside)


def status(main, words, folder):
    for name in ("out", "out.html", "out.svg"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return status_of(main, words.format(folder).split())


@pytest.mark.runs(daily=4, ci=8)
@pytest.mark.parametrize("name", TOOLS)
def test_a_file_that_is_no_file_of_its_folder_is_refused(name, tmp_path, capsys):
    (main, prepare, words), folder = TOOLS[name], tmp_path / "work"
    folder.mkdir()
    prepare(folder)
    before = {path for path in folder.rglob("*") if path.is_file()}
    with opened_below(folder) as opened:
        status(main, words, folder)
    files = sorted(before & opened)
    assert files
    for path in files:
        kept = path.rename(tmp_path / "kept")
        for replace in (pipe, device, link):
            replace(path, kept)
            capsys.readouterr()
            case = f"{name}: {path.relative_to(folder)} as a {replace.__name__}"
            assert status(main, words, folder) == 2, case
            error = capsys.readouterr().err
            assert "error: " in error and "Traceback" not in error, (case, error)
            assert len(error) < 1024 * 2 and not (folder / "out").exists(), case
            path.unlink()
        kept.rename(path)
