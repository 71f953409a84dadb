"""docs/adding.md: its files and tables exist, and what it adds works, as it is written there."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.docs.marks import ROOT, text_of
from tests.support.commands import MOCK, SMALL_RUN

PAGE = text_of("adding")


def copy_with(section, folder):
    """Returns a copy of the package with the differences of a section. A difference has no numbers
    of lines: what it takes away, and what stands around it, must stand there once."""
    shutil.copytree(ROOT / "megatron_lite", folder / "megatron_lite")
    for name in ("arguments.py", "pretrain_gpt.py"):
        shutil.copy(ROOT / name, folder)
    (block,) = re.findall(
        r"```diff\n(.*?)```", PAGE.split(f"## {section}")[1].split("\n## ")[0], re.S
    )
    for part in block.split("--- ")[1:]:
        name, *lines = part.splitlines()
        before, after = (
            "".join(f"{line[1:]}\n" for line in lines if line[0] in kinds) for kinds in (" -", " +")
        )
        path = folder / name
        text = path.read_text()
        assert text.count(before) == 1, (name, before)
        path.write_text(text.replace(before, after))
    return folder


def ran(folder, *words):
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


TRAIN = """
import json, sys, pretrain_gpt
for words in json.loads(sys.argv[1]):
    assert pretrain_gpt.main(words) == 0
"""


def losses(folder, *runs):
    """Trains each run, and compares the kept bytes with their prediction."""
    files = [folder / f"{number}.jsonl" for number in range(len(runs))]
    fixed = [*SMALL_RUN, *MOCK, "--eval-iters", "0", "--train-iters", "3", "--metrics-jsonl"]
    lines = [[*fixed, str(file), *flags] for file, flags in zip(files, runs, strict=True)]
    ran(folder, "-c", TRAIN, json.dumps(lines))
    found = []
    for file in files:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for row in rows:
            assert row["activation_bytes_predicted"] == row["activation_bytes_measured"] > 0
        found.append([value for row in rows for value in (row["lm_loss"], row["grad_norm"])])
    return found


@pytest.mark.long
def test_a_norm(tmp_path):
    own = ["--normalization", "MeanNorm"]
    other, plain, *others = losses(
        copy_with("A norm", tmp_path),
        ["--normalization", "LayerNorm"],
        own,
        [*own, "--recompute-policy", "*:full"],
        [*own, "--recompute-policy", "*:pointwise"],
    )
    assert plain != other and others == [plain, plain]


@pytest.mark.long
def test_a_region(tmp_path):
    rotary = ["--position-embedding-type", "rope", "--recompute-policy"]
    folder = copy_with("A region", tmp_path)
    plain, rebuilt = losses(folder, [*rotary, "*:none"], [*rotary, "*:rotary"])
    assert plain == rebuilt


@pytest.mark.long
def test_a_flag(tmp_path):
    folder = copy_with("A flag", tmp_path)
    assert "what the log begins with" in ran(folder, "pretrain_gpt.py", "--help", "greeting")
    flags = [*SMALL_RUN, *MOCK, "--greeting", "Good morning", "--dump-config"]
    assert (
        json.loads(ran(folder, "pretrain_gpt.py", *flags))["logging"]["greeting"] == "Good morning"
    )


@pytest.mark.long
def test_a_family(tmp_path):
    folder = copy_with("A family", tmp_path)
    config = {
        "model_type": "mymodel",
        "architectures": ["MyModelForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "vocab_size": 100,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    flags = f"--hf-config {file} --dump-config --micro-batch-size 1 --seq-length 32"
    found = json.loads(ran(folder, "pretrain_gpt.py", *MOCK, *flags.split()))["model"]
    assert found["num_query_groups"] == 2 and found["ffn_hidden_size"] == 96 and found["swiglu"]
