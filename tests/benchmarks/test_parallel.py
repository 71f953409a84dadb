"""benchmarks/parallel.py as a user starts it: every layout has its row, trains alike, and receives
what was foretold; and fsdp_peak.py: sizes without contents are the sizes of a real run."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks import fsdp_peak, parallel
from benchmarks.layouts import ALONE, layouts
from benchmarks.traffic import foretold
from megatron_lite.config.data_parallel import DataParallelConfig
from megatron_lite.parallel.rng import RngStreams
from tests.support.commands import ROOT, environment
from tests.support.limits import HANG_S
from tests.support.models import tp_state
from tests.support.ranks import run_ranks

S, B, H, V, MICRO_BATCHES = 32, 2, 64, 256, 4  # the preset tiny


pytestmark = pytest.mark.long


def run_benchmark(script: str, folder: Path, *arguments: str) -> dict[str, Any]:
    file = folder / "new" / "report.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *arguments, "--json", str(file)],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    flags = "--preset tiny --num-layers 4 --dtype float32 --repeats 1 --threads 1"
    report = run_benchmark("parallel.py", tmp_path_factory.mktemp("parallel"), *flags.split())
    return {row["layout"]: row for row in report["rows"]}


def test_every_layout_has_its_row_and_trains_as_one_process(
    rows: dict[str, dict[str, Any]],
) -> None:
    assert rows.keys() == layouts(1).keys()
    for row in rows.values():
        assert row["loss"] == pytest.approx(rows[ALONE]["loss"], rel=1e-5)


def test_a_pipeline_sends_each_micro_batchs_hidden_states_once(
    rows: dict[str, dict[str, Any]],
) -> None:
    """From the first rank: forward, and from its second stage's backward the gradients of what the
    other rank sent it."""
    hidden = S * B * H * 4
    assert rows["PP 2"]["received_bytes"]["send"] == MICRO_BATCHES * hidden
    assert rows["PP 2, 2 virtual stages"]["received_bytes"]["send"] == 3 * MICRO_BATCHES * hidden


def test_ranks_that_share_out_states_keep_half_of_them(rows: dict[str, dict[str, Any]]) -> None:
    whole = rows["DP 2"]["kept"]["optimizer"]
    for name in ("DP 2, distributed optimizer", "FSDP 2", "FSDP 2, memory-efficient"):
        assert rows[name]["kept"]["optimizer"] == pytest.approx(whole / 2, rel=0.02)
    assert rows["FSDP 2"]["kept"]["weights"] == pytest.approx(
        rows["DP 2"]["kept"]["weights"] / 2, rel=0.02
    )


def test_a_data_parallel_rank_receives_what_the_shapes_foretell(
    rows: dict[str, dict[str, Any]],
) -> None:
    """And with overlap the same bytes in more messages."""
    told = [row for row in rows.values() if row["foretold_bytes"] is not None]
    assert len(told) == 8 and all(row["received_bytes"] == row["foretold_bytes"] for row in told)
    plain, overlap = rows["DP 2"], rows["DP 2, overlap"]
    assert (
        plain["received_bytes"] == overlap["received_bytes"]
        and plain["messages"] < overlap["messages"]
    )


def test_the_foretold_bytes_of_small_shapes_are_those_counted_by_hand() -> None:
    """Three ranks: 10 and 33 elements are aligned to 32 and 64, in a bucket of 96, or 192 in equal
    aligned shares; 2/3 of it come from the others."""
    shapes = {"decoder.layers.0.a": (10,), "decoder.layers.0.b": (11, 3)}
    common = dict(ranks=3, micro_batches=2, element_bytes=2)
    scalar = 2 * 4 * 2 // 3
    assert foretold(DataParallelConfig(), shapes, **common) == {
        "all-reduce": scalar + 2 * 96 * 4 * 2 // 3
    }
    assert foretold(DataParallelConfig(use_distributed_optimizer=True), shapes, **common) == {
        "all-reduce": 2 * scalar,
        "reduce-scatter": 96 * 4 * 2 // 3,
        "all-gather": 96 * 2 * 2 // 3,
    }
    rows_of_a_layer = 12 + 12 * 3
    assert foretold(DataParallelConfig(use_torch_fsdp2=True), shapes, **common) == {
        "all-reduce": 2 * scalar,
        "reduce-scatter": 2 * rows_of_a_layer * 4 * 2 // 3,
        "all-gather": 2 * 2 * (rows_of_a_layer * 2 * 2 // 3),
    }


@pytest.mark.slow
def test_sizes_without_contents_are_those_of_a_real_run(tmp_path: Path) -> None:
    sizes = [
        "--ranks",
        "2",
        "--num-layers",
        "2",
        "--hidden-size",
        "32",
        "--ffn-hidden-size",
        "48",
        "--num-attention-heads",
        "4",
        "--num-query-groups",
        "2",
        "--vocab-size",
        "3000",
        "--seq-length",
        "2",
        "--batch-size",
        "1",
    ]
    told = run_benchmark("fsdp_peak.py", tmp_path, *sizes)["rows"]
    args = fsdp_peak.parse(sizes)

    def work(rank: int, world_size: int) -> list[tuple[int, int]]:
        with tp_state(1) as state:
            state = replace(state, rng=cast(RngStreams, fsdp_peak.NoRandomness()))
            measured = [
                fsdp_peak.measure(
                    fsdp_peak.model_config(args, tied=tied), args, state, memory_efficient=efficient
                )
                for tied in (False, True)
                for efficient in (False, True)
            ]
            return [(row.states_bytes, row.beside_bytes) for row in measured]

    assert run_ranks(work, 2, detail=False)[0] == [
        (row["states_bytes"], row["beside_bytes"]) for row in told
    ]
    copy = 2 * 3000 * 32  # of the vocabulary, in bf16
    for (default, efficient), spared in ((told[:2], copy), (told[2:], 1)):
        assert default["beside_bytes"] - efficient["beside_bytes"] >= spared


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--micro-batches", "3"], "--micro-batches 3 must be a multiple of the 2 ranks"),
        (["--device", "cuda"], "the ranks are processes on the CPU"),
        (["--layouts", "DP 7"], "--layouts 'DP 7' must be one of "),
    ],
)
def test_settings_that_cannot_be_measured_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as ended:
        parallel.parse(["--device", "cpu", *arguments])
    assert ended.value.code == 2 and message in capsys.readouterr().err
