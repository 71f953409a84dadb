"""The page of a run shows what the files say, escapes every text, and survives garbled files."""

import json
import math
import sys
from pathlib import Path

import pytest

from megatron_lite.plan.hardware import load_hardware
from megatron_lite.tools import report
from megatron_lite.tools.report import read_run, run_figure, run_page
from tests.support.commands import fault_of
from tests.support.parsed_page import ParsedPage
from tests.support.runs import run_to_end, tiny_run

ERROR = "python -m megatron_lite.tools.report: error: "
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u202e$x_$"
PLOTTED = ("lm_loss", "grad_norm", "learning_rate", "tokens_per_second", "iteration_ms")


def row(iteration, **values):
    return {
        "iteration": iteration,
        "consumed_samples": 4 * iteration,
        "lm_loss": 6.0 - iteration / 7,
        "grad_norm": 1.0 + 1 / iteration,
        "learning_rate": 1e-3 / iteration,
        "iteration_ms": 100.0 + iteration % 3,
        "tokens_per_second": 640.0 + iteration,
        **values,
    }


def write_rows(path, rows):
    path.write_text("".join(json.dumps(values) + "\n" for values in rows))
    return path


def read(*paths):
    return read_run([str(path) for path in paths])


def curves(run):
    """The points of all lines that matplotlib draws, but those of events."""
    return [
        (list(line.get_xdata()), list(line.get_ydata()))
        for axis in run_figure(run).axes
        for line in axis.lines
        if line.get_gid() is None
    ]


@pytest.fixture(scope="module")
def real_run(tmp_path_factory):
    """A run of 20 iterations with checkpoints, evaluations and a restart after 10 iterations."""
    folder = tmp_path_factory.mktemp("real") / "run"
    save = folder / "checkpoints"
    for load in (None, save):
        run_to_end(
            tiny_run(
                eval_interval=5,
                exit_interval=10,
                metrics=folder / "metrics.jsonl",
                peak_tflops_per_gpu=1e-3,
                save=save,
                load=load,
                save_interval=5,
            )
        )
    return folder


def test_the_page_of_a_real_run_has_the_values_of_its_files(real_run):
    run = read(real_run)
    drawn = curves(run)
    rows = [json.loads(line) for line in (real_run / "metrics.jsonl").read_text().splitlines()]
    for name in PLOTTED:
        assert (list(range(1, 21)), [values[name] for values in rows]) in drawn, name
    assert run.logged.keys() == {"validation", "test"}
    assert list(run.points("validation")) == [5, 10, 15, 20]
    parsed = ParsedPage(run_page(run))
    assert parsed.faults == []
    assert f"{rows[-1]['lm_loss']:.4g}" in parsed.text


def test_the_log_gives_the_evaluations_and_the_metrics_the_events(tmp_path):
    numbers = [*range(1, 31), *range(11, 31)]
    write_rows(tmp_path / "metrics.jsonl", [row(one, skipped=one == 25) for one in numbers])
    line = " validation loss at iteration {} | lm loss value: {:.6E} | lm loss PPL: 1E+02 | \n"
    log = line.format(10, 5.0) + line.format(30, 3.0) + "started day hour on h after iteration 10\n"
    log += line.format(20, 9.0) + line.format(20, 4.0) + line.format(40, 2.0)
    for name in ("train.log", "copy.log"):
        (tmp_path / name).write_text(log)
    run = read(tmp_path)
    assert run.points("validation") == {10: 5.0, 20: 4.0}
    assert sorted(run.events) == [(10, "restart", ""), (25, "skipped", "")]


def test_predicted_and_measured_figures_are_on_the_page(tmp_path):
    kept = dict(activation_bytes_predicted=3 * 2**30, activation_bytes_measured=2**30)
    metrics = write_rows(tmp_path / "metrics.jsonl", [row(1, **kept), row(2, **kept)])
    summary = {"peak_bytes_predicted": 7 * 2**30, "peak_bytes_measured": 5 * 2**30}
    summary |= {"step_ms_predicted": None, "step_ms_measured": 12.5, "machine": None}
    Path(f"{metrics}.summary.json").write_text(json.dumps(summary))
    run = read(tmp_path)
    text = ParsedPage(run_page(run)).text
    assert all(words in text for words in ("3 GiB", "1 GiB", "7 GiB", "5 GiB", "12.5"))
    assert ([1, 2], [3.0, 3.0]) in curves(run) and ([1, 2], [1.0, 1.0]) in curves(run)
    (tmp_path / "metrics.jsonl.summary.json").write_text('{"peak_bytes_predicted": NaN, ')
    assert "metrics.jsonl.summary.json is no summary of a run" in read(tmp_path).notices


def test_hostile_texts_are_text(tmp_path):
    folder = tmp_path / HOSTILE.replace("/", "_")
    folder.mkdir()
    write_rows(folder / "metrics.jsonl", [row(one, **{HOSTILE: one / 3}) for one in range(1, 6)])
    page = run_page(read(folder))
    parsed = ParsedPage(page)
    assert parsed.faults == [] and "\u202e" not in page
    assert [tag for tag, _ in parsed.tags].count("img") == 1, "the picture of the curves"
    assert "alert(1)" in parsed.text
    policy = next(
        str(attributes["content"])
        for _, attributes in parsed.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert "default-src 'none'" in policy and "script" not in policy


@pytest.mark.parametrize(
    "files, message",
    [
        (None, "no such file or directory"),
        ({}, "no metrics of a run"),
        ({"metrics.jsonl": b"\x00\xff{{{" * 50}, "no metrics of a run"),
        ({"metrics.jsonl": b'{"a":' * 100_000}, "no metrics of a run"),
        (dict.fromkeys(("a.jsonl", "b.jsonl"), json.dumps(row(1)).encode()), "of several runs"),
    ],
)
def test_a_folder_that_is_no_run_is_one_clear_error(files, message, tmp_path):
    folder = tmp_path / "run"
    if files is not None:
        folder.mkdir()
        for file, content in files.items():
            (folder / file).write_bytes(content)
    error = fault_of(report.main, [str(folder)])
    assert error.startswith(ERROR) and message in error
    assert not (folder / "report.html").exists()


@pytest.mark.runs
@pytest.mark.parametrize("module", ["jinja2", "matplotlib"])
def test_a_missing_extra_is_one_clear_error(module, tmp_path, monkeypatch):
    write_rows(tmp_path / "metrics.jsonl", [row(1)])
    monkeypatch.setitem(sys.modules, module, None)
    error = fault_of(report.main, [str(tmp_path)])
    assert error.startswith(ERROR) and f"needs the package {module}" in error and "[plot]" in error
    assert not (tmp_path / "report.html").exists()


def test_rows_that_are_garbled_are_counted_and_numbers_that_are_none_are_gaps(tmp_path):
    good = [json.dumps(row(number)) for number in range(1, 5)]
    lines = [
        good[0],
        '{"iteration": 2, "lm_loss": 1e999, "grad_norm": "x"}',
        '{"iteration": 2, "huge": 1' + "0" * 400 + "}",
        '{"iteration": 3, "lm_loss": NaN}',
        '{"iteration": true, "lm_loss": 1.0}',
        "[1, 2]",
        good[3][:40],
        good[3],
        '{"iteration": 9, "lm',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    run = read(tmp_path)
    assert list(run.rows) == [1, 2, 4]
    assert list(run.points("lm_loss").values()) == [6 - 1 / 7, None, 6 - 4 / 7]
    assert list(run.points("grad_norm").values()) == [2.0, None, 1.25]
    assert run.notices == ["6 lines of metrics.jsonl are no rows of metrics: left out"]
    assert any(math.isnan(ys[1]) for _, ys in curves(run))
    assert ParsedPage(run_page(run)).faults == []


@pytest.mark.long
@pytest.mark.parametrize(
    "name, content",
    [
        ("m.jsonl", '{"iteration": 9, "lm_loss": 1e308, "grad_norm": %s}' % ("9" * 400)),
        ("m.jsonl.summary.json", '{"a_predicted": %s, "b_bytes_measured": 1e308}' % ("9" * 400)),
        ("train.log", "validation loss at iteration 3 | lm loss value: 1.0E+999 | "),
    ],
)
def test_no_figure_of_a_file_ends_in_a_traceback(tmp_path, name, content):
    write_rows(tmp_path / "m.jsonl", [row(number, lm_loss=1e308) for number in range(1, 99)])
    with (tmp_path / name).open("a") as file:
        file.write(content + "\n")
    assert report.main([str(tmp_path)]) == 0


def test_a_run_corrects_the_machine_that_predicted_it(tmp_path):
    metrics, here = write_rows(tmp_path / "metrics.jsonl", [row(1)]), str(tmp_path / "here.json")
    arguments, again = [str(tmp_path), "--calibration", "h100-80gb", here], (8, 1.1, 1.21, 0.1, 0.1)
    for ranks, pace, *expected in ((1, 1.0, 1.1, 0.05, 0.3), again, again):
        times = dict(step_ms_predicted=10.0, step_ms_measured=11.0, num_ranks=ranks, pace=pace)
        Path(f"{metrics}.summary.json").write_text(json.dumps(times))
        assert report.main(arguments) == 0
        found = load_hardware(here)
        assert [found.pace, found.band, found.band_of_several] == pytest.approx(expected)
    for wrong, words in ("pace", "pace must be in"), ("machine", "predicted for -1"):
        Path(f"{metrics}.summary.json").write_text(json.dumps(times | {wrong: -1}))
        assert words in fault_of(report.main, arguments)
