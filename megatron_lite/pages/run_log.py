"""Reads from the text log of a run what its metrics file does not have.

These are the evaluations, MFU and HFU, the peak memory, restarts, checkpoints, and the reason why
the run ended. The lines are those of training/logging.py, which has two styles: Megatron's lines
(iteration_line.py) in the log file, and the short rows of the terminal (short_line.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_lite.config.invocation import TRAINING
from megatron_lite.pages.course import FigureCourse, figure
from megatron_lite.pages.markup import shortened

ITERATION = re.compile(r"\] iteration +(\d{1,9})/ *(\d{1,9}) \|")
ROW = re.compile(r" *(\d{1,9})/(\d{1,9})  +[0-9,.]{1,20} ")  # a short row
FIGURE = re.compile(r"\| (MFU|HFU|peak GiB)[a-zA-Z0-9, ]{0,60}: (\d{1,9}(?:\.\d{1,9})?)%? ")
SHARE = re.compile(r" (\d{1,9}(?:\.\d{1,9})?)% ")  # the MFU of a short row
EVALUATION = re.compile(
    r"(validation|test) loss at iteration (\d{1,9})(?: \| lm loss value)?: "
    r"(\d{1,9}\.\d{1,9}(?:E[+-]\d{2,3})?) "
)
LOADED = re.compile(r"loaded the checkpoint of iteration (\d{1,9}) ")
SAVING = re.compile(r"saving checkpoint at iteration +(\d{1,9}) to ")
EXITING = re.compile(r"exiting at iteration (\d{1,9}): (.*)")
PROGRAM = "|".join(map(re.escape, TRAINING))
FAULT = re.compile(rf"(?:\[rank \d+\] )?(?:warning: |error: |(?:{PROGRAM}): (?:error: )?)(.*)")
MOST_FAULTS = 100


@dataclass
class LogFacts:
    """The facts of one or more logs.

    figures: by name ("MFU", "HFU", "peak GiB") the value of each logged iteration.
    evaluations: by name ("validation", "test") the loss at each iteration.
    exits, faults: pairs of an iteration and a text, each once although several logs of a run may
        have it. A fault has the iteration logged before it.
    num_iterations: the iterations of the whole run, or None.
    """

    figures: dict[str, FigureCourse] = field(default_factory=dict)
    evaluations: dict[str, FigureCourse] = field(default_factory=dict)
    restarts: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    exits: dict[tuple[int, str], None] = field(default_factory=dict)
    faults: dict[tuple[int, str], None] = field(default_factory=dict)
    num_iterations: int | None = None

    def read(self, lines: Iterable[bytes | None]) -> None:
        """Adds the facts of a log. Lines that say nothing about them do not count."""
        iteration = 0
        for line in lines:
            if line is None:
                continue
            text = line.decode(errors="replace").rstrip()
            if found := ITERATION.search(text):
                iteration, self.num_iterations = int(found[1]), int(found[2])
                for name, value in FIGURE.findall(text):
                    self.figures.setdefault(name, FigureCourse())[iteration] = float(value)
            elif found := ROW.match(text):
                iteration, self.num_iterations = int(found[1]), int(found[2])
                if share := SHARE.search(text):
                    self.figures.setdefault("MFU", FigureCourse())[iteration] = float(share[1])
            elif found := EVALUATION.search(text):
                if (loss := figure(float(found[3]))) is not None:
                    self.evaluations.setdefault(found[1], FigureCourse())[int(found[2])] = loss
            elif found := LOADED.match(text):
                iteration = int(found[1])
                self.restarts.append(iteration)
                for series in (*self.figures.values(), *self.evaluations.values()):
                    series.forget_after(iteration)
            elif found := SAVING.match(text):
                self.saved.append(int(found[1]))
            elif found := EXITING.match(text):
                self.exits[int(found[1]), shortened(found[2])] = None
            elif (found := FAULT.match(text)) and len(self.faults) < MOST_FAULTS:
                self.faults[iteration, shortened(found[1])] = None
