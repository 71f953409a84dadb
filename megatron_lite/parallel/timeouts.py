"""How long collectives wait for a rank that does not come."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


def set_timeout(seconds: float) -> None:
    """Of all later collectives of every group that this process is in. Sends nothing; every rank should call it."""
    if dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
