"""Saved-tensor hooks that keep another object in place of a tensor that is saved for backward.

torch applies only the innermost pair of hooks. The hooks here pass each tensor that they do not
exchange to the pair that was in force before. So hooks that discard outputs, hooks that move
tensors and hooks that count bytes all see the same forward.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from megatron_lite.parallel.torch_internals import (
    address_of,
    base_of,
    hooks_in_force,
    is_fake,
    is_view,
    is_zero,
    tracer,
    untraced,
    write_count_of,
)

IN_FORCE = object()
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


Handle = Callable[[], Tensor]  # what the graph holds in place of a saved tensor, which it returns
# A copy of a storage, which lives as long as the graph needs any view of it. It returns the bytes
# on the device of the original, ready for the current stream.
MovedStorage = Callable[[], Tensor]


def unpacked(handle: Handle) -> Tensor:
    """Returns the saved tensor: the hook that goes with a `pack` that returns handles.

    Compiled autograd would trace it, so it is passed to torch as `untraced(unpacked)`.
    """
    return handle()


def version_of(tensor: Tensor) -> int | None:
    """Returns the number of in-place writes so far, to the tensor or a view of it.

    It is None for an inference tensor, whose writes torch does not count.
    """
    return None if tensor.is_inference() else write_count_of(tensor)


def parameter_of(tensor: Tensor) -> Parameter | None:
    """Returns the parameter of which a plain tensor is a view, or None."""
    base = base_of(tensor)
    return base if type(tensor) is Tensor and type(base) is Parameter else None


class WrittenTo(RuntimeError):
    """A tensor that is kept for backward has been written to since."""


def check_unwritten(
    tensor: Tensor, version: int | None, *, what: str = "tensor", purpose: str = "kept for backward"
) -> None:
    """Raises WrittenTo if the tensor has been written to since it was at `version`.

    autograd makes this check for the tensors that it saves itself, but not with saved-tensor hooks.

    what: the noun for the tensor in the message.
    purpose: the reason why it must not change, in the message.
    """
    if (now := version_of(tensor)) != version:
        raise WrittenTo(
            f"a {what} {list(tensor.shape)} {purpose} has been modified by an inplace operation: "
            f"it is at version {now}, expected {version}"
        )


@contextmanager
def exchanging(exchange: Callable[[Tensor], Handle | None]) -> Iterator[None]:
    """Keeps `exchange(tensor)` in place of each tensor that is saved inside the block.

    If that is None, the tensor goes to the hooks that were in force before.
    """
    outer = hooks_in_force()

    def pack(tensor: Tensor) -> Handle:
        return exchange(tensor) or saved_value(tensor, outer)

    with saved_tensors_hooks(untraced(pack), untraced(unpacked)):
        yield


@contextmanager
def moving(
    move: Callable[[Tensor], MovedStorage | None], *, kind: str, stay: Iterable[Tensor]
) -> Iterator[None]:
    """Keeps `move(tensor)` in place of each tensor that is saved inside the block.

    A move copies the whole storage, once for all views of it. None leaves it where it is, also for
    later saves.

    kind: the kind of device ("cuda") whose tensors are moved.
    stay: these tensors and views of them are not moved. Tensors of bytes (uint8) are not moved
        either: they are states of generators, which are in host memory on every device.
    """
    fixed = {address_of(each.untyped_storage()) for each in stay if each.layout == torch.strided}
    moved: dict[Any, tuple[weakref.ref[torch.UntypedStorage], MovedStorage | None]] = {}

    def exchange(tensor: Tensor) -> Handle | None:
        storage = tensor.untyped_storage() if _can_move(tensor, kind) else None
        if storage is None or address_of(storage) in fixed or storage.nbytes() == 0:
            return None
        # A write after the copy raises the version, so the storage is copied again.
        place = address_of(storage), write_count_of(tensor), _unknown_part(tensor, storage)
        known = moved.get(place)
        if not known or known[0]() is not storage:  # another storage at the same address
            known = moved[place] = weakref.ref(storage), move(tensor)
        return view_in(known[1], tensor) if known[1] else None

    with exchanging(exchange):
        try:
            yield
        finally:
            moved.clear()


def saved_value(tensor: Tensor, hooks: Any = IN_FORCE) -> Handle:
    """Keeps a tensor through saved-tensor hooks, as autograd keeps its saved tensors.

    The tensor stays kept as long as the result lives. The result returns it, detached from any
    graph. If there are no hooks, it raises RuntimeError if the tensor was written to since; torch
    leaves that check to the hooks, too.

    hooks: a pair of them; by default those in force. None: the tensor itself is kept.
    """
    pair: Any = hooks_in_force() if hooks is IN_FORCE else hooks
    # An output with its graph would hold that graph: a cycle.
    pack, unpack = pair or (Tensor.detach, None)
    packed, version = pack(tensor), version_of(tensor)

    def value() -> Tensor:
        if not unpack:
            check_unwritten(packed, version)
        found = unpack(packed) if unpack else packed
        return found.detach()

    return value


def results_of(outputs: Any) -> tuple[Any, ...]:
    """Returns the results of a function, one or a tuple of several, as a tuple."""
    return outputs if isinstance(outputs, tuple) else (outputs,)


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns the whole storage of a tensor as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def view_in(moved: MovedStorage, tensor: Tensor) -> Handle:
    """Returns what makes the tensor again from the bytes of its storage."""
    dtype, size, stride = tensor.dtype, tensor.size(), tensor.stride()
    offset = int(tensor.storage_offset())

    def viewed() -> Tensor:
        memory = moved()
        # A slot of an arena begins inside a larger storage. Its start is a multiple of 512 bytes,
        # so it is a whole number of elements.
        first = int(memory.storage_offset()) // dtype.itemsize + offset
        found = torch.empty(0, dtype=dtype, device=memory.device)
        return found.set_(memory.untyped_storage(), first, size, stride)

    return viewed


def _unknown_part(tensor: Tensor, storage: torch.UntypedStorage) -> tuple[int, ...]:
    """Returns the place of a tensor that is a part of its storage, but no view to torch; else ().

    unsafe_chunk makes such parts (in nn.GRU). Each part has its own version counter. So equal
    versions of two parts do not show that the storage was not written to in between.
    """
    if is_view(tensor) or tensor.numel() * tensor.element_size() == storage.nbytes():
        return ()
    return int(tensor.storage_offset()), *tensor.shape


def _can_move(tensor: Tensor, kind: str) -> bool:
    if tensor.device.type != kind or tensor.dtype == torch.uint8 or tensor.layout != torch.strided:
        return False
    # A view of the moved bytes is rebuilt from dtype, size, stride and offset. That is not enough
    # for a tensor subclass, nor for a lazy conjugate, negation or zero, nor for what torch traces.
    # Writes to one of inference mode are not counted. FSDP2 frees the weights that it gathers.
    return (
        (type(tensor) in (Tensor, Parameter) or is_fake(tensor))
        and not isinstance(tensor if (base := base_of(tensor)) is None else base, Parameter)
        and not tensor.is_inference()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not is_zero(tensor)
        and tracer() is None
    )


def saved_parameter(parameter: Tensor) -> Handle:
    """Keeps a parameter, which its module holds anyway.

    The result raises RuntimeError if it was written to since, by an optimizer's step for example.
    """
    version = version_of(parameter)

    def value() -> Tensor:
        purpose = "needed for gradient computation"
        check_unwritten(parameter, version, what="parameter", purpose=purpose)
        return parameter

    return value
