"""Starts of one job that only save checkpoints, without training.

Each start has one rank, in the test's own process.
"""

import json
from contextlib import contextmanager

from megatron_lite.checkpointing.directory import SaveDirectory
from megatron_lite.checkpointing.lock import Holder
from megatron_lite.checkpointing.metadata import Manifest
from megatron_lite.checkpointing.saver import Saver
from megatron_lite.checkpointing.start import candidates, newest_good_step, step_fault
from megatron_lite.checkpointing.state import take_snapshot
from megatron_lite.checkpointing.step_files import METADATA
from megatron_lite.config.checkpoint_settings import CheckpointConfig
from megatron_lite.parallel.state import parallel_state
from megatron_lite.training.build_trainer import build_trainer
from tests.support.runs import tiny_run


class Saved:
    """The model that starts save, at any iteration."""

    def __init__(self, parallel, snapshot):
        self._parallel, self._snapshot = parallel, snapshot

    def at(self, iteration):
        metadata = json.loads(self._snapshot.texts[METADATA])
        metadata["progress"]["iteration"] = iteration
        texts = {**self._snapshot.texts, METADATA: json.dumps(metadata).encode()}
        return self._snapshot._replace(iteration=iteration, texts=texts)

    def start(self, root, number, iterations, **options):
        """Runs one start of a job: locks the directory, reads the newest good step, and saves.

        Returns the iteration from which it continues.
        """
        holder = Holder(
            job="7",
            run="r",
            requeues=0,
            restarts=number,
            host="node1",
            pid=42,
            token=f"token{number}",
        )
        directory = SaveDirectory(root, holder)
        directory.remove_leftovers()
        there, began = candidates(root), 0
        if there.steps:
            step = newest_good_step(root, there, step_fault, fallback=True).step
            began = Manifest.read(step).iteration
        writer = Saver(CheckpointConfig(save=str(root), **options), self._parallel, directory)
        writer.started_at = began
        for iteration in iterations:
            writer.write(self.at(iteration))
        directory.release()
        return began


@contextmanager
def saved_model():
    """Yields a model of one small layer, to be saved."""
    config = tiny_run(
        num_layers=1, hidden_size=8, num_attention_heads=2, train_iters=1, eval_iters=0
    )
    with parallel_state(config.parallel, seed=1) as parallel:
        trainer = build_trainer(config, parallel)
        yield Saved(
            parallel,
            take_snapshot(
                config,
                parallel,
                trainer.model,
                trainer.optimizer,
                trainer.progress,
                data={},
                copy=True,
            ),
        )
