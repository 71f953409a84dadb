"""The settings of checkpoints, as one frozen class."""

import os

from .setting import Settings, count, setting, switch

READS_NONE = "no checkpoint is read"


class CheckpointConfig(Settings):
    """The directories of checkpoints, and the rule for which checkpoints stay.

    save_keep_last: K. The last K checkpoints stay.
    save_retain_interval: N. The checkpoints of iterations that are multiples of N stay. Without
        save_keep_last the last checkpoint stays too.
    async_save: whether training goes on while a checkpoint is written.

    If neither save_keep_last nor save_retain_interval is given, all checkpoints stay. Some
    fields do nothing without their directory, as in Megatron.
    """

    save: str | None = setting("directory to write checkpoints into")
    save_interval: int | None = count(
        "iterations between checkpoints", alias="--persistent-save-interval", without="save"
    )
    save_retain_interval: int | None = count(
        "keep the checkpoints of iterations that are multiples of it, and the last ones",
        multiple_of="save_interval",
        without="save",
        why="only a saved checkpoint can be kept",
    )
    save_keep_last: int | None = count(
        "keep the last so many checkpoints; default: all, with --save-retain-interval 1",
        needs="save",
        why="it deletes what the run has saved",
    )
    async_save: bool = switch(
        "train on while a checkpoint is written, once its tensors are copied", without="save"
    )
    load: str | None = setting("directory to read the newest checkpoint from")
    pretrained_checkpoint: str | None = setting(
        "directory to take the weights only from, at iteration 0, where --load has no checkpoint"
    )
    allow_fresh_start: bool = switch(
        "start from scratch where --load finds no checkpoint", needs="load", why=READS_NONE
    )
    finetune: bool = switch("take the weights only, and start at iteration 0", without="load")
    no_load_optim: bool = switch("do not read the optimizer's state", without="load")
    no_load_rng: bool = switch("do not read the states of the random streams", without="load")
    no_load_fallback: bool = switch(
        "stop where the newest checkpoint is damaged, instead of using the one before it",
        needs="load",
        why=READS_NONE,
    )
    allow_changed_data: bool = switch(
        "go on with other data than the checkpoint's run has read", needs="load", why=READS_NONE
    )

    @property
    def continues(self) -> bool:
        """Tells whether `--save` and `--load` are the same directory.

        Their real paths are compared, so symbolic links and relative paths are resolved.
        """
        return (
            self.save is not None
            and self.load is not None
            and os.path.realpath(self.save) == os.path.realpath(self.load)
        )
