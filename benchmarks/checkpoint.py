"""Times saving and loading a checkpoint, beside the disk itself and other formats.

    disk               the same number of bytes as one file: written and synced; read
    megatron_lite      shards, checksums, manifest and pointer, each synced; checksums compared,
                       tensors read and copied
    safetensors        save_file and a sync; load_file
    torch              torch.save and a sync; torch.load(weights_only=True)
    torch DCP          torch.distributed.checkpoint with sync_files; load into the same tensors

In every round each is done once, in turn, and gives one ratio. Everything runs in one process. The
page cache is dropped before a read.
A second part times training steps: without saving, with one save after a quarter of them, and with
that save in the background.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone may not be installed

from benchmarks.checkpoint_engines import DISK, bench, forget_pages, loads, saves
from benchmarks.engines import DTYPES
from benchmarks.harness import (
    add_number,
    add_preset,
    clock_of,
    in_rounds,
    new_report,
    parse_benchmark,
    plain_parser,
    publish,
    spread,
)


def rows_of(what, samples, to):
    """Returns a row for each engine. to: the base of the ratio in each round, in ms: the disk's own
    time for "save" and "load", and one training step for "stall"."""
    return [
        dict(
            what=what,
            engine=name,
            ms=statistics.median(times),
            samples_ms=times,
            ratio=spread(times, to),
        )
        for name, times in samples.items()
    ]


def measure_files(one, clock, repeats, *, data):
    """Times saving and loading."""
    for name in (DISK, "safetensors", "torch", "dcp"):
        (one.folder / name).mkdir(parents=True)
    with one.saver() as save:
        saving = saves(one, save, iter(range(1, 10**6)), data)
        saved = in_rounds({name: partial(clock.ms, do) for name, do in saving.items()}, repeats)

    def cold(action):
        forget_pages(one.folder)
        return clock.ms(action)

    loaded = in_rounds({name: partial(cold, do) for name, do in loads(one).items()}, repeats)
    return [*rows_of("save", saved, saved[DISK]), *rows_of("load", loaded, loaded[DISK])]


def measure_stall(one, clock, repeats, *, steps):
    """Returns the time that one save adds to `steps` steps until it is durable, in steps.

    The row "waits" is the time of the call to `save` alone, which the log reports.
    """
    shutil.rmtree(one.directory, ignore_errors=True)
    iterations, waits = iter(range(1, 10**6)), []

    def stepped(save=None):
        saver = None
        for step in range(steps):
            one.step()
            if save is not None and step == steps // 4:
                before = time.perf_counter()
                saver = save(next(iterations))
                waits.append((time.perf_counter() - before) * 1000.0)
        if saver is not None:
            saver.wait()  # until it is durable

    def saved(*, async_save):
        """Returns the time of the steps with a save, and of the call to it."""
        with one.saver(async_save=async_save) as save:
            return clock.ms(partial(stepped, save)), waits[-1]

    ways = {"in the foreground": False, "in the background": True}
    saving = {name: partial(saved, async_save=is_async) for name, is_async in ways.items()}
    found = in_rounds({"alone": partial(clock.ms, stepped), **saving}, repeats)
    alone = found.pop("alone")
    extra = {
        name: [ms - base for (ms, _), base in zip(times, alone, strict=True)]
        for name, times in found.items()
    }
    extra["in the background, waits"] = [ms for _, ms in found["in the background"]]
    return rows_of("stall", extra, [ms / steps for ms in alone])


def parse(argv):
    parser = plain_parser(__doc__, repeats=7)
    add_preset(parser, "medium")
    parser.add_argument(
        "--dtype", choices=list(DTYPES), default="bf16", help="of the weights; default: bf16"
    )
    parser.add_argument(
        "--directory", help="a folder on the disk to be measured; default: a temporary one"
    )
    add_number(parser, "--steps", 12, "training steps around a save")
    return parse_benchmark(parser, argv)


def main(argv=None):
    """Runs the benchmark. Returns 0."""
    args = parse(argv)
    report, clock = new_report(args), clock_of(args)
    with (
        tempfile.TemporaryDirectory(dir=args.directory) as folder,
        bench(args.shape, Path(folder), args.dtype) as one,
    ):
        size = report["bytes"] = sum(value.nbytes for value in one.tensors().values())
        print(f"{size / 2**20:.1f} MiB of tensors", flush=True)
        for measure in (
            partial(measure_files, data=memoryview(os.urandom(size))),
            partial(measure_stall, steps=args.steps),
        ):
            rows = measure(one, clock, args.repeats)
            base = "to a step" if rows[0]["what"] == "stall" else "to the disk's own"
            publish(report, rows, args.json, ratio=base)
    return 0


if __name__ == "__main__":
    sys.exit(main())
