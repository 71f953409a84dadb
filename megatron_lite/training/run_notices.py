"""Collects every notice of a run, and names the processor that computes it.

The command line reads `RunNotices`, and so does a program that builds a trainer by itself.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron_lite.config.notices import Here, notices
from megatron_lite.config.run import RunConfig
from megatron_lite.parallel import apex, torch_internals

# Raised whenever the same flags give other low bits on the same machine: "Bits changed" in
# CHANGELOG.md.
BITS = 2


class RunNotices(NamedTuple):
    """The notices of a run, one line each.

    at_start: notices that are known before anything is built. pretrain_gpt.py prints them.
    in_log: notices that `Trainer.run` writes to the log.
    """

    at_start: tuple[str, ...]
    in_log: tuple[str, ...]

    @classmethod
    def of(
        cls,
        config: RunConfig,
        *,
        device: str,
        world_size: int,
        of_settings: Sequence[str] | None = None,
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
        missing = ", ".join(torch_internals.MISSING)
        here = Here(
            f"torch {torch.__version__} lacks {missing}" if missing else "",
            apex.notice(),
            _multiplies_16_bits(config.training.precision),
        )
        placement, log = (
            notices(config, about, device=device, world_size=world_size, here=here)
            for about in ("placement", "log")
        )
        return cls((*settings, *placement), tuple(log))


def described(device: torch.device) -> str:
    """Returns one line about what computes, for a reader who compares it with another run's.

    Runs with different lines can differ in their low bits. Equal lines promise nothing.
    """
    if device.type != "cpu":
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return f"{name}, torch {torch.__version__}, bits {BITS}"
    threads = torch.get_num_threads()
    return (
        f"{platform.machine()} CPU with {torch.backends.cpu.get_cpu_capability()}, "
        f"{threads} {'thread' if threads == 1 else 'threads'} a rank, torch {torch.__version__}, "
        f"bits {BITS}"
    )


def moved_from(computed_on: str, computes_on: str) -> tuple[str, ...]:
    """Returns the log's line about a checkpoint that something else computed; none if it did not.

    computed_on: what computed the checkpoint (`described`); "" if that is not known.
    """
    if computed_on in ("", computes_on):
        return ()
    return (
        f"the checkpoint was computed on {computed_on}; this run computes on {computes_on}, so its "
        "results can have other low bits than those of a run that stayed there",
    )


def _multiplies_16_bits(precision: str) -> bool:
    """Returns whether oneDNN, to which torch sends 16-bit products, has instructions for them."""
    question = f"_is_mkldnn_{precision}_supported"
    if precision == "fp32" or not torch.backends.mkldnn.is_available():
        return precision == "fp32"
    return not hasattr(torch.ops.mkldnn, question) or bool(getattr(torch.ops.mkldnn, question)())
