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

import itertools
import os
import statistics
import sys
import tempfile
import warnings
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

sys.path.insert(0, ".")  # the root of the clone, which may not be installed

from benchmarks.engines import LEARNING_RATE, SEED, Setting
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
from megatron_lite.api import run_config
from megatron_lite.checkpointing.directory import claim_directory
from megatron_lite.checkpointing.saver import Saver
from megatron_lite.checkpointing.start import find_start
from megatron_lite.checkpointing.state import load_checkpoint, take_snapshot
from megatron_lite.config.checkpoint_settings import CheckpointConfig
from megatron_lite.data.durable_files import sync
from megatron_lite.parallel.state import parallel_state
from megatron_lite.training.build_trainer import build_trainer
from megatron_lite.training.step import train_step

DISK, OURS = "disk", "megatron_lite"


class Bench:
    """A model with its optimizer, after one step, and a folder for everything that is written."""

    def __init__(self, config, folder, parallel, batch):
        self.folder, self.parallel, self.batch = folder, parallel, batch
        self.trainer = build_trainer(config, parallel)
        self.iterations = itertools.count(1)
        self.step()

    def options(self, *, async_save=False):
        """Returns options that keep the last checkpoint only, so the disk does not fill up."""
        directory = str(self.folder / "ours")
        return CheckpointConfig(
            save=directory, load=directory, save_keep_last=1, async_save=async_save
        )

    @property
    def num_bytes(self):
        """The bytes of these tensors."""
        return sum(value.nbytes for value in self.tensors().values())

    def tensors(self):
        """Returns all tensors of model and optimizer that a checkpoint holds."""
        found = {name: value.detach() for name, value in self.trainer.model.named_parameters()}
        for name, state in self.trainer.optimizer.states.items():
            found |= {f"{name}/{key}": value for key, value in state.items()}
        return found

    def step(self):
        """Runs one training step."""
        trainer = self.trainer
        train_step(trainer.runner, trainer.optimizer, (self.batch,), learning_rate=LEARNING_RATE)

    @contextmanager
    def saver(self, *, async_save=False):
        """Yields a saver and a function that saves a checkpoint."""
        options, trainer = self.options(async_save=async_save), self.trainer
        claim = claim_directory(options, self.parallel)
        with Saver(options, self.parallel, claim) as saver:

            def save():
                snapshot = take_snapshot(
                    trainer.config,
                    self.parallel,
                    trainer.model,
                    trainer.optimizer,
                    replace(trainer.progress, iteration=next(self.iterations)),
                    data=trainer.datasets.identity,
                    copy=saver.copies,
                )
                saver.save(snapshot)

            yield saver, save

    def load(self):
        """Loads the last checkpoint."""
        trainer = self.trainer
        config = replace(trainer.config, checkpoint=self.options())
        start = find_start(config.checkpoint, self.parallel)
        load_checkpoint(start, config, self.parallel, trainer.model, trainer.optimizer)


def configured(shape):
    """Returns the configuration of a run in bf16 with a model of the shape."""
    return run_config(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        max_position_embeddings=shape.seq_length,
        num_attention_heads=shape.num_attention_heads,
        micro_batch_size=shape.batch_size,
        global_batch_size=shape.batch_size,
        train_iters=10**6,
        eval_iters=0,
        seed=SEED,
        bf16=True,
        distributed_backend="gloo",
        seq_length=shape.seq_length,
        mock_data=True,
        vocab_size=shape.vocab_size - 1,
        lr=1e-4,
    )


def others(one):
    """Returns every other way of saving, and of loading, by name, DISK first."""
    tensors, data = one.tensors(), memoryview(os.urandom(one.num_bytes))
    contiguous = {name: value.contiguous() for name, value in tensors.items()}
    targets = {name: value.clone() for name, value in tensors.items()}

    def one_file(name, write, read):
        path = one.folder / name

        def save():
            write(path)
            sync(path)
            sync(one.folder)  # its name

        return save, partial(read, path)

    def fill(found):
        for name, value in found.items():
            targets[name].copy_(value)

    return {
        DISK: one_file(DISK, lambda path: path.write_bytes(data), read_plainly),
        "safetensors": one_file(
            "safetensors",
            lambda path: save_file(contiguous, path),
            lambda path: fill(load_file(path)),
        ),
        "torch": one_file(
            "file.pt",
            partial(torch.save, tensors),
            lambda path: fill(torch.load(path, weights_only=True)),
        ),
        "torch DCP": (
            lambda: dcp.save(
                dict(tensors),
                storage_writer=dcp.FileSystemWriter(one.folder / "dcp", sync_files=True),
                no_dist=True,
            ),
            lambda: dcp.load(targets, checkpoint_id=one.folder / "dcp", no_dist=True),
        ),
    }


def read_plainly(path):
    """Reads one file through a small buffer: the disk's own speed."""
    buffer = bytearray(2**22)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def forget_pages(folder):
    """Drops the files below the folder from the page cache, so that a read goes to the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open() as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


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


def measure_files(one, clock, repeats):
    """Times saving and loading."""
    with one.saver() as (_, save):
        ways = others(one)
        ways = {DISK: ways.pop(DISK), OURS: (save, one.load), **ways}
        saved = in_rounds({name: partial(clock, do) for name, (do, _) in ways.items()}, repeats)

    def cold(action):
        forget_pages(one.folder)
        return clock(action)

    loaded = in_rounds({name: partial(cold, do) for name, (_, do) in ways.items()}, repeats)
    return [*rows_of("save", saved, saved[DISK]), *rows_of("load", loaded, loaded[DISK])]


def measure_stall(one, clock, repeats, *, steps):
    """Returns the time that one save adds to `steps` steps until it is durable, in steps.

    The row "waits" is the time of the call to `save` alone, which the log reports.
    """

    def alone():
        for _ in range(steps):
            one.step()

    def saved(*, async_save):
        """Returns the time of the steps with a save, and of the call to it."""
        waits = []

        def stepped():
            for step in range(steps):
                one.step()
                if step == steps // 4:
                    waits.append(clock(save))
            saver.wait()  # until it is durable

        with one.saver(async_save=async_save) as (saver, save):
            return clock(stepped), *waits

    ways = {"in the foreground": False, "in the background": True}
    saving = {name: partial(saved, async_save=is_async) for name, is_async in ways.items()}
    found = in_rounds({"alone": partial(clock, alone), **saving}, repeats)
    base = found.pop("alone")
    extra = {
        name: [ms - of for (ms, _), of in zip(times, base, strict=True)]
        for name, times in found.items()
    }
    extra["in the background, waits"] = [ms for _, ms in found["in the background"]]
    return rows_of("stall", extra, [ms / steps for ms in base])


def main(argv=None):
    """Runs the benchmark. Returns 0."""
    parser = plain_parser(__doc__, repeats=7)
    add_preset(parser, "medium")
    parser.add_argument(
        "--directory", help="a folder on the disk to be measured; default: a temporary one"
    )
    add_number(parser, "--steps", 12, "training steps around a save")
    args = parse_benchmark(parser, argv)
    report, clock = new_report(args), clock_of(args)
    warnings.simplefilter("ignore")  # DCP warns that there is no process group
    config = configured(args.shape)
    with (
        tempfile.TemporaryDirectory(dir=args.directory) as folder,
        parallel_state(config.parallel, seed=SEED) as parallel,
    ):
        setting = Setting(shape=args.shape, device=args.device, dtype="bf16", dropout=0.0)
        one = Bench(config, Path(folder), parallel, setting.batch())
        report["bytes"] = one.num_bytes
        print(f"{report['bytes'] / 2**20:.1f} MiB of tensors", flush=True)
        files = measure_files(one, clock, args.repeats)
        publish(report, files, args.json, ratio="to the disk's own")
        stall = measure_stall(one, clock, args.repeats, steps=args.steps)
        publish(report, stall, args.json, ratio="to a step")
    return 0


if __name__ == "__main__":
    sys.exit(main())
