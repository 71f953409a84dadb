"""Makes a page of a finished or running run, to look at in a browser:
`python -m megatron_lite.tools.report RUN_DIR [--output FILE.html]`

The page is one file. It shows the curves of the metrics, the run's events, and what was predicted
and measured. docs/training-logs.md describes it. The tool needs the extra `plot`, and no torch.
"""

import dataclasses
import os
import sys
from collections.abc import Sequence

from megatron_lite.config.checks import InputError
from megatron_lite.config.input_file import crafted
from megatron_lite.config.run_flags import Parser
from megatron_lite.data.durable_files import write_text
from megatron_lite.pages.run_page import RunRecord, read_run, run_page
from megatron_lite.plan.hardware import load_hardware, save_hardware
from megatron_lite.tools.command import check_ending, tool

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
        "for `plan --machine FILE.json`; if it exists, the run must have had --machine FILE.json",
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
    measured, predicted = (run.summary.get(f"step_ms_{one}") for one in ("measured", "predicted"))
    if not measured or not predicted:
        raise InputError(
            f"--calibration {file}: the run {run.name} has no predicted and measured step time: "
            "train it with --machine, and at least 3 steps"
        )
    exists = os.path.exists(file)
    known = load_hardware(file if exists else machine)
    # The run was predicted with the machine of its flags, which may be the file itself.
    pace = (known.pace if exists else 1.0) * measured / predicted
    band = LEAST_BAND if known.pace == 1.0 else max(LEAST_BAND, abs(pace / known.pace - 1.0))
    several = band if run.summary.get("num_ranks", 1) > 1 else max(band, known.band_of_several)
    found = dataclasses.replace(
        known,
        pace=pace,
        band=band,
        band_of_several=several,
        sources={**known.sources, "pace, band": f"the run {run.name}"},
    )
    save_hardware(found, file)
    print(f"{file}: a step takes {pace:.3f} of what {machine} predicts, +-{band:.0%}")


if __name__ == "__main__":
    sys.exit(main())
