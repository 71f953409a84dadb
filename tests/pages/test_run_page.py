"""The page of a run shows what the files say, escapes every name, and survives garbled files."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.config.run_settings import changed_settings
from megatron_lite.pages.event_file import Scalar, SessionStart, read_events
from megatron_lite.pages.figures import AxisRange, number, short
from megatron_lite.pages.line_chart import MOST_POINTS, LineChart, Series
from megatron_lite.pages.run_charts import charts_of, running_mean
from megatron_lite.pages.run_files import find_run
from megatron_lite.pages.run_log import LogFacts
from megatron_lite.pages.run_page import run_page
from megatron_lite.pages.run_predictions import predictions
from megatron_lite.pages.run_record import RunRecord, read_run
from megatron_lite.tools import report
from megatron_lite.training.run_summary import RunSummary, write_summary
from megatron_lite.training.tensorboard import ScalarFile
from tests.support.browser import CHROMIUM, Parsed, look
from tests.support.limits import HANG_S
from tests.support.runs import run_to_end, tiny_run, with_checkpoint

ERROR = "python -m megatron_lite.tools.report: error: "

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u202e"
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


def row(iteration: int, **values: Any) -> dict[str, Any]:
    return {
        "iteration": iteration,
        "consumed_samples": 4 * iteration,
        "global_batch_size": 4,
        "lm_loss": 6.0 - iteration / 7,
        "grad_norm": 1.0 + 1 / iteration,
        "learning_rate": 1e-3 / iteration,
        "loss_scale": 1.0,
        "iteration_ms": 100.0 + iteration % 3,
        "tokens_per_second": 640.0 + iteration,
        "skipped": 0,
        "nan": 0,
        **values,
    }


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(values) + "\n" for values in rows))
    return path


def read(*paths: Path) -> RunRecord:
    return read_run(find_run([str(path) for path in paths]))


@pytest.fixture(scope="module")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 iterations with checkpoints, evaluations and a restart after 10 iterations."""
    folder = tmp_path_factory.mktemp("real") / "run"
    save = str(folder / "checkpoints")
    config = tiny_run(
        training=dict(eval_interval=5, exit_interval=10), metrics=folder / "metrics.jsonl"
    )
    run_to_end(with_checkpoint(config, save=save, save_interval=5))
    run_to_end(with_checkpoint(config, save=save, load=save, save_interval=5))
    return folder


def test_the_page_of_a_real_run_has_the_values_of_its_files(real_run: Path) -> None:
    run = read(real_run)
    rows = [json.loads(line) for line in (real_run / "metrics.jsonl").read_text().splitlines()]
    assert run.iterations == list(range(1, 21))
    for name in ("lm_loss", "grad_norm", "learning_rate", "iteration_ms"):
        assert run.columns[name] == [values[name] for values in rows]
    parsed = Parsed(run_page(run))
    assert parsed.faults == []
    charts = parsed.data["charts"]["charts"].values()
    shown = [column for chart in charts for column in chart["y"]]
    for name in ("lm_loss", "grad_norm", "learning_rate", "iteration_ms", "tokens_per_second"):
        assert [pytest.approx(values[name], rel=1e-5) for values in rows] in shown, name
    assert all(chart["x"] == run.iterations for chart in charts)
    assert run.config is not None and run.num_iterations == 20
    for text in ("The run has reached its end.", "--hidden-size", "1,280", "equal"):
        assert text in parsed.text
    marks = [(mark.x, mark.kind) for mark in run.marks]
    assert [x for x, kind in marks if kind == "checkpoint"] == [5, 10, 15, 20]


def test_the_tensorboard_files_give_evaluations_utilization_and_restarts(tmp_path: Path) -> None:
    write_rows(tmp_path / "metrics.jsonl", [row(number) for number in range(1, 9)])
    folder = str(tmp_path / "tensorboard")
    for purge_step, steps in ((1, range(1, 7)), (5, range(5, 9))):
        file = ScalarFile(folder, purge_step=purge_step)
        for step in steps:
            file.add_scalar("MFU", 10.0 * purge_step + step, step)
            if step % 2 == 0:
                file.add_scalar("lm loss validation", float(step), step)
        file.close()
    run = read(tmp_path)
    assert run.columns["MFU"] == [11.0, 12.0, 13.0, 14.0, 55.0, 56.0, 57.0, 58.0]
    assert run.evaluations == {"validation": {2: 2.0, 4: 4.0, 6: 6.0, 8: 8.0}}
    assert [(mark.x, mark.kind) for mark in run.marks] == [(4, "restart")]
    parsed = Parsed(run_page(run))
    (loss,) = [
        chart
        for chart in parsed.data["charts"]["charts"].values()
        if len(chart["y"]) == 2 and chart["unit"] == "nats/token"
    ]
    assert loss["y"][1] == [None, 2.0, None, 4.0, None, 6.0, None, 8.0]


def test_a_cut_event_file_gives_the_events_before_the_cut(tmp_path: Path) -> None:
    file = ScalarFile(str(tmp_path), purge_step=1)
    for step in (1, 2, 3):
        file.add_scalar("MFU", step / 2, step)
    file.close()
    data = next(tmp_path.iterdir()).read_bytes()
    whole = list(read_events(data))
    assert whole == [SessionStart(1)] + [Scalar("MFU", step, step / 2) for step in (1, 2, 3)]
    for length in range(len(data)):
        found = list(read_events(data[:length]))
        assert found == whole[: len(found)]


@pytest.mark.parametrize(
    "event", [b"\x0f\xff\xff", b"\x2a\x7f", b"\x80", b"\x09\x00", b"\xff" * 12], ids=bytes.hex
)
def test_a_record_that_is_no_event_is_an_error(event: bytes, tmp_path: Path) -> None:
    data = struct.pack("<Q", len(event)) + b"sum1" + event + b"sum2"
    with pytest.raises(ValueError, match="not an event file"):
        list(read_events(data))
    write_rows(tmp_path / "metrics.jsonl", [row(1)])
    (tmp_path / "events.out.tfevents.1").write_bytes(data)
    (notice,) = read(tmp_path).notices
    assert notice.startswith("events.out.tfevents.1: not an event file")


def test_the_log_gives_what_the_metrics_lack(tmp_path: Path) -> None:
    write_rows(tmp_path / "metrics.jsonl", [row(number) for number in range(1, 31)])
    line = (
        " [2026-01-01 00:00:00] iteration {:8d}/      40 | consumed samples: 4 | MFU: {:.1f}% | "
        "HFU: 50.1% | peak GiB: 1.25 | ETA: 0:00:01 |\n"
    )
    (tmp_path / "train.log").write_text(
        line.format(10, 40.5)
        + " validation loss at iteration 10 | lm loss value: 5.000000E+00 | lm loss PPL: 1E+02 | \n"
        + "saving checkpoint at iteration      10 to ckpt\n"
        + line.format(20, 41.5)
        + " validation loss at iteration 20 | lm loss value: 9.000000E+00 | lm loss PPL: 1E+02 | \n"
        + "loaded the checkpoint of iteration 10 from ckpt\n"
        + line.format(20, 42.5)
        + "warning: the clock is late\n"
        + "exiting at iteration 30: --exit-interval 30\n"
    )
    run = read(tmp_path)
    assert run.num_iterations == 40
    assert [value for value in run.columns["MFU"] if value is not None] == [40.5, 42.5]
    assert run.evaluations == {"validation": {10: 5.0}}  # the other one is of the course left
    assert [(mark.x, mark.kind) for mark in run.marks] == [
        (10, "checkpoint"),
        (10, "restart"),
        (20, "warning"),
        (30, "end"),
    ]
    assert "The run is at iteration 30 of 40." in Parsed(run_page(run)).text


def test_the_patterns_match_the_lines_that_a_run_prints(
    real_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of its log file, and the short ones of the terminal."""
    config = tiny_run(training=dict(eval_interval=5), metrics=tmp_path / "metrics.jsonl")
    save = str(tmp_path / "checkpoints")
    with_peak = replace(config.logging, peak_tflops_per_gpu=1e-3)
    for train_iters, load in ((20, str(real_run / "checkpoints")), (25, save)):
        training = replace(config.training, train_iters=train_iters)
        run_to_end(
            with_checkpoint(
                replace(config, training=training, logging=with_peak), save=save, load=load
            )
        )
    (tmp_path / "terminal.log").write_text(capsys.readouterr().out)
    write_rows(tmp_path / "metrics.jsonl", [row(number) for number in range(1, 26)])
    for log in (tmp_path / "terminal.log", tmp_path / "checkpoints" / "train.log"):
        run = read(tmp_path / "metrics.jsonl", log)
        assert run.num_iterations == 25
        assert [set(run.evaluations[name]) for name in ("validation", "test")] == [{20, 25}] * 2
        assert len(run.finite("MFU")) == 1
        assert len(run.finite("peak GiB")) == (log.name == "train.log")
        kinds = {(mark.x, mark.kind) for mark in run.marks}
        assert {(20, "restart"), (25, "checkpoint")} <= kinds


def test_two_logs_of_one_run_tell_of_an_event_once(tmp_path: Path) -> None:
    write_rows(tmp_path / "metrics.jsonl", [row(number) for number in range(1, 9)])
    for name, line in (
        ("train.log", " [2026-01-01 00:00:00] iteration        5/      40 | MFU: 40.5% | \n"),
        ("terminal.log", "     5/40    1,000.0      40.5%   4.1000\n"),
    ):
        (tmp_path / name).write_text(f"{line}warning: late\nexiting at iteration 8: a signal\n")
    run = read(tmp_path)
    assert [(mark.x, mark.kind) for mark in run.marks] == [(5, "warning"), (8, "end")]
    assert run.finite("MFU") == [40.5]


def test_skipped_updates_are_marks_with_their_reasons(tmp_path: Path) -> None:
    rows = [row(number) for number in range(1, 11)]
    rows[3] |= {"skipped": 1}
    rows[7] |= {"skipped": 1, "nan": 1, "lm_loss": None}
    write_rows(tmp_path / "metrics.jsonl", rows)
    write_rows(
        tmp_path / "save" / "skipped_batches.jsonl",
        [
            {
                "iteration": 4,
                "reason": "spike",
                "lm_loss": 6.0,
                "mean_loss": 3.0,
                "first_sample": 12,
                "num_samples": 4,
                "found_on": "",
            },
            {"iteration": 8, "reason": "not finite", "found_on": "rank 3: its loss"},
        ],
    )
    run = read(tmp_path)
    assert [(mark.x, mark.kind, mark.text) for mark in run.marks] == [
        (
            4,
            "skipped",
            "skipped update: spike, lm loss 6.0000 is 2.00 x its running mean, samples 12 to 15",
        ),
        (8, "skipped", "skipped update: not finite, not finite on rank 3: its loss"),
    ]
    parsed = Parsed(run_page(run))
    assert "2.00 x its running mean" in parsed.text
    assert [mark[0] for mark in parsed.data["charts"]["marks"]["run"]] == [4, 8]


def test_a_file_that_a_restart_has_left_gives_the_place_of_the_restart(tmp_path: Path) -> None:
    write_rows(tmp_path / "metrics.jsonl.previous", [row(number) for number in range(1, 9)])
    later = [row(number, iteration_ms=7.0 + number) for number in range(6, 11)]
    write_rows(tmp_path / "metrics.jsonl", [row(number) for number in range(1, 6)] + later)
    assert [(mark.x, mark.kind) for mark in read(tmp_path).marks] == [(5, "restart")]


def test_rows_that_are_written_again_replace_the_earlier_ones(tmp_path: Path) -> None:
    first = [row(number) for number in range(1, 9)]
    again = [row(number, lm_loss=1.0) for number in range(5, 7)]
    write_rows(tmp_path / "metrics.jsonl", first + again)
    run = read(tmp_path)
    assert run.iterations == [1, 2, 3, 4, 5, 6]
    assert run.columns["lm_loss"][4:] == [1.0, 1.0]
    assert [(mark.x, mark.kind) for mark in run.marks] == [(4, "restart")]


def test_predictions_are_compared_with_what_was_measured(tmp_path: Path) -> None:
    rows = [
        row(
            number,
            peak_bytes_predicted=3 * 2**30,
            peak_bytes_measured=3 * 2**30 - (number % 2) * 2**20,
            iteration_ms_predicted=50.5,
            activation_bytes_predicted=2**20,
            activation_bytes_measured=2**20,
            dreams_per_row=number * 0.5,
        )
        for number in range(1, 12)
    ]
    write_rows(tmp_path / "metrics.jsonl", rows)
    parsed = Parsed(run_page(read(tmp_path)))
    for text in (
        "peak of a step",
        "iteration time",
        "2.999 GiB",
        "3 GiB",
        "+0.03 %",
        "-50.00 %",
        "equal",
        "1 MiB",
    ):
        assert text in parsed.text, text
    columns = [y for chart in parsed.data["charts"]["charts"].values() for y in chart["y"]]
    assert [3.0] * 11 in columns and [0.5 * number for number in range(1, 12)] in columns
    assert [50.5] * 11 in columns


def test_the_summary_of_a_run_gives_its_predictions(tmp_path: Path) -> None:
    summary = RunSummary(
        peak_bytes_predicted=300 * 2**20,
        peak_bytes_measured=299 * 2**20,
        step_ms_predicted=None,
        step_ms_measured=12.5,
        machine=None,
    )
    metrics = write_rows(tmp_path / "metrics.jsonl", [row(1), row(2)])
    write_summary(summary, str(metrics))
    run = read(tmp_path)
    assert run.summary == {
        "peak_bytes_predicted": 300 * 2**20,
        "peak_bytes_measured": 299 * 2**20,
        "step_ms_measured": 12.5,
    }
    (found,) = [one for one in predictions(run) if one.name == "peak of a step"]
    assert found.last == (300 * 2**20, 299 * 2**20)
    (tmp_path / "metrics.jsonl.summary.json").write_text('{"peak_bytes_predicted": NaN, ')
    assert "metrics.jsonl.summary.json is no summary of a run" in read(tmp_path).notices


def test_hostile_names_are_text(tmp_path: Path) -> None:
    folder = tmp_path / HOSTILE.replace("/", "_")
    rows = [row(number, **{HOSTILE: number / 3}) for number in range(1, 6)]
    rows[2] |= {"skipped": 1}
    write_rows(folder / "metrics.jsonl", rows)
    write_rows(
        folder / "skipped_batches.jsonl",
        [{"iteration": 3, "reason": HOSTILE, "found_on": HOSTILE * 1000}],
    )
    (folder / "x.log").write_text(f"warning: {HOSTILE}\nexiting at iteration 4: {HOSTILE}\n")
    page = run_page(read(folder))
    parsed = Parsed(page)
    assert parsed.faults == [] and len(parsed.scripts) == 1 and "alert(" not in parsed.scripts[0]
    assert not [tag for tag, _ in parsed.tags if tag == "img"]
    assert not [key for _, attributes in parsed.tags for key in attributes if key.startswith("on")]
    assert parsed.text.count("alert(1)") >= 4 and "\u202e" not in page


def test_the_policy_of_the_page_allows_its_own_script_and_no_request(real_run: Path) -> None:
    page = run_page(read(real_run))
    parsed = Parsed(page)
    policy = next(
        str(attributes["content"])
        for tag, attributes in parsed.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    digest = base64.b64encode(hashlib.sha256(parsed.scripts[0].encode()).digest()).decode()
    assert "default-src 'none'" in policy and f"script-src 'sha256-{digest}'" in policy
    links = [
        value
        for _, attributes in parsed.tags
        for key, value in attributes.items()
        if key in ("src", "href", "action")
    ]
    assert links == ["data:,"] and not re.search(r"https?://|@import|url\(", page)


def test_a_long_run_keeps_its_extremes_and_a_small_page(tmp_path: Path) -> None:
    rows = [row(number) for number in range(1, 20_001)]
    rows[7_777] |= {"grad_norm": 123.5}
    rows[12_345] |= {"lm_loss": None, "skipped": 1, "nan": 1}
    for values in rows[15_000:15_400]:
        values |= {"skipped": 1}
    write_rows(tmp_path / "metrics.jsonl", rows)
    page = run_page(read(tmp_path))
    assert len(page) < 300_000
    parsed = Parsed(page)
    charts = parsed.data["charts"]["charts"].values()
    assert all(len(chart["x"]) <= 1.5 * MOST_POINTS for chart in charts)
    assert any(123.5 in column for chart in charts for column in chart["y"])
    assert any(
        chart["x"][column.index(None)] == 12_346
        for chart in charts
        for column in chart["y"]
        if None in column
    )
    assert "skipped update: 401" in parsed.text and "are not listed" in parsed.text


def test_thinning_keeps_the_smallest_and_the_largest_value_of_each_stretch() -> None:
    values = [float((17 * place) % 1009) for place in range(5000)]
    chart = LineChart(title="t", xs=range(5000), series=[Series(name="s", values=values)])
    xs, (kept,) = chart.thinned()
    assert xs == sorted(set(xs)) and kept == [values[x] for x in xs]
    assert {0, 4999} <= set(xs) and len(xs) <= MOST_POINTS
    length = 2 * 5000 // (MOST_POINTS - 2) + 1  # of a stretch, rounded up
    for start in range(0, 5000, 7):
        near = [
            value
            for x, value in zip(xs, kept, strict=True)
            if start - length <= x <= start + 2 * length
        ]
        window = values[start : start + length]
        assert max(near) >= max(window) and min(near) <= min(window)  # type: ignore[type-var]


def test_the_running_mean_is_over_the_last_values_and_skips_gaps() -> None:
    values = [None, 2.0, 0.0, None, 4.0, 6.0, None, None, None]
    assert running_mean(values, 3) == [None, 2.0, 1.0, 1.0, 2.0, 5.0, 5.0, 6.0, None]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (3e-4, "0.0003"), (1e-9, "1.000e-09"), (1234567.0, "1,234,567"), (-2.5, "-2.5")],
)
def test_a_number_has_four_significant_digits(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 1), (-3, 7.5), (0.1, 0.1001), (5e9, 7e9), (1, 2e4), (51, 104), (0.02, 9), (1e-9, 1e9)],
)
def test_an_axis_has_a_few_round_ticks_within_it(low: float, high: float) -> None:
    for scale in (AxisRange(low, high), *([AxisRange(low, high, is_log=True)] if low > 0 else [])):
        labels = scale.labels()
        assert 2 <= len(labels) <= 7 and len({text for _, text in labels}) == len(labels)
        assert all(low - 1e-9 <= tick <= high + 1e-9 for tick, _ in labels)
        assert [scale.place(low), scale.place(high)] == [0.0, 1.0]


def test_the_ticks_of_very_large_and_very_small_values_are_short() -> None:
    for low, high in ((1.0, 1e30), (1e-30, 1e-3), (0.0, 1e20), (0.0, 3e-6)):
        texts = [text for _, text in AxisRange.around([low, high]).labels()]
        assert len(texts) >= 2 and max(map(len, texts)) <= 7, texts
    assert [short(value) for value in (1e18, -2.5e-5, 0.0, 1e6)] == ["1e18", "-2.5e-5", "0", "1M"]


def test_the_report_imports_neither_torch_nor_numpy(tmp_path: Path) -> None:
    write_rows(tmp_path / "metrics.jsonl", [row(1)])
    code = (
        "import sys; from megatron_lite.tools.report import main; "
        f"status = main([{str(tmp_path)!r}]); sys.exit(status or 'torch' in sys.modules or "
        "'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=HANG_S).returncode == 0


def test_settings_that_follow_from_others_are_not_listed() -> None:
    config = tiny_run(model=dict(swiglu=True))
    flags = {setting.flag: setting.value for setting in changed_settings(config)}
    assert flags["--swiglu"] == "yes" and flags["--hidden-size"] == "32"
    assert "--ffn-hidden-size" not in flags and "--kv-channels" not in flags
    assert "--attention-dropout" not in flags


def test_numbers_that_equal_true_or_false_are_shown_as_numbers() -> None:
    config = tiny_run(model=dict(hidden_dropout=0.0, norm_epsilon=1.0))
    shown = {one.flag: (one.value, one.default) for one in changed_settings(config)}
    assert shown["--hidden-dropout"] == ("0.0", "0.1")
    assert shown["--norm-epsilon"] == ("1.0", "1e-05")
    config = replace(config, parallel=replace(config.parallel, tensor_model_parallel_size=2))
    shown = {one.flag: (one.value, one.default) for one in changed_settings(config)}
    assert shown["--tensor-model-parallel-size"] == ("2", "1")


def test_a_difference_that_is_not_zero_does_not_read_as_zero(tmp_path: Path) -> None:
    values = dict(peak_bytes_predicted=2**30 - 1, peak_bytes_measured=2**30)
    write_rows(tmp_path / "metrics.jsonl", [row(number, **values) for number in (1, 2)])
    assert "- under 0.01 %" in Parsed(run_page(read(tmp_path))).text


def test_a_prediction_that_comes_true_stays_visible_under_the_measured_curve(
    tmp_path: Path,
) -> None:
    rows = [row(one, peak_bytes_predicted=one, peak_bytes_measured=one) for one in (1, 2)]
    write_rows(tmp_path / "metrics.jsonl", rows)
    (chart,) = [one for one in charts_of(read(tmp_path)) if "peak" in one.title]
    assert [series.style for series in chart.series] == ["wide", "line"]


FAULTS = {
    "missing": (None, "no such file or directory"),
    "empty folder": ({}, "no metrics of a run"),
    "garbled": ({"metrics.jsonl": b"\x00\xff{{{" * 50}, "no metrics of a run"),
    "an empty file": ({"metrics.jsonl": b""}, "no metrics of a run"),
    "a deep object": ({"metrics.jsonl": b'{"a":' * 100_000}, "no metrics of a run"),
    "two runs": (
        {name: json.dumps(row(1)).encode() + b"\n" for name in ("a.jsonl", "b.jsonl")},
        "the metrics of several runs",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_folder_that_is_no_run_is_one_clear_error(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, message = FAULTS[name]
    folder = tmp_path / "run"
    if files is not None:
        folder.mkdir()
        for file, content in files.items():
            (folder / file).write_bytes(content)
    assert report.main([str(folder)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(ERROR) and message in err and err.count("\n") == 1
    assert "Traceback" not in err and not (folder / "report.html").exists()


def test_rows_that_are_garbled_are_counted_and_numbers_that_are_none_are_gaps(
    tmp_path: Path,
) -> None:
    good = [json.dumps(row(number)) for number in range(1, 5)]
    lines = [
        good[0],
        '{"iteration": 2, "lm_loss": 1e999, "grad_norm": "x", "huge": 1' + "0" * 400 + "}",
        '{"iteration": 3, "lm_loss": NaN}',
        '{"iteration": true, "lm_loss": 1.0}',
        "[1, 2]",
        good[3][:40],
        good[3],
        '{"iteration": 9, "lm',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    run = read(tmp_path)
    assert run.iterations == [1, 2, 4]
    assert run.columns["lm_loss"] == [pytest.approx(6 - 1 / 7), None, pytest.approx(6 - 4 / 7)]
    assert run.columns["grad_norm"] == [2.0, None, 1.25]
    assert run.notices == ["5 lines of metrics.jsonl are no rows of metrics: left out"]
    assert Parsed(run_page(run)).faults == []


def test_a_damaged_checkpoint_leaves_a_note(real_run: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "metrics.jsonl", [row(1)])
    step = tmp_path / "save" / "iter_0000005"
    step.mkdir(parents=True)
    (step / "config.json").write_text('{"model": 3}')
    (step / "metadata.json").write_text(
        (real_run / "checkpoints" / "iter_0000005" / "metadata.json").read_text()
    )
    run = read(tmp_path)
    assert run.config is None and "iter_0000005 cannot be read" in run.notices[0]
    assert "Settings" not in Parsed(run_page(run)).text


def test_the_output_is_named_after_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_rows(tmp_path / "metrics.jsonl", [row(1), row(2)])
    assert report.main([str(tmp_path)]) == 0 and (tmp_path / "report.html").exists()
    assert report.main([str(file)]) == 0 and (tmp_path / "metrics.jsonl.html").exists()
    assert report.main([str(file), "--output", str(tmp_path / "x.txt")]) == 2
    assert "must end in .html" in capsys.readouterr().err


@pytest.mark.long
@needs_chromium
def test_a_browser_shows_the_page_on_a_phone_without_errors(real_run: Path, tmp_path: Path) -> None:
    script = """(page) => {
      const plot = page.querySelector(".plot"), box = plot.getBoundingClientRect();
      const legend = plot.closest("figure").querySelector("[data-value]");
      const before = legend.textContent;
      plot.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left, clientY: box.top }));
      const at = legend.textContent, where = page.querySelector("[data-where]").textContent;
      plot.dispatchEvent(new PointerEvent("pointerleave"));
      plot.focus();
      plot.dispatchEvent(new KeyboardEvent("keydown", { key: "Home" }));
      const home = page.querySelector("[data-where]").textContent;
      const evaluated = [...plot.closest("figure").querySelectorAll("[data-value]")].at(-1);
      plot.dispatchEvent(new KeyboardEvent("keydown", { key: "End" }));
      plot.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft" }));
      return [before, at, where, home, evaluated.textContent];
    }"""
    run = read(real_run)
    run.evaluations.clear()
    run.evaluations["validation"] = {10: 3.5, 18: 2.5}
    seen = look(run_page(run), tmp_path, script=script)
    assert seen.width <= 375 and seen.wide == [] and seen.console == []
    before, at, where, home, evaluated = seen.answer
    assert evaluated == "2.5 nats/token (at 18)"
    first, last = run.columns["lm_loss"][0], run.columns["lm_loss"][-1]
    assert float(at.split()[0]) == pytest.approx(first, rel=1e-3)
    assert float(before.split()[0]) == pytest.approx(last, rel=1e-3)
    assert where == home == "iteration 1"


@pytest.mark.long
@needs_chromium
def test_the_look_at_a_page_sees_overflow_and_errors_in_the_console(tmp_path: Path) -> None:
    bad = "<!doctype html><div style='width:900px'>x</div><script>throw Error('no')</script>"
    seen = look(bad, tmp_path)
    assert seen.width >= 900 and len(seen.wide) == 1 and "no" in seen.console[0]


@pytest.mark.parametrize(
    "program", ["pretrain_gpt.py", "megatron-lite train", "python -m megatron_lite train"]
)
def test_an_error_in_a_log_is_found_whatever_the_program_was_called(program: str) -> None:
    facts = LogFacts()
    facts.read([f"{program}: error: the disk is full".encode(), f"{program} is no fault".encode()])
    assert list(facts.faults) == [(0, "the disk is full")]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("m.jsonl", '{"iteration": 9, "lm_loss": 1e308, "x": %s}' % ("9" * 400)),
        ("m.jsonl", '{"iteration": %s, "lm_loss": 1}' % ("9" * 400)),
        ("m.jsonl", '{"iteration": 9, "lm_loss": -1e308, "y_bytes": 5e-324, "y_predicted": 1e308}'),
        ("m.jsonl", '{"iteration": 9, "lm_loss": 1, "iteration_ms": 1e308, "grad_norm": 1e308}'),
        ("m.jsonl.summary.json", '{"a_predicted": %s, "b_predicted": 1e308}' % ("9" * 400)),
        ("train.log", "[x] iteration 3/ 9 | MFU: 1.2.3 | \n"),
        ("train.log", "       3/9   1.0  1.2.3% x"),
        ("train.log", "validation loss at iteration 3 | lm loss value: 1.0E+999 | "),
        ("skipped_batches.jsonl", '{"iteration": 3, "mean_loss": 1e-320, "lm_loss": 1e308}'),
    ],
)
def test_no_figure_of_a_file_ends_in_a_traceback(tmp_path: Path, name: str, content: str) -> None:
    write_rows(tmp_path / "m.jsonl", [row(number, lm_loss=1e308) for number in range(1, 99)])
    with (tmp_path / name).open("a") as file:
        file.write(content + "\n")
    assert report.main([str(tmp_path)]) == 0


def test_many_exits_restarts_and_starts_take_linear_time(tmp_path: Path) -> None:
    """A quadratic reader takes minutes."""
    write_rows(tmp_path / "m.jsonl", [row(number) for number in range(1, 9)])
    count = 20_000
    lines = [f"exiting at iteration {at}: reason {at}" for at in range(count)]
    lines += [f"[x] iteration {at:8}/ {count} | MFU: 12.3% | " for at in range(count, 0, -1)]
    lines += [f"loaded the checkpoint of iteration {count} from x"] * count
    (tmp_path / "train.log").write_text("\n".join(lines))
    file = ScalarFile(str(tmp_path / "tensorboard"), purge_step=1)
    for step in range(count):
        file.add_scalar("MFU", 1.0, step)
    file.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    first = path.read_bytes()
    begins = ScalarFile(str(tmp_path / "starts"), purge_step=count)
    begins.close()
    (start,) = (tmp_path / "starts").iterdir()
    path.write_bytes(first + start.read_bytes() * count)
    megabytes = sum(one.stat().st_size for one in tmp_path.rglob("*")) / 1e6
    began = time.process_time()
    assert report.main([str(tmp_path)]) == 0
    assert time.process_time() - began < 5.0 + megabytes
