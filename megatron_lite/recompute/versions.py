"""Detects in-place writes to a tensor, by comparing two values of torch's version counter."""

from __future__ import annotations

from torch import Tensor

from megatron_lite.parallel.torch_internals import is_fake, write_count_of


def version_of(tensor: Tensor) -> int | None:
    """Returns the number of in-place writes so far, to the tensor or a view of it.

    It is None for an inference tensor, whose writes torch does not count.
    """
    return None if tensor.is_inference() else write_count_of(tensor)


def check_unwritten(
    tensor: Tensor, version: int | None, *, what: str = "tensor", purpose: str = "kept for backward"
) -> None:
    """Raises RuntimeError if the tensor has been written to since it was at `version`.

    autograd makes this check for the tensors that it saves itself, but not with saved-tensor hooks.

    what: the noun for the tensor in the message.
    purpose: the reason why it must not change, in the message.
    """
    if (now := version_of(tensor)) != version:
        raise RuntimeError(
            f"a {what} {list(tensor.shape)} {purpose} has been modified by an inplace operation: "
            f"it is at version {now}, expected {version}"
        )


def has_values(tensor: Tensor) -> bool:
    """Tells whether the tensor has values that can be copied and compared.

    A tensor on the meta device and a fake tensor have none.
    """
    return tensor.device.type != "meta" and not is_fake(tensor)
