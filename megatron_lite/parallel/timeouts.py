"""The limit of the time that collectives wait for a missing rank."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from megatron_lite.parallel.torch_internals import set_group_timeout, world

SAVER = "saver"  # the description of the group whose ranks wait for the slowest disk


def set_timeout(seconds: float) -> None:
    """Sets the timeout of all later collectives of every group that this process is in.

    The group of background saves keeps its own timeout. Issues no collective; every rank should
    call it.
    """
    if dist.is_initialized():
        for group in list(world.pg_map):
            if group.group_desc != SAVER:
                set_group_timeout(timedelta(seconds=seconds), group)
