"""`--explain-recompute` as a user runs it: at once, without torch, without what only training
needs, and true of the training."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from arguments import parse_args
from megatron_lite.cli.explanation import auto_settings, explanation
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.config.units import parse_bytes
from megatron_lite.memory.explain.recompute_report import explain
from megatron_lite.memory.predict.step_peak import fullest_step_peak
from megatron_lite.tools import plan
from tests.support.commands import ROOT, SMALL_MODEL, environment, run_command
from tests.support.limits import HANG_S
from tests.support.runs import run_to_end, tiny_run

# no data, no length, no --lr
EXPLAIN = [*SMALL_MODEL, "--micro-batch-size", "2", "--vocab-size", "98", "--explain-recompute"]


def explained(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "importtime", str(ROOT / "pretrain_gpt.py"), *EXPLAIN, *words],
        env=environment(**variables),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def test_it_prints_the_report_and_stops_and_imports_no_torch() -> None:
    done = explained("--recompute-granularity", "full", "--recompute-method", "uniform")
    assert done.returncode == 0
    assert "layers 0-1 (2 layers): units of 1; only the input of each is kept" in done.stdout
    imported = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    assert "megatron_lite.memory.explain.recompute_report" in imported
    assert not [name for name in imported if name.partition(".")[0] in ("torch", "numpy")]


def test_the_vocabulary_comes_from_the_tokenizers_files(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{number}": number for number in range(200)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")).save(
        str(tmp_path / "tokenizer.json")
    )
    run = [word for word in EXPLAIN if word not in ("--vocab-size", "98")]
    done = run_command(
        *run, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path)
    )
    assert "V 256, fp32" in done.stdout  # 200 ids, rounded up to a multiple of 128


def test_with_a_vocabulary_size_the_tokenizers_files_may_be_missing() -> None:
    missing = ("--vocab-file", "nowhere.json", "--merge-file", "nowhere.txt")
    done = run_command(*EXPLAIN, *missing)
    assert done.returncode == 0 and "V 128, fp32" in done.stdout  # 98 ids, rounded up
    done = run_command(*[word for word in EXPLAIN if word not in ("--vocab-size", "98")], *missing)
    assert done.returncode == 2
    assert "--vocab-file nowhere.json: no such file" in done.stderr
    assert done.stderr.endswith("With --vocab-size N it is not needed here\n")


@pytest.mark.parametrize(
    "recompute",
    [
        RecomputeConfig(),
        RecomputeConfig(recompute_granularity="full", recompute_method="block"),
        RecomputeConfig(
            recompute_granularity="selective", recompute_modules=("core_attn", "pointwise")
        ),
        RecomputeConfig(
            recompute_policy="0:full@host; *:none@host", contiguous_saved_activations=True
        ),
    ],
)
def test_the_bytes_that_it_announces_are_those_that_training_measures(
    recompute: RecomputeConfig,
) -> None:
    config = replace(tiny_run(training=dict(train_iters=1, eval_iters=0)), recompute=recompute)
    measured = run_to_end(config).activation_bytes
    assert measured is not None
    announced = explain(config, "cpu").own
    assert (announced.memory.kept_bytes, announced.host_bytes) == (
        measured.measured,
        measured.host_measured or 0,
    )


def test_the_last_lines_name_the_planner_which_takes_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*EXPLAIN, "--tensor-model-parallel-size", "2", "--bf16", "--window-size", "8,0"]
    config = parse_args(words).config
    last = " ".join("\n".join(explanation(config, ())).rpartition("\n\n")[2].split())
    run, found = tmp_path / "run.json", tmp_path / "plan.json"
    run.write_text(config.to_json())
    command = last.partition(" finds ")[0].replace("RUN.json", str(run)).replace("NAME", "cpu")
    assert command.startswith("python -m megatron_lite plan ")
    assert plan.main([*shlex.split(command)[4:], "--json", str(found)]) == 0
    assert capsys.readouterr().err == ""
    (verdict,) = json.loads(found.read_text())["verdicts"]
    assert verdict["plans"][0]["config"]["model"] == json.loads(config.to_json())["model"]
    assert verdict["num_gpus"] == config.parallel.model_ranks


def test_a_row_has_the_policy_that_auto_would_choose() -> None:
    config = parse_args([*EXPLAIN, "--pipeline-model-parallel-size", "2"]).config
    (row,) = auto_settings(config, "cpu", 2)
    own = fullest_step_peak(config, device="cpu", dp_cp_size=1).num_bytes
    given = parse_bytes("--memory-budget", row.name.removeprefix("auto "))
    assert fullest_step_peak(row.config, device="cpu", dp_cp_size=1).num_bytes <= given < own
    assert any(line.startswith(f"  {row.name} ") for line in _lines(config))


def _lines(config: RunConfig) -> list[str]:
    return "\n".join(explanation(config, ())).splitlines()
