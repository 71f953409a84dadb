"""Makes a page of a finished or running run, to look at in a browser:
`python -m megatron_lite.tools.report RUN_DIR [--output FILE.html]`

The page is one file. It shows the curves of the metrics, the run's events, and what was predicted
and measured. docs/training-logs.md describes it. The tool needs the extra `plot`, and no torch.

Other programs may have written or cut the metrics and the logs of a run, so nothing of them is
trusted: a value that is no finite number is a gap, a line that is no row is counted, and sizes are
bounded. Every reader takes linear time.
"""

import dataclasses
import itertools
import math
import os
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from megatron_lite.checkpointing.step_files import MOST_ITERATIONS
from megatron_lite.config.checks import InputError, Values, input_faults, parse_object, shown
from megatron_lite.config.input_file import crafted, input_size, open_input, read_input
from megatron_lite.config.run_flags import Parser
from megatron_lite.config.units import GIB
from megatron_lite.data.durable_files import write_text
from megatron_lite.pages.document import document, number, picture
from megatron_lite.plan.hardware import load_hardware, save_hardware

from .command import check_ending, tool

MOST_BYTES, MOST_SUMMARY_BYTES = 2**28, 2**16  # of the metrics and of each log; of the summary
LONGEST_LINE = 2**20
LARGEST, SMALLEST = 1e100, 1e-100  # sums and ratios of such figures stay finite
SKIPPED_BATCHES = "skipped_batches.jsonl"  # its rows look like those of the metrics
KEPT = ("activation_bytes_predicted", "activation_bytes_measured")
COLUMNS = (
    *("lm_loss", "grad_norm", "learning_rate", "tokens_per_second", "iteration_ms"),
    *("consumed_samples", "skipped", "nan", *KEPT),
)
EVALUATION = re.compile(
    r"(validation|test) loss at iteration (\d{1,9})(?: \| lm loss value)?: "
    r"(\d{1,9}\.\d{1,9}(?:E[+-]\d{2,3})?) "
)
STARTED = re.compile(r"started \S+ \S+ on \S+ after iteration (\d{1,9})\s")
Row = dict[str, float | None]


@dataclass
class RunRecord:
    """The figures and the events of a run.

    rows: by iteration, ascending, the values of COLUMNS. None is a gap.
    logged: by name ("validation", "test") the loss that the log has, by iteration.
    events: (iteration, kind, text) of each event.
    summary: the figures of the whole run from the file beside the metrics. machine: the name of the
        machine for which its time was predicted.
    notices: what could not be read. written: when the metrics were last written, since 1970.
    """

    name: str
    rows: dict[int, Row] = field(default_factory=dict)
    logged: dict[str, dict[int, float]] = field(default_factory=dict)
    events: dict[tuple[int, str, str], None] = field(default_factory=dict)
    summary: dict[str, float] = field(default_factory=dict)
    machine: str | None = None
    notices: list[str] = field(default_factory=list)
    written: float = 0.0

    def points(self, name: str) -> dict[int, float | None]:
        """Returns the values of a column, or the logged ones, by iteration."""
        if name in COLUMNS:
            return {at: row[name] for at, row in self.rows.items()}
        return dict(sorted(self.logged.get(name, {}).items()))

    def known(self, name: str) -> list[float]:
        """Returns those values that are numbers."""
        return [value for value in self.points(name).values() if value is not None]


def read_run(paths: Sequence[str]) -> RunRecord:
    """Returns the record of the run whose files are these paths, or lie in these folders.

    Raises InputError if a path does not exist, and if there are no metrics or those of several
    runs.
    """
    run = RunRecord(os.path.basename(os.path.abspath(paths[0])))
    metrics, logs = _metrics_and_logs(paths)
    run.written = metrics.stat().st_mtime
    _read_metrics(metrics, run)
    path = Path(f"{metrics}.summary.json")  # training/summary.py
    if os.path.lexists(path):
        try:
            values = parse_object(read_input(path, MOST_SUMMARY_BYTES))
        except ValueError:
            run.notices.append(f"{path.name} is no summary of a run")
        else:
            run.machine = values.get("machine")
            run.summary = {
                name: value
                for name, given in values.items()
                if (value := figure(given)) is not None
            }
    for log in logs:
        if input_size(log) > MOST_BYTES:
            run.notices.append(f"{log.name} is larger than {MOST_BYTES >> 20} MiB: left out")
            continue
        logged: dict[tuple[int, str], float] = {}
        for line in _lines(log):  # of several evaluations after one iteration the last counts
            text = line.decode(errors="replace")
            if started := STARTED.match(text):  # this start trains later iterations anew
                while logged and next(reversed(logged))[0] > int(started[1]):
                    logged.popitem()
            told = EVALUATION.search(text)
            if told and (loss := figure(float(told[3]))) is not None:
                logged[int(told[2]), told[1]] = loss
        for (at, name), loss in logged.items():
            if at <= next(reversed(run.rows)):
                run.logged.setdefault(name, {})[at] = loss
    for at, row in run.rows.items():
        if row["skipped"] or row["nan"]:
            run.events[at, "skipped", "the loss is NaN or infinite" if row["nan"] else ""] = None
    return run


def figure(value: object) -> float | None:
    """Returns a value if it is a number that a run may have, else None. true and false are 1 and
    0."""
    if isinstance(value, (int, float)) and abs(value) <= LARGEST:
        return float(value) if abs(value) >= SMALLEST else 0.0
    return None


def _metrics_and_logs(paths: Sequence[str]) -> tuple[Path, list[Path]]:
    named, metrics, logs = ", ".join(paths), set(), set()
    for path in map(Path, paths):
        if not path.exists():
            raise InputError(
                f"{path}: no such file or directory: give the folder of a run, or the file of its "
                "--metrics-jsonl"
            )
        for file in _files_under(path) if path.is_dir() else [path]:
            if file.suffix == ".log":
                logs.add(file)
            elif file.name != SKIPPED_BATCHES and any(itertools.islice(_rows(file), 100)):
                metrics.add(file)
    if not metrics:
        raise InputError(
            f"{named}: no metrics of a run: a run with --metrics-jsonl FILE writes them, one JSON "
            "object with an iteration and a lm_loss per line; give that file, or its folder"
        )
    if len(metrics) > 1:
        raise InputError(
            f"{named}: the metrics of several runs ({', '.join(map(str, sorted(metrics)[:4]))}): "
            "give one of these files, or the folder of one run"
        )
    return metrics.pop(), sorted(logs)


def _files_under(root: Path) -> Iterator[Path]:
    """Yields the logs and the files of rows at most three levels below a folder."""
    for pattern in ("*", "*/*", "*/*/*"):
        for file in root.glob(pattern):
            # Names that begin with a point are those of editors, such as links that lock a file.
            is_named = file.suffix in (".log", ".jsonl") and not file.name.startswith(".")
            if is_named and not file.is_dir():
                yield file


def _lines(path: Path) -> Iterator[bytes]:
    """Yields the lines that are not blank, each as far as its first LONGEST_LINE bytes."""
    with open_input(path) as file:
        while line := file.readline(LONGEST_LINE):
            if line.strip():
                yield line
            while line and not line.endswith(b"\n"):
                line = file.readline(LONGEST_LINE)


def _rows(path: Path) -> Iterator[Values | None]:
    """Yields the rows of a metrics file, and None for any other line."""
    for line in _lines(path):
        try:
            row = parse_object(line)
        except ValueError:
            row = {}
        iteration = row.get("iteration")
        is_row = type(iteration) is int and 0 <= iteration <= MOST_ITERATIONS and "lm_loss" in row
        yield row if is_row else None


def _read_metrics(path: Path, run: RunRecord) -> None:
    """Adds the rows. One that is not above the last one replaces that row and all later ones."""
    if input_size(path) > MOST_BYTES:
        raise InputError(
            f"{path}: larger than {MOST_BYTES >> 20} MiB: give a part of it, such as "
            "`tail -n 500000`"
        )
    last, not_rows = -1, 0
    for row in _rows(path):
        if row is None:
            not_rows += 1
            continue
        iteration = row["iteration"]
        if iteration <= last:
            while run.rows and last >= iteration:
                run.rows.popitem()
                last = next(reversed(run.rows), 0)
            run.events[last, "restart", ""] = None
        run.rows[iteration] = {name: figure(row.get(name)) for name in COLUMNS}
        last = iteration
    if not_rows:
        run.notices.append(f"{not_rows} lines of {path.name} are no rows of metrics: left out")


PANELS = (  # title, size of the unit, what it shows
    ("loss [nats per token]", 1.0, ("lm_loss", "validation", "test")),
    ("gradient norm before clipping", 1.0, ("grad_norm",)),
    ("tokens per second, all ranks", 1.0, ("tokens_per_second",)),
    ("time of an iteration [ms]", 1.0, ("iteration_ms",)),
    ("learning rate", 1.0, ("learning_rate",)),
    ("kept for backward by a micro-batch [GiB]", GIB, KEPT),
)
STYLES = {  # of events on the curves
    "skipped": dict(color="#EE6677", linestyle=":"),
    "restart": dict(color="#AA3377", linestyle="--"),
}
MOST_LISTED, MOST_ROWS = 200, 24


def run_page(run: RunRecord) -> str:
    """Returns the page of a run as an HTML document."""
    iterations, last = list(run.rows), len(run.rows) - 1
    places = sorted({place * last // (MOST_ROWS - 1) for place in range(MOST_ROWS)})
    return document(
        "run.html",
        f"Run {run.name}",
        run.notices,
        written=f"{datetime.fromtimestamp(run.written, timezone.utc):%Y-%m-%d %H:%M}",
        facts=list(_facts(run)),
        curves=picture(run_figure, run),
        events=sorted(run.events)[-MOST_LISTED:],
        num_events=len(run.events),
        names=[name for name in COLUMNS if run.known(name)],
        values={iterations[place]: run.rows[iterations[place]] for place in places},
        evaluations={
            name: dict([*run.points(name).items()][-MOST_LISTED:])
            for name in ("validation", "test")
        },
    )


def _facts(run: RunRecord) -> Iterator[tuple[str, str]]:
    yield "iterations", str(next(reversed(run.rows)))
    if losses := run.known("lm_loss"):
        yield "last loss", number(losses[-1])
    if evaluated := run.logged.get("validation"):
        best = min(evaluated, key=lambda at: evaluated[at])
        yield "best validation loss", f"{number(evaluated[best])} at iteration {best}"
    for name, word in (("tokens_per_second", "tokens per second"), ("iteration_ms", "iteration")):
        if found := run.known(name):
            unit = " ms" if name == "iteration_ms" else ""
            yield f"{word}, median", number(statistics.median(found)) + unit
    figures = {name: values[-1] for name in KEPT if (values := run.known(name))} | run.summary
    for name, value in figures.items():
        words = name.replace("_bytes", "").replace("_", " ")
        if name.endswith(("bytes_predicted", "bytes_measured")):
            yield words, f"{number(value / GIB)} GiB"
        elif name.endswith(("_predicted", "_measured")):
            yield words, number(value)
    for kind in STYLES:
        yield kind, str(sum(found == kind for _, found, _ in run.events))


def run_figure(run: RunRecord) -> Any:
    """Returns the matplotlib figure of the curves. A gap is a value that is no finite number."""
    from matplotlib.figure import Figure

    panels = [
        (title, size, curves)
        for title, size, names in PANELS
        if (curves := {name: run.points(name) for name in names if run.known(name)})
    ]
    rows = max(1, -(-len(panels) // 2))
    figure = Figure(figsize=(11, 2.4 * rows), layout="constrained")
    axes = figure.subplots(rows, 2, squeeze=False).flat
    for axis, (title, size, curves) in zip(axes, panels, strict=False):
        axis.set_title(title)
        for name, points in curves.items():
            ys = [math.nan if value is None else value / size for value in points.values()]
            dots = dict(marker="o", markersize=3) if name in run.logged or len(ys) == 1 else {}
            width = 3 if name in KEPT[:1] else 1  # stays visible below the measured bytes
            axis.plot([*points], ys, linewidth=width, label=name, **dots)
        if len(curves) > 1:
            axis.legend(frameon=False)
        for kind, style in STYLES.items():
            for at in sorted(at for at, found, _ in run.events if found == kind)[-MOST_LISTED:]:
                axis.axvline(at, linewidth=0.8, alpha=0.6, gid=kind, **style)
    return figure


DEFAULT_OUTPUT = "report.html"
LEAST_BAND = 0.05  # of a machine's times after a run, and the change from the run before if larger


def _add_flags(parser: Parser) -> None:
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="RUN",
        help="the folder of a run, which holds the file of --metrics-jsonl, or the files and "
        "folders themselves: metrics and *.log",
    )
    parser.add_argument(
        "--output",
        metavar="FILE.html",
        help=f"the page (default: {DEFAULT_OUTPUT} in the folder, or METRICS_FILE.html)",
    )
    parser.add_argument(
        "--calibration",
        nargs=2,
        metavar=("MACHINE", "FILE.json"),
        help="also write the machine MACHINE to FILE.json with what this run says about its times, "
        "for `plan --machine FILE.json`; if it exists, its figures are kept",
    )


main = tool(
    "python -m megatron_lite.tools.report",
    "Makes a page of a run: curves, events and predictions, in one file.",
    _add_flags,
    lambda args: report(**vars(args)),
)


def report(
    paths: Sequence[str], output: str | None = None, calibration: Sequence[str] | None = None
) -> None:
    """Writes the page of the run that these paths hold, and prints its name.

    calibration: a machine and the file in which it is written with the pace of this run.

    Raises InputError if the paths hold no metrics, or those of several runs, and if the page cannot
    be written.
    """
    page = os.path.join(paths[0], DEFAULT_OUTPUT) if os.path.isdir(paths[0]) else f"{paths[0]}.html"
    target = output or page
    check_ending("--output", target, ".html", ".htm")
    with crafted(", ".join(paths)):
        run = read_run(paths)
        text = run_page(run)
    if calibration:
        _calibrate(run, *calibration)
    write_text(target, text)
    print(target)


def _calibrate(run: RunRecord, machine: str, file: str) -> None:
    """Writes a machine whose pace is that of the run, and whose band has room for the run before.

    Raises InputError if the run's time was not predicted.
    """
    check_ending("--calibration", file, ".json")
    facts = {"step_ms_measured": 0.0, "step_ms_predicted": 0.0, "pace": 1.0, "num_ranks": 1.0}
    measured, predicted, pace, ranks = ({**facts, **run.summary}[name] for name in facts)
    if min(measured, predicted) <= 0.0:
        raise InputError(
            f"--calibration {file}: the run {run.name} has no predicted and measured step time: "
            "train it with --machine, and at least 3 steps"
        )
    known = load_hardware(machine)
    if run.machine not in (None, known.name):
        raise InputError(
            f"--calibration {machine}: the time of the run {run.name} was predicted for "
            f"{shown(str(run.machine))}: give that machine"
        )
    known = load_hardware(file) if os.path.exists(file) else known
    pace *= measured / predicted  # before, it is that of the machine of the run's flags
    band = LEAST_BAND if known.pace == 1.0 else max(LEAST_BAND, abs(pace / known.pace - 1.0))
    band = known.band if pace == known.pace else band  # the file has this run already
    several = band if ranks > 1 else max(band, known.band_of_several)
    with input_faults(f"--calibration {file}: by the run {run.name}, ", "; give another run"):
        found = dataclasses.replace(
            known,
            pace=pace,
            band=band,
            band_of_several=several,
            sources={**known.sources, "pace, band": f"the run {run.name}"},
        )
    save_hardware(found, file)
    print(f"{file}: a step takes {pace:.3f} of what {machine} predicts with pace 1, +-{band:.0%}")


if __name__ == "__main__":
    sys.exit(main())
