"""The settings of checkpoints, as one frozen class."""

from __future__ import annotations

import os
from dataclasses import dataclass

from megatron_lite.config.checks import flag, require_at_least, require_not_empty

# Flags of Megatron that do nothing without --save, and without --load.
WITHOUT_SAVE = ("save_interval", "save_retain_interval", "async_save")
WITHOUT_LOAD = ("finetune", "no_load_optim", "no_load_rng")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """The directories of checkpoints, and the rule for which checkpoints stay.

    save_keep_last: K. The last K checkpoints stay.
    save_retain_interval: N. The checkpoints of iterations that are multiples of N stay. Without
        save_keep_last the last checkpoint stays too.
    async_save: whether training goes on while a checkpoint is written.

    If neither save_keep_last nor save_retain_interval is given, all checkpoints stay. The fields of
    WITHOUT_SAVE and WITHOUT_LOAD do nothing without their directory, as in Megatron.
    """

    save: str | None = None
    save_interval: int | None = None
    save_retain_interval: int | None = None
    save_keep_last: int | None = None
    async_save: bool = False
    load: str | None = None
    allow_fresh_start: bool = False
    finetune: bool = False
    no_load_optim: bool = False
    no_load_rng: bool = False
    no_load_fallback: bool = False
    allow_changed_data: bool = False

    def __post_init__(self) -> None:
        require_at_least(self, 1, "save_interval", "save_retain_interval", "save_keep_last")
        require_not_empty(self, "save", "load")
        if self.save_keep_last is not None and self.save is None:
            raise ValueError(f"--save-keep-last {self.save_keep_last} needs --save DIR")
        if self.save_interval is not None and (self.save_retain_interval or 0) % self.save_interval:
            raise ValueError(
                f"--save-retain-interval {self.save_retain_interval} is not a multiple of "
                f"--save-interval {self.save_interval}: most of the iterations that it would keep "
                "are not saved"
            )
        for field in ("allow_fresh_start", "no_load_fallback", "allow_changed_data"):
            if getattr(self, field) and self.load is None:
                raise ValueError(f"{flag(field)} needs --load DIR")

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
