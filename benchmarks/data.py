"""Times the way from text to samples, and compares it with megatron-core's on the same files.

    preprocess      JSON lines of token ids into a .bin and .idx pair, in one process
    open            an .idx: ours checks every number and hashes the file, megatron-core maps it
    sample index    the order of documents and samples of one epoch
    load            samples in random order, from pages that are in memory
    blend index     the order in which a blend reads its datasets

In each round every engine does each row once, in a process of its own, which also gives the most
memory that the row adds. Mapped pages of files do not count.
"""

import multiprocessing
import os
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone may not be installed

from benchmarks.data_engines import OURS, tasks_of
from benchmarks.harness import (
    add_number,
    clock_of,
    in_rounds,
    new_report,
    parse_benchmark,
    plain_parser,
    publish,
    spread,
)


def measured(action, clock):
    """Runs the action in a fork. Returns its milliseconds and the most bytes of memory it added."""
    reader, writer = multiprocessing.Pipe(duplex=False)

    def run():
        kept = []
        writer.send(anonymous_bytes(os.getpid()))
        ms = clock.ms(lambda: kept.append(action()))
        writer.send((ms, anonymous_bytes(os.getpid())))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    writer.close()  # the fork has the only writing end: its death ends the wait
    before, most = reader.recv(), 0
    while not reader.poll(0.005):
        most = max(most, anonymous_bytes(process.pid))
    ms, last = reader.recv()
    process.join()
    return ms, max(most, last) - before


def anonymous_bytes(pid):
    """Returns the bytes of a process's memory without the pages of files."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def measure(task, repeats, clock):
    """Returns a row for each engine.

    per_second: how many of `unit` the engine does in a second, from the median of the rounds.
    ratio: its time over ours. peak_bytes: the most memory that it added, over the rounds.
    """
    actions = {name: partial(measured, action, clock) for name, action in task.actions.items()}
    found = {name: list(zip(*of, strict=True)) for name, of in in_rounds(actions, repeats).items()}
    return [
        dict(
            what=task.what,
            engine=name,
            unit=task.unit,
            ms=statistics.median(times),
            per_second=task.count / statistics.median(times) * 1000.0,
            ratio=spread(times, found[OURS][0]),
            peak_bytes=max(peaks),
            samples_ms=times,
        )
        for name, (times, peaks) in found.items()
    ]


def parse(argv):
    parser = plain_parser(__doc__, repeats=5)
    for flag, default, text in (
        ("--lines", 20_000, "documents to tokenize"),
        ("--documents", 10_000_000, "documents of the dataset"),
        ("--reads", 20_000, "samples to read"),
        ("--blend", 20_000_000, "samples of the blend"),
        ("--datasets", 10, "datasets of the blend"),
        ("--seq-length", 2048, "tokens of a sample"),
    ):
        add_number(parser, flag, default, text)
    parser.add_argument("--only", metavar="TEXT", help="rows whose name contains it")
    parser.add_argument("--directory", help="a folder for the files; default: a temporary one")
    parser.set_defaults(threads=1)  # each row runs in a fork
    return parse_benchmark(parser, argv)


def main(argv=None):
    """Runs the benchmark. Returns 0."""
    args = parse(argv)
    report, clock = new_report(args), clock_of(args)
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        for task in tasks_of(Path(folder), args):
            if (args.only or "") in task.what:
                publish(report, measure(task, args.repeats, clock), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
