"""The learning-rate schedule of a run that continues: that of its flags or of its checkpoint.

Megatron stops if the two differ and no flag says which one to follow. Here the flags decide, and
the log lists the differences.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_lite.checkpointing.metadata import read_config
from megatron_lite.config.checks import InputError
from megatron_lite.parallel.state import ParallelState

if TYPE_CHECKING:
    from megatron_lite.training.build_trainer import Course


def follow_schedule(course: Course, parallel: ParallelState) -> Course:
    """Returns the course with the schedule that the run follows. Every rank must call this.

    course: with the schedule of the flags.
    ValueError: the checkpoint's schedule cannot be read, or contradicts the flags.
    """
    config, schedule, start = course.config, course.schedule, course.start
    if start is None or start.step is None or start.metadata is None or start.weights_only:
        return course
    step, metadata = start.step, start.metadata
    # A converted checkpoint without the optimizer's states has no schedule. As in Megatron, a
    # schedule that is not loaded begins anew, while the iterations and the data go on.
    if config.checkpoint.no_load_optim or "optimizer" in metadata.missing:
        before = start.progress.consumed_samples
        return course._replace(schedule=replace(schedule, skipped_samples=before))
    settings, held = config.lr_schedule, metadata.schedule
    if held is None:  # it was converted
        if settings.use_checkpoint_opt_param_scheduler:
            raise InputError(
                f"--use-checkpoint-opt_param-scheduler: {step} does not hold its schedule: leave "
                "the flag out, and give --lr and the like"
            )
        return course
    schedule = replace(schedule, skipped_samples=held.skipped_samples)
    if not settings.use_checkpoint_opt_param_scheduler:
        changed = schedule.changed_from(held)
        if changed and not settings.override_opt_param_scheduler:
            notice = (
                "the learning rate follows the flags, which differ from the checkpoint (checkpoint "
                f"-> flags, lengths in samples: {', '.join(changed)}); "
                "--use-checkpoint-opt_param-scheduler follows the checkpoint"
            )
            course = course._replace(notices=(notice,))
        return course._replace(schedule=schedule)
    taken = schedule.taken_from(held)
    weight_decay = parallel.together("--load", lambda: read_config(step)).optimizer.weight_decay
    changed = taken.changed_from(schedule)
    if weight_decay != config.optimizer.weight_decay:
        changed.append(f"weight_decay {config.optimizer.weight_decay} -> {weight_decay}")
        optimizer = replace(config.optimizer, weight_decay=weight_decay)
        config = replace(config, optimizer=optimizer)
    return course._replace(
        schedule=taken,
        config=config,
        notices=(
            "--use-checkpoint-opt_param-scheduler: the learning rate and the weight decay follow "
            "the checkpoint"
            + (f" (flags -> checkpoint: {', '.join(changed)})" if changed else ", as the flags do"),
        ),
    )
