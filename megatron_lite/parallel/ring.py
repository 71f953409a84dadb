"""Point to point around a ring of ranks: each sends to the next of its group and receives from the one before."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup


class Shift(NamedTuple):
    """A shift under way. Its operand, kept here, must not be written to before `wait`."""

    result: Tensor
    works: list[dist.Work]
    operand: Tensor

    def wait(self) -> Tensor:
        """What the rank before sent, ready for this device's next kernels."""
        for work in self.works:
            work.wait()
        return self.result


def start_shift(tensor: Tensor, group: ProcessGroup) -> Shift:
    """Begins to send contiguous `tensor` to the next rank of the group, and to receive one of its size from the rank before.

    Shifts that are under way together arrive in the order in which they began, which must be the same on all ranks.
    """
    rank, size = group.rank(), group.size()
    received = torch.empty_like(tensor)
    works = dist.batch_isend_irecv([P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % size),
                                    P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size)])
    return Shift(received, works, tensor)
