"""Starts of one job that only save checkpoints, without training.

Each start has one rank, in the test's own process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from megatron_lite.checkpointing import retention
from megatron_lite.checkpointing.lock import DirectoryLock, Holder
from megatron_lite.checkpointing.manifest import Manifest
from megatron_lite.checkpointing.snapshot import Snapshot, take_snapshot
from megatron_lite.checkpointing.start import candidates, newest_good_step, origin_of, step_fault
from megatron_lite.checkpointing.step_files import METADATA, saved_steps, step_directory
from megatron_lite.checkpointing.write import StepWriter
from megatron_lite.config.checkpoint_settings import CheckpointConfig
from megatron_lite.parallel.state import ParallelState, parallel_state
from megatron_lite.training.build_trainer import build_trainer
from tests.support.runs import tiny_run


class Began(NamedTuple):
    """The iteration from which a start continues, and the number of the start in the directory."""

    iteration: int
    start: int


class Saved:
    """The model that starts save, at any iteration."""

    def __init__(self, parallel: ParallelState, snapshot: Snapshot) -> None:
        self._parallel, self._snapshot = parallel, snapshot

    def at(self, iteration: int) -> Snapshot:
        metadata = json.loads(self._snapshot.texts[METADATA])
        metadata["progress"]["iteration"] = iteration
        return replace(
            self._snapshot,
            iteration=iteration,
            texts={**self._snapshot.texts, METADATA: json.dumps(metadata)},
        )

    def start(self, root: Path, number: int, iterations: list[int], **options: object) -> Began:
        """Runs one start of a job: locks the directory, reads the newest good step, and saves."""
        starts = [
            origin.start
            for step in saved_steps(root)
            if (origin := origin_of(step_directory(root, step)))
        ]
        holder = Holder(
            job="7",
            run="r",
            requeues=0,
            restarts=number,
            host="node1",
            pid=42,
            token=f"token{number}",
        )
        lock = DirectoryLock(root, holder, after_start=max(starts, default=0))
        retention.remove_leftovers(root, lock.token)
        there = candidates(root)
        began, course = 0, ()
        if there.steps:
            manifest = Manifest.read(newest_good_step(root, there, step_fault, fallback=True).step)
            began, course = manifest.iteration, manifest.origin.course_from(manifest.iteration)
        writer = StepWriter(
            CheckpointConfig(save=str(root), **options),
            self._parallel,
            token=lock.token,  # type: ignore[arg-type]
            lock=lock,
            started_at=began,
            course=course,
        )
        for iteration in iterations:
            writer.write(self.at(iteration))
        lock.release()
        return Began(began, lock.start)


@contextmanager
def saved_model() -> Iterator[Saved]:
    """Yields a model of one small layer, to be saved."""
    config = tiny_run(
        model=dict(num_layers=1, hidden_size=8, num_attention_heads=2),
        training=dict(train_iters=1, eval_iters=0),
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
