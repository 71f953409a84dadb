"""Reads all that the page of a run shows, from the files that the run has written.

Other programs may have written or cut these files, so nothing of them is trusted: a value that is
no finite number is a gap, a line that is no row is counted, and sizes are bounded.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_lite.checkpointing.step_files import CONFIG, METADATA, MOST_ITERATIONS, STEP_NAME
from megatron_lite.config import plain
from megatron_lite.config.checks import InputError
from megatron_lite.config.input_file import input_size, read_input
from megatron_lite.config.run import RunConfig
from megatron_lite.pages.course import FigureCourse, figure
from megatron_lite.pages.event_file import Scalar, read_events
from megatron_lite.pages.line_chart import Mark
from megatron_lite.pages.markup import shortened
from megatron_lite.pages.run_files import RunFiles, is_metrics_row, lines_of, rows_of
from megatron_lite.pages.run_log import LogFacts

MOST_METRICS_BYTES = 2**29
MOST_LOG_BYTES = 2**28
MOST_EVENT_BYTES = 2**26
MOST_CONFIG_BYTES = 2**20
MOST_SUMMARY_BYTES = 2**16
SUMMARY = ".summary.json"  # training/run_summary.py
MOST_COLUMNS = 60
AXES = ("tp_size", "cp_size", "pp_size", "dp_size")
EVALUATIONS = {"lm loss validation": "validation", "lm loss test": "test"}
FIGURES = {"MFU": "MFU", "HFU": "HFU", "mem-peak-gib": "peak GiB"}


@dataclass
class RunRecord:
    """The figures and the events of a run.

    iterations: ascending. columns: by name one value for each of them; None where there is none.
    evaluations: by name ("validation", "test") the loss by iteration.
    marks: what happened, in the order of the iterations.
    summary: the figures of the whole run from the file beside the metrics, such as
        "peak_bytes_measured".
    config, axes: the settings and the sizes of the parallel axes, from the newest checkpoint.
    notices: what could not be read.
    written: when the metrics were last written, in seconds since 1970.
    """

    name: str
    iterations: list[int] = field(default_factory=list)
    columns: dict[str, list[float | None]] = field(default_factory=dict)
    evaluations: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    num_iterations: int | None = None
    summary: dict[str, float] = field(default_factory=dict)
    config: RunConfig | None = None
    axes: dict[str, int] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    written: float = 0.0

    def finite(self, name: str) -> list[float]:
        """Returns the values of a column that are numbers."""
        return [value for value in self.columns.get(name, ()) if value is not None]


def read_run(files: RunFiles) -> RunRecord:
    """Returns the record of a run. Raises InputError if its metrics cannot be read."""
    run = RunRecord(name=files.name)
    assert files.metrics is not None  # find_run found them
    run.written = files.metrics.stat().st_mtime
    rewritten = _read_metrics(files.metrics, run)
    run.summary = _summary(Path(f"{files.metrics}{SUMMARY}"), run)
    log = _read_logs(files, run)
    restarts = {*rewritten, *log.restarts, *_read_events(files, run, log)}
    restarts |= _abandoned(files, run)
    for name, series in log.figures.items():
        values = [series.get(iteration) for iteration in run.iterations]
        if name not in run.columns and any(value is not None for value in values):
            run.columns[name] = values
    run.evaluations = log.evaluations
    run.num_iterations = log.num_iterations
    _read_newest_step(files, run)
    run.marks = sorted(
        [*_skipped(files, run), *_events(files, log, restarts)], key=lambda mark: mark.x
    )
    return run


def _summary(path: Path, run: RunRecord) -> dict[str, float]:
    """Returns the finite numbers of a run's summary; none if there is no such file."""
    if not os.path.lexists(path):
        return {}
    text = read_input(path, MOST_SUMMARY_BYTES)
    try:
        values = plain.parse_object(text)
    except ValueError:
        run.notices.append(f"{path.name} is no summary of a run")
        return {}
    return {
        shortened(name, 60): number
        for name, value in list(values.items())[:MOST_COLUMNS]
        if type(value) is not bool and (number := figure(value)) is not None
    }


def _read_metrics(path: Path, run: RunRecord) -> list[int]:
    """Adds the rows of a metrics file. Returns the iterations from which rows were written again.

    A row whose iteration is not above the last one replaces that iteration and all later ones.
    """
    if input_size(path) > MOST_METRICS_BYTES:
        raise InputError(
            f"{path}: larger than {MOST_METRICS_BYTES >> 20} MiB: give a part of it, such as "
            "`tail -n 500000`"
        )
    rewritten, not_rows, left_out = [], 0, set()
    for row in rows_of(path):
        if row is None or not is_metrics_row(row):
            not_rows += 1
            continue
        iteration = row["iteration"]
        assert isinstance(iteration, int)
        if not 0 <= iteration <= MOST_ITERATIONS:
            not_rows += 1
            continue
        if run.iterations and iteration <= run.iterations[-1]:
            kept = bisect.bisect_left(run.iterations, iteration)
            rewritten.append(run.iterations[kept - 1] if kept else 0)
            del run.iterations[kept:]
            for values in run.columns.values():
                del values[kept:]
        for name, value in row.items():
            if name == "iteration":
                continue
            if name not in run.columns:
                if len(run.columns) >= MOST_COLUMNS or isinstance(value, (str, list, dict)):
                    left_out.add(name)
                    continue
                run.columns[name] = [None] * len(run.iterations)
            run.columns[name].append(figure(value))
        run.iterations.append(iteration)
        for values in run.columns.values():
            if len(values) < len(run.iterations):
                values.append(None)
    if not run.iterations:
        raise InputError(f"{path}: no line is a row of metrics")
    if not_rows:
        run.notices.append(f"{not_rows} lines of {path.name} are no rows of metrics: left out")
    if left_out:
        names = ", ".join(shortened(name, 40) for name in sorted(left_out)[:10])
        run.notices.append(f"columns of {path.name} that are left out: {names}")
    run.columns = {
        name: values
        for name, values in run.columns.items()
        if any(value is not None for value in values)
    }
    return rewritten


def _read_logs(files: RunFiles, run: RunRecord) -> LogFacts:
    facts = LogFacts()
    for path in files.logs:
        if input_size(path) > MOST_LOG_BYTES:
            run.notices.append(f"{path.name} is larger than {MOST_LOG_BYTES >> 20} MiB: left out")
            continue
        facts.read(lines_of(path))
    return facts


def _read_events(files: RunFiles, run: RunRecord, log: LogFacts) -> Iterator[int]:
    """Yields the iterations after which a start continued. Adds evaluations and figures to `log`.

    TensorBoard has a point for each iteration, the log only for each interval. So its points
    replace those of the log.
    """
    evaluations: dict[str, FigureCourse] = {}
    figures: dict[str, FigureCourse] = {}
    for path in files.events:
        if input_size(path) > MOST_EVENT_BYTES:
            run.notices.append(f"{path.name}: larger than {MOST_EVENT_BYTES >> 20} MiB: left out")
            continue
        data = read_input(path, MOST_EVENT_BYTES)
        try:
            for event in read_events(data):
                if event.step > MOST_ITERATIONS:
                    continue
                if isinstance(event, Scalar):
                    for names, into in ((EVALUATIONS, evaluations), (FIGURES, figures)):
                        value = figure(event.value)
                        if event.tag in names and value is not None:
                            into.setdefault(names[event.tag], FigureCourse())[event.step] = value
                    continue
                # A start: the points that earlier starts wrote from its step on do not count.
                for series in (*evaluations.values(), *figures.values()):
                    series.forget_after(event.step - 1)
                if event.step > 1:
                    yield event.step - 1
        except ValueError as error:
            run.notices.append(f"{path.name}: {error}: left out")
    for name, series in evaluations.items():
        log.evaluations.setdefault(name, FigureCourse()).update(series)
    log.figures.update(figures)


def _abandoned(files: RunFiles, run: RunRecord) -> set[int]:
    """Returns the iterations after which the rows differ from an earlier version of the file.

    MetricsFile keeps that version as FILE.previous if a restart drops rows.
    """
    found: set[int] = set()
    times = dict(zip(run.iterations, run.columns.get("iteration_ms", ()), strict=False))
    for path in files.previous:
        if input_size(path) > MOST_METRICS_BYTES:
            continue
        last = None
        for row in rows_of(path):
            if row is None or not is_metrics_row(row):
                continue
            iteration = row["iteration"]
            assert isinstance(iteration, int)
            if times.get(iteration) != figure(row.get("iteration_ms")):
                if last is not None:
                    found.add(last)
                break
            last = iteration
    return found


def _read_newest_step(files: RunFiles, run: RunRecord) -> None:
    """Reads the settings and the sizes of the parallel axes of the newest checkpoint."""
    if not files.steps:
        return
    step = files.steps[-1]
    if not all(os.path.lexists(step / name) for name in (CONFIG, METADATA)):
        run.notices.append(f"{step.name} has no {CONFIG} and {METADATA}")
        return
    text, metadata = (read_input(step / name, MOST_CONFIG_BYTES) for name in (CONFIG, METADATA))
    try:
        values = plain.parse_object(metadata)
        run.axes = {axis: plain.whole(values, axis, 1, 2**20) for axis in AXES}
        run.config = RunConfig.from_json(text.decode())
        run.num_iterations = run.num_iterations or run.config.training.train_iters
    except (ValueError, OverflowError, RecursionError) as error:
        run.notices.append(
            f"the settings of {step.name} cannot be read: {shortened(str(error), 200)}"
        )


def _skipped(files: RunFiles, run: RunRecord) -> Iterator[Mark]:
    """Yields a mark for each skipped update, with its reason if the run has written it."""
    reasons: dict[int, str] = {}
    for row in rows_of(files.skipped) if files.skipped is not None else ():
        if row is not None and type(row.get("iteration")) is int:
            reasons[row["iteration"]] = _reason(row)  # type: ignore[index]
    nan = run.columns.get("nan", ())
    skipped = run.columns.get("skipped", ())
    for place, iteration in enumerate(run.iterations):
        if place < len(skipped) and skipped[place]:
            reason = reasons.get(iteration, "the reason is in skipped_batches.jsonl of --save")
            yield Mark(x=iteration, kind="skipped", text=f"skipped update: {reason}")
        elif place < len(nan) and nan[place]:
            yield Mark(x=iteration, kind="skipped", text="the loss is NaN or infinite")


def _reason(row: dict[str, object]) -> str:
    text = str(row.get("reason"))
    mean, loss = figure(row.get("mean_loss")), figure(row.get("lm_loss"))
    if mean and loss:
        text += f", lm loss {loss:.4f} is {loss / mean:.2f} x its running mean"
    if row.get("found_on"):
        text += f", not finite on {row['found_on']}"
    first, count = row.get("first_sample"), row.get("num_samples")
    if type(first) is int and type(count) is int:
        text += f", samples {first} to {first + count - 1}"
    return shortened(text)


def _events(files: RunFiles, log: LogFacts, restarts: set[int]) -> Iterator[Mark]:
    names = (STEP_NAME.fullmatch(step.name) for step in files.steps)
    present = {int(name[1]) for name in names if name is not None}
    for iteration in sorted({*present, *log.saved}):
        gone = files.steps and iteration not in present
        text = "checkpoint, deleted since" if gone else "checkpoint"
        yield Mark(x=iteration, kind="checkpoint", text=text)
    for iteration in sorted(restarts):
        text = f"restart: the run continues from iteration {iteration}"
        yield Mark(x=iteration, kind="restart", text=text)
    for iteration, text in log.exits:
        yield Mark(x=iteration, kind="end", text=f"exit: {text}")
    for iteration, text in log.faults:
        yield Mark(x=iteration, kind="warning", text=text)
