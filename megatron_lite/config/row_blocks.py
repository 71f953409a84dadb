"""How many rows of a matrix are computed at a time, so that a float32 copy of it stays small.

The kernels and the predictions of their memory both read it. Standard library only.
"""

GPU_BYTES, CPU_BYTES, MOST_BLOCKS = 2**28, 2**20, 64
HASHED_ON_CPU, HASHED_ON_GPU = 2**16, 2**22


def hashed_at_a_time(device: str) -> int:
    """Returns how many words of 8 bytes a hash of a replay multiplies at a time.

    Its table of keys and its products take 8 bytes for each.
    """
    return HASHED_ON_CPU if device == "cpu" else HASHED_ON_GPU


def rows_at_a_time(rows: int, width: int, device: str) -> int:
    """Returns how many of the rows of logits the loss computes in float32 at a time.

    Their float32 copy takes at most 256 MiB on a GPU. On a CPU it takes 1 MiB, or more where the
    rows would otherwise have more than 64 blocks.
    """
    if device != "cpu":
        return max(1, GPU_BYTES // (4 * max(1, width)))
    return max(1, CPU_BYTES // (4 * max(1, width)), -(-rows // MOST_BLOCKS))


def product_rows(width: int) -> int:
    """Returns how many rows of a 16-bit weight's gradient are computed at a time.

    They take at most 256 MiB, so that only the products of large vocabularies have parts.
    """
    return max(1, GPU_BYTES // (2 * max(1, width)))


def has_gradient_tensor(device: str) -> bool:
    """Returns whether a 16-bit weight's gradient is a tensor before it is added to a float32 sum.

    On CUDA the product adds to the sum (parallel/weight_gradient.py), so no such tensor exists.
    """
    return device != "cuda"
