"""Point-to-point transfers around a ring.

Each rank sends to the next rank of its group and receives from the rank before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup

from megatron_lite.parallel.waiting import WAITING


class Shift(NamedTuple):
    """A shift under way. `operand` stays alive here and must not be written to before `wait`."""

    result: Tensor
    works: list[dist.Work]
    operand: Tensor

    def wait(self) -> Tensor:
        """Returns the tensor of the rank before, which this device's next kernels may read."""
        with WAITING:
            for work in self.works:
                work.wait()
        return self.result


def start_shift(tensor: Tensor, group: ProcessGroup) -> Shift:
    """Begins to send `tensor` to the next rank and to receive one of its size from the rank before.

    `tensor` must be contiguous, and of one shape on all ranks. Several shifts under way arrive in
    the order in which they began. That order must be the same on all ranks.
    """
    rank, size = group.rank(), group.size()
    received = torch.empty_like(tensor)
    works = dist.batch_isend_irecv(
        [
            P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % size),
            P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),
        ]
    )
    return Shift(received, works, tensor)
