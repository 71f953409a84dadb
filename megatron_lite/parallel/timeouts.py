"""How long collectives wait for a rank that does not come."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

SAVER = "saver"  # the description of the group whose ranks wait for the slowest disk


def set_timeout(seconds: float) -> None:
    """Of all later collectives of every group that this process is in, but that of background saves. Sends nothing; every rank
    should call it."""
    if dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):
            if group.group_desc != SAVER:
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
