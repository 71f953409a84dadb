"""How many elements RMSNorm and GELU compute at a time on a CPU.

Several operators in turn read and write the float32 copies of a block, so these stay in the cache.
torch splits an operator only into parts of at least 32 Ki elements. More threads therefore need a
larger block, or some of them would have nothing to do.
"""

from __future__ import annotations

import torch

from megatron_lite.description.sizes import CPU_BLOCK


def elements_at_a_time() -> int:
    """Returns the elements of a block for the threads of this process."""
    return CPU_BLOCK * torch.get_num_threads()
