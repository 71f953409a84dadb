"""Makes a page of a finished or running run, to look at in a browser:
`python -m megatron_lite.tools.report RUN_DIR [--output FILE.html]`

The page is one file. It shows the curves of the metrics, the run's events, and what was predicted
and measured. docs/training-logs.md describes it. The tool needs the extra `plot`, and no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megatron_lite.config.checks import InputError
from megatron_lite.config.input_file import crafted
from megatron_lite.config.parser import Parser
from megatron_lite.data.durable_files import replacing
from megatron_lite.pages.run_page import run_page
from megatron_lite.pages.run_record import read_run
from megatron_lite.tools.command import exit_status

PROGRAM = "python -m megatron_lite.tools.report"

DEFAULT_OUTPUT = "report.html"


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    parser = Parser(
        prog=program,
        allow_abbrev=False,
        description="Makes a page of a run: curves, events and predictions, in one file.",
    )
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
    args = parser.parse_args(argv)
    return exit_status(lambda: report(args.paths, args.output), program)


def report(paths: Sequence[str], output: str | None = None) -> None:
    """Writes the page of the run that these paths hold, and prints its name.

    Raises InputError if the paths hold no metrics, or those of several runs, and if the page cannot
    be written.
    """
    target = output or _default_output(paths[0])
    if os.path.splitext(target)[1] not in (".html", ".htm"):
        raise InputError(f"--output must end in .html or .htm (got {target!r})")
    with crafted(", ".join(paths)):
        text = run_page(read_run(paths))
    with replacing(target) as unfinished, open(unfinished, "w", encoding="utf-8") as file:
        file.write(text)
    print(target)


def _default_output(path: str) -> str:
    return os.path.join(path, DEFAULT_OUTPUT) if os.path.isdir(path) else f"{path}.html"


if __name__ == "__main__":
    sys.exit(main())
