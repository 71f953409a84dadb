"""benchmarks/recompute.py: the same model in every row, bytes and FLOPs that can be checked, no
policy left out silently."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import recompute_engines
from benchmarks.engines import PRESETS, Setting
from benchmarks.recompute import parse
from megatron_lite.config.model import ModelConfig
from megatron_lite.memory.predict.flops import forward_flops
from megatron_lite.parallel.rng import RngStreams
from megatron_lite.parallel.state import ParallelState
from tests.support.commands import ROOT, environment
from tests.support.limits import HANG_S

pytestmark = pytest.mark.long
CPU = torch.device("cpu")
Rows = dict[str, dict[str, Any]]  # by engine


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The smallest runs: at TP 1 without and with dropout, and without it at TP 2 and at TP 2 with
    sequence parallelism."""
    alone, sharded = (
        _report(tmp_path_factory.mktemp("recompute") / "new" / "report.json", *words)
        for words in (("--tp", "1", "--dropout", "0", "0.1"), ("--tp", "2", "--dropout", "0"))
    )
    assert alone["skipped"].keys() >= sharded["skipped"].keys()
    return {**alone, "rows": [*alone["rows"], *sharded["rows"]]}


def _report(file: Path, *words: str) -> dict[str, Any]:
    command = [
        sys.executable,
        str(ROOT / "benchmarks/recompute.py"),
        "--device",
        "cpu",
        "--preset",
        "tiny",
        "--dtype",
        "float32",
        *words,
        "--repeats",
        "1",
        "--threads",
        "1",
        "--json",
        str(file),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(), check=False, timeout=HANG_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(map(len, done.stdout.splitlines()[2:])) <= 100
    return json.loads(file.read_text())


def blocks_of(report: dict[str, Any]) -> dict[tuple[int, bool, float], Rows]:
    blocks: dict[tuple[int, bool, float], Rows] = defaultdict(dict)
    for row in report["rows"]:
        blocks[row["tp_size"], row["sequence_parallel"], row["dropout"]][row["engine"]] = row
    return blocks


@pytest.mark.slow
def test_every_policy_and_peer_has_its_row_at_every_tensor_parallel_size(
    report: dict[str, Any],
) -> None:
    blocks, names = blocks_of(report), recompute_engines.engine_names(2)
    torch_rows, theirs = (
        {name for name in names if name.startswith(kind)} for kind in ("torch", "transformers")
    )
    assert (len(torch_rows), len(theirs)) == (8, 3)
    assert list(blocks) == [(1, False, 0.0), (1, False, 0.1), (2, False, 0.0), (2, True, 0.0)]
    for (tp_size, sequence_parallel, _), rows in blocks.items():
        ours = recompute_engines.policies(2, tp_size=tp_size, sequence_parallel=sequence_parallel)
        assert set(rows) | set(report["skipped"]) == {
            *ours,
            *torch_rows,
            *(theirs if tp_size == 1 else ()),
        }
        assert ("uniform 1, distribute" in ours) == (tp_size == 2 and not sequence_parallel)
        for row in rows.values():
            assert row["ms"] > 0.0 and len(row["samples_ms"]) == 1
            assert row["rival"] is None or row["rival"] in rows


@pytest.mark.slow
def test_every_engine_computes_the_same_loss_and_gradients(report: dict[str, Any]) -> None:
    """A checkpoint that drops gradients would look fast. With dropout torch's own replays draw
    other attention masks."""
    for (_, _, dropout), rows in blocks_of(report).items():
        for name, row in rows.items():
            if name.startswith("transformers"):
                assert row["loss"] == rows["transformers, none"]["loss"], name
                assert row["grad_norm"] == pytest.approx(
                    rows["transformers, none"]["grad_norm"], rel=1e-4
                ), name
            else:
                assert row["loss"] == rows["none"]["loss"], name
                if dropout == 0.0 or not name.startswith("torch"):
                    assert row["grad_norm"] == rows["none"]["grad_norm"], name


@pytest.mark.slow
def test_a_whole_replay_costs_exactly_the_layers_forward(report: dict[str, Any]) -> None:
    shape = PRESETS["tiny"]
    config = ModelConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        max_position_embeddings=shape.seq_length,
        num_attention_heads=shape.num_attention_heads,
    )
    layers = forward_flops(
        config, batch=shape.batch_size, seq_length=shape.seq_length, padded_vocab_size=0
    )
    for (tp_size, _, _), rows in blocks_of(report).items():
        for name in ("uniform 1, no tail skip", "torch layers, reentrant"):
            assert rows[name]["flops"] - rows["none"]["flops"] == layers // tp_size


@pytest.mark.slow
def test_units_keep_their_inputs_alone(report: dict[str, Any]) -> None:
    """Two units instead of one of two layers keep one [s, b, h] more, and one state of each random
    stream."""
    shape = PRESETS["tiny"]
    whole = 4 * shape.seq_length * shape.batch_size * shape.hidden_size
    for (tp_size, sequence_parallel, _), rows in blocks_of(report).items():
        hidden = whole // tp_size if sequence_parallel else whole
        more = rows["uniform 1"]["kept_bytes"] - rows["uniform 2"]["kept_bytes"]
        assert hidden <= more <= hidden + 3 * torch.get_rng_state().nbytes
        for row in rows.values():
            assert row["peak_bytes"] > row["kept_bytes"]


def test_a_policy_that_the_configuration_refuses_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        recompute_engines,
        "policies",
        lambda *_, **__: {
            "none": {},
            "new": dict(recompute_by_magic=True),
            "bad": dict(recompute_granularity="half"),
        },
    )
    monkeypatch.setattr(recompute_engines, "TORCH_PEERS", {})
    setting = Setting(shape=PRESETS["tiny"], device=CPU, dtype="float32", dropout=0.0)
    place = recompute_engines.Place(
        parallel=ParallelState(device=CPU, rng=RngStreams(CPU, seed=1)), sequence_parallel=False
    )
    contestants = recompute_engines.build_contestants(setting, place)
    assert contestants.engines[0].name == "none"
    assert (
        "recompute_by_magic" in contestants.skipped["new"]
        and "--recompute-granularity" in contestants.skipped["bad"]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "3"], "--tp 3 must be at least 1 and divide --num-attention-heads 8"),
        (["--tp", "2", "--vocab-size", "99"], "divide --vocab-size 99"),
        (["--tp", "2", "--device", "cuda"], "--tp 2 runs its ranks on the CPU"),
        (["--clock", "cpu"], "needs --threads 1"),
        (["--engines", "uniform 9"], "--engines 'uniform 9' must be one of "),
    ],
)
def test_settings_that_cannot_be_measured_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--device", "cpu", *arguments])
    assert ended.value.code == 2 and message in capsys.readouterr().err
