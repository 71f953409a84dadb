"""Compares the time model with runs: those of this engine on an H100, and published ones.

No constant is fitted to a published run: the figures of a machine come from its data sheet, from
published microbenchmarks and from one H100 (megatron_lite/plan/machines/*.json). runs.json has the
runs, and for each source what its software does in another way than this engine. docs/planning.md
has the tables.
"""

import json
import statistics
import sys
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, ".")  # the root of the clone, which may not be installed

from megatron_lite.cli.flags import parse_args
from megatron_lite.config.setting import from_plain
from megatron_lite.plan.hardware import Hardware, completed, load_hardware
from megatron_lite.plan.step_time import OPTIMIZER, step_time

RUNS = Path(__file__).parent / "runs.json"
TRAINING = "--mock-data --lr 1e-4 --train-iters 10"


class Row(NamedTuple):
    """A run and its prediction. measured, predicted: seconds of a step. band: that of `plan`.

    outside: why the run is outside the band, if it is. Such a run does not count in a summary.
    """

    source: str
    kind: str
    name: str
    gpus: int
    measured: float
    predicted: float
    band: float
    outside: str = ""

    @property
    def error(self):
        """The relative error of the speed: above 0 the prediction is too fast."""
        return self.measured / self.predicted - 1.0


@cache
def rows(group):
    """Returns the rows. group: "measured", for those of this engine, or "published"."""
    runs = json.loads(RUNS.read_text(encoding="utf-8"))
    if group == "published":
        return [row for source in runs["published"] for row in _published(source)]
    own = runs["measured"]
    machine = _machine(own)
    found = []
    for run in own["rows"]:
        time = step_time(_config(run["flags"]), machine, 1)
        predicted = time.seconds + own["step_wait_s"]
        predicted -= time.terms[OPTIMIZER] if run.get("skips_update") else 0.0
        seconds = run["step_ms"] / 1000.0
        found.append(Row("this engine", run["kind"], run["name"], 1, seconds, predicted, time.band))
    return found


def _published(source):
    machine = _machine(source)
    for run in source["rows"]:
        found = []
        for size in run.get("micro_batch_sizes", [None]):
            words = f"{source['common']} {run['flags']}"
            words += f" --micro-batch-size {size}" if size else ""
            try:
                found.append(_row(source, run, words, machine))
            except ValueError:
                continue  # the batch does not divide into such micro-batches
        yield min(found, key=lambda row: row.predicted)


def _row(source, run, words, machine):
    config, gpus = _config(words), run["gpus"]
    length, batch = config.data.seq_length, config.training.global_batch_size or 1
    transfer_bytes = None
    if "micro_batch_sizes" in run:  # 2104.04473, section 4.1: ranks send a part each
        hidden = length * config.training.micro_batch_size * config.model.hidden_size * 2
        transfer_bytes = hidden // config.parallel.tensor_model_parallel_size
    measured = batch * length / run["tokens_per_second"]
    timed = partial(step_time, config, machine, gpus, transfer_bytes=transfer_bytes)
    time, alone = timed(), timed(sends=False).seconds
    predicted = alone + run.get("sent", 1.0) * (time.seconds - alone)
    return Row(
        source["source"],
        source["kind"],
        run["name"],
        gpus,
        measured / gpus,
        predicted,
        time.band,
        run.get("outside", ""),
    )


def _config(words):
    # Kernels were not compiled unless a run says so.
    return parse_args(f"--no-torch-compile {words} {TRAINING}".split()).config


def _machine(source):
    values = asdict(load_hardware(source["machine"]))
    return from_plain(Hardware, completed(source["changes"], values), "the machine")


def summary(found, by):
    """Yields a table of mean and worst errors, and of the rank correlation. by: source or kind."""
    yield f"| {by} | runs | mean error | worst | rank correlation |"
    yield "|---|---|---|---|---|"
    for name in dict.fromkeys(getattr(row, by) for row in found):
        own = [row for row in found if getattr(row, by) == name and not row.outside]
        errors = [row.error for row in own]
        mean, worst = statistics.mean(map(abs, errors)), max(errors, key=abs)
        ranks = "" if len(own) < 3 else f"{correlation(own):.2f}"
        yield f"| {name} | {len(own)} | {mean:.1%} | {worst:+.1%} | {ranks} |"


def correlation(found):
    """Returns the rank correlation of measured and predicted seconds."""

    def ranks(seconds):
        return [sorted(seconds).index(one) for one in seconds]

    return statistics.correlation(
        ranks([row.measured for row in found]), ranks([row.predicted for row in found])
    )


def table(found):
    """Yields the lines of the table of all runs."""
    yield "| run | source | GPUs | seconds | predicted | error | band |"
    yield "|---|---|---|---|---|---|---|"
    for row in found:
        yield (
            f"| {row.name} | {row.source} | {row.gpus} | {row.measured:.4g} | {row.predicted:.4g} "
            f"| {row.error:+.1%} | +-{row.band:.0%} {row.outside}|"
        )


if __name__ == "__main__":
    for group in ("measured", "published"):
        found = rows(group)
        for lines in (table(found), summary(found, "source"), summary(found, "kind")):
            print(*lines, "", sep="\n")
