"""Ways of saving and loading a checkpoint: ours, torch's, safetensors', and plain files."""

import contextlib
import io
import os
import shutil
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from benchmarks.engines import SEED
from megatron_lite.api import run_config
from megatron_lite.checkpointing.directory import claim_directory
from megatron_lite.checkpointing.saver import Saver
from megatron_lite.checkpointing.start import find_start
from megatron_lite.checkpointing.state import load_checkpoint, take_snapshot
from megatron_lite.config.checkpoint_settings import CheckpointConfig
from megatron_lite.data.durable_files import sync
from megatron_lite.parallel.state import ParallelState, parallel_state
from megatron_lite.training.batches import MicroBatches
from megatron_lite.training.build_trainer import build_trainer
from megatron_lite.training.loop import Trainer
from megatron_lite.training.step import train_step

DISK, OURS = "disk", "megatron_lite"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A model with its optimizer, after one step, and a folder for everything that is written."""

    folder: Path
    trainer: Trainer
    parallel: ParallelState

    @property
    def directory(self):
        """The directory of --save."""
        return self.folder / "ours"

    def options(self, *, async_save=False):
        """Returns options that keep the last checkpoint only, so the disk does not fill up."""
        return CheckpointConfig(
            save=str(self.directory),
            load=str(self.directory),
            save_keep_last=1,
            async_save=async_save,
        )

    def tensors(self):
        """Returns all tensors of model and optimizer that a checkpoint holds."""
        states = {
            f"{name}/{key}": value
            for name, of in self.trainer.optimizer.states.items()
            for key, value in of.items()
        }
        weights = self.trainer.model.named_parameters()
        return {**{name: value.detach() for name, value in weights}, **states}

    def step(self):
        """Runs one training step."""
        trainer = self.trainer
        batches = MicroBatches(
            dataset=trainer.datasets.train,
            consumed_samples=0,
            num_microbatches=1,
            parallel=self.parallel,
            micro_batch_size=trainer.config.training.micro_batch_size,
        )
        train_step(trainer.runner, trainer.optimizer, batches, learning_rate=1e-4)

    @contextmanager
    def saver(self, *, async_save=False):
        """Yields a function that saves a checkpoint as a given iteration."""
        options, trainer = self.options(async_save=async_save), self.trainer
        with Saver(
            options, self.parallel, claim_directory(options, self.parallel), started_at=0
        ) as saver:

            def save(iteration):
                snapshot = take_snapshot(
                    trainer.config,
                    self.parallel,
                    trainer.model,
                    trainer.optimizer,
                    replace(trainer.progress, iteration=iteration),
                    data=trainer.datasets.identity,
                    copy=saver.copies,
                )
                saver.save(snapshot)
                return saver

            yield save


@contextmanager
def bench(shape, folder, dtype):
    """Yields a bench with a model of the shape."""
    config = run_config(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        max_position_embeddings=shape.seq_length,
        num_attention_heads=shape.num_attention_heads,
        micro_batch_size=shape.batch_size,
        global_batch_size=shape.batch_size,
        train_iters=10**6,
        eval_iters=0,
        seed=SEED,
        bf16=dtype == "bf16",
        distributed_backend="gloo",
        seq_length=shape.seq_length,
        mock_data=True,
        vocab_size=shape.vocab_size - 1,
        lr=1e-4,
    )
    with parallel_state(config.parallel, seed=SEED) as parallel:
        one = Bench(folder=folder, trainer=build_trainer(config, parallel), parallel=parallel)
        one.step()
        yield one


def saves(one, save, iterations, data):
    """Returns every way of saving by name, DISK first."""
    tensors, folder = one.tensors(), one.folder

    def by_torch():
        torch.save(tensors, folder / "torch" / "file.pt")
        synced(folder / "torch" / "file.pt")

    def by_safetensors():
        save_file(
            {name: value.contiguous() for name, value in tensors.items()},
            str(folder / "safetensors" / "file"),
        )
        synced(folder / "safetensors" / "file")

    def by_dcp():
        shutil.rmtree(folder / "dcp", ignore_errors=True)
        with quiet():
            dcp.save(
                dict(tensors),
                storage_writer=dcp.FileSystemWriter(folder / "dcp", sync_files=True),
                no_dist=True,
            )

    return {
        DISK: lambda: write_plainly(folder / DISK / "file", data),
        OURS: lambda: save(next(iterations)),
        "safetensors": by_safetensors,
        "torch": by_torch,
        "torch DCP": by_dcp,
    }


def loads(one):
    """Returns every way of loading by name, DISK first."""
    folder, targets = one.folder, {name: value.clone() for name, value in one.tensors().items()}

    def by_ours():
        config = replace(one.trainer.config, checkpoint=one.options())
        start = find_start(config.checkpoint, one.parallel)
        load_checkpoint(start, config, one.parallel, one.trainer.model, one.trainer.optimizer)

    def fill(found):
        for name, value in found.items():
            targets[name].copy_(value)

    def by_dcp():
        with quiet():
            dcp.load(targets, storage_reader=dcp.FileSystemReader(folder / "dcp"), no_dist=True)

    return {
        DISK: lambda: read_plainly(folder / DISK / "file"),
        OURS: by_ours,
        "safetensors": lambda: fill(load_file(folder / "safetensors" / "file")),
        "torch": lambda: fill(torch.load(folder / "torch" / "file.pt", weights_only=True)),
        "torch DCP": by_dcp,
    }


@contextmanager
def quiet():
    """Silences DCP, which warns that there is no process group."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def synced(path):
    """Returns once a file and its name are on the disk."""
    sync(path)
    sync(path.parent)


def write_plainly(path, data):
    """Writes the bytes to one file and syncs it: the disk's own speed."""
    path.write_bytes(data)
    synced(path)


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
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
