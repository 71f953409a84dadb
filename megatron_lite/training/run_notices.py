"""Collects every notice of a run in one function.

The command line calls it, and so does a program that builds a trainer by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_lite.config.notices import notices
from megatron_lite.config.run import RunConfig
from megatron_lite.parallel.torch_internals import missing_notices
from megatron_lite.training.apex_kernels import kernel_notices


class RunNotices(NamedTuple):
    """The notices of a run, one line each.

    at_start: notices that are known before anything is built. pretrain_gpt.py prints them.
    in_log: notices that `Trainer.run` writes to the log.
    """

    at_start: tuple[str, ...]
    in_log: tuple[str, ...]


def run_notices(
    config: RunConfig, *, device: str, world_size: int, of_settings: Sequence[str] | None = None
) -> RunNotices:
    """Returns the notices of a run of `config` for its user.

    device: "cpu" or "cuda".
    world_size: the number of ranks.
    of_settings: the notices of a command line. They include those that the configuration alone
        shows. None computes the latter.
    Notices about files (checkpoints, locks) are not known yet. They appear in the log later.
    Raises ValueError if the number of ranks is not a multiple of one model's ranks.
    """
    settings = notices(config, "settings") if of_settings is None else of_settings
    return RunNotices(
        (*settings, *notices(config, "placement", device=device, world_size=world_size)),
        (
            *missing_notices(),
            *_verify_notices(config, device),
            *kernel_notices(config, device),
            *notices(config, "log", world_size=world_size),
        ),
    )


def _verify_notices(config: RunConfig, device: str) -> list[str]:
    """Returns the line about what --recompute-verify cannot compare on a GPU."""
    if (
        not config.recompute.recompute_verify
        or device == "cpu"
        or config.training.deterministic_mode
    ):
        return []
    return [
        "--recompute-verify compares what replays rebuild. It cannot compare gradients here: "
        "without --deterministic-mode the backward kernels of a GPU do not repeat their own bits"
    ]
