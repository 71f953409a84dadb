"""Keeps the arguments of one call of a layer for its replays.

Arguments may be any nesting of containers, tensors and other objects.

Tensors are kept through the saved-tensor hooks in force, as autograd does with saved tensors. So an
outer policy rebuilds them, `@host` moves them, and a byte meter counts them.

A replay gets new containers, and tensors that belong to no graph, so it cannot change the caller's
objects. A change by the forward itself is found by comparing the versions of tensors, and the
contents of other objects.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from megatron_lite.parallel.tensor_hash import differing
from megatron_lite.parallel.torch_internals import (
    tree_flatten,
    tree_flatten_with_path,
    tree_path_text,
    tree_unflatten,
)
from megatron_lite.recompute.contents import Contents
from megatron_lite.recompute.layer_state import ReplayInputs, Written
from megatron_lite.recompute.saved import Args, Kwargs, SavedValue, has_values, version_of


class Arguments:
    """The `args` and `kwargs` of one call.

    Make it before the forward, call `settle` after the forward, and `again` for each replay.

    generators: the generators among the arguments, with their states before the forward.
    """

    def __init__(self, name: str, args: Args, kwargs: Kwargs, written: Written) -> None:
        self._name, self._written = name, written
        self._leaves, self._spec = tree_flatten((args, kwargs))
        self._described: Any = (args, kwargs)
        self._kept: dict[int, _Tensor] = {}
        self._others = Contents()
        # Before the forward runs, it is not known which arguments it writes to. The first call
        # copies all tensors. Later calls copy only those that an earlier call wrote to.
        known: dict[int, _Tensor] = {}
        for place, value in enumerate(self._leaves):
            if not isinstance(value, Tensor):
                self._others.add(str(place), value)
            # A parameter is passed on itself. A tensor passed twice is one tensor in the replay.
            elif not (value.is_leaf and isinstance(value, nn.Parameter)):
                if id(value) not in known:
                    known[id(value)] = _Tensor(
                        value, written.arguments is None or place in written.arguments
                    )
                self._kept[place] = known[id(value)]
        self.generators = [state for _, state in self._others.generators]

    def tensors(self) -> list[Tensor]:
        """Returns all tensors among the arguments. Call it before `settle`, which drops them."""
        return [value for value in self._leaves if isinstance(value, Tensor)]

    def settle(self) -> None:
        """Keeps the tensors with their values before the forward. Call it after the forward.

        RuntimeError: the forward changed an object among its arguments, such as a cache.
        RuntimeError: the forward wrote to an argument that no earlier forward wrote to, so the old
        value was not copied.
        """
        for place in self._changed_objects():
            raise RuntimeError(
                f"{self._name} changes its argument {self._path(place)}, a "
                f"{type(self._leaves[place]).__name__}, in place: a replay in backward would "
                "change it once more. Call the model without it (for a cache: "
                "use_cache=False), or take the layer out of the policy"
            )
        # BatchNorm's kernels do not count their writes to statistics, so the first call, which has
        # copies of all arguments, compares the values.
        if self._written.arguments is None:
            self._written.arguments = set()
            pairs = {
                each: (each.copy, each.tensor)
                for each in self._kept.values()
                if each.copy is not None
            }
            for each, differs in zip(pairs, differing([*pairs.values()]), strict=True):
                each.is_written = differs
        for place, kept in self._kept.items():
            if kept.saved is not None:
                continue
            if kept.is_written or version_of(kept.tensor) != kept.version:
                self._written.arguments.add(place)
                if kept.copy is None:
                    raise RuntimeError(
                        f"{self._name} wrote to its argument {self._path(place)} in place, which "
                        "its first forward did not: there is no copy of the old value for a "
                        "replay. The next forward makes one; to avoid this one error, take the "
                        "layer out of the policy"
                    )
            kept.settle(place in self._written.arguments)
        # From here on only the hooks keep the tensors. A reference here would hold the device
        # memory of tensors that the hooks moved to the host or discarded.
        self._leaves = [
            None if place in self._kept else value for place, value in enumerate(self._leaves)
        ]
        self._described = None

    def _changed_objects(self) -> list[int]:
        """Returns the places of the arguments that have changed, but tensors."""
        return [int((owner or name).partition(".")[0]) for name, owner in self._others.changed()]

    def again(self) -> tuple[Args, Kwargs]:
        """Returns (args, kwargs) for a replay: the values of the forward, in new containers.

        RuntimeError: a tensor or an object among the arguments was changed since the forward.
        """
        for place in self._changed_objects():
            raise RuntimeError(
                f"{self._name}: a {type(self._leaves[place]).__name__} among its arguments was "
                "changed after the forward and before backward, so that a replay would compute "
                "something else"
            )
        made = {kept: kept.value(self._name) for kept in dict.fromkeys(self._kept.values())}
        # Inputs that require grad pass through one ReplayInputs operation. They are no leaves for
        # the layer, so it may write to them in place.
        needing = [kept for kept in made if kept.requires_grad]
        if needing:
            inputs = ReplayInputs.apply(*(made[kept].requires_grad_() for kept in needing))
            made |= zip(needing, inputs, strict=True)
        leaves = list(self._leaves)
        for place, kept in self._kept.items():
            leaves[place] = made[kept]
        args, kwargs = tree_unflatten(leaves, self._spec)
        return args, kwargs

    def _path(self, place: int) -> str:
        path = tree_path_text(tree_flatten_with_path(self._described)[0][place][0])
        return path.removeprefix("[0]").removeprefix("[1]")


class _Tensor:
    """One tensor among the arguments.

    tensor: the caller's tensor, until `settle`.
    copy: its value before the forward, if the forward may write to it.
    saved: the tensor or the copy, kept through the saved-tensor hooks; set by `settle`.
    """

    def __init__(self, tensor: Tensor, may_be_written: bool) -> None:
        self.tensor, self.version = tensor, version_of(tensor)
        is_copied = may_be_written and has_values(tensor)
        self.copy = tensor.detach().clone() if is_copied else None
        self.requires_grad, self.is_written = tensor.requires_grad, False
        self.saved: SavedValue | None = None

    def settle(self, is_written: bool) -> None:
        """Keeps the tensor for backward, or its copy if the forward wrote to the tensor."""
        self.is_written = is_written
        self.saved = SavedValue(self.copy if is_written and self.copy is not None else self.tensor)
        self.copy = None
        del self.tensor

    def value(self, name: str) -> Tensor:
        """Returns the value before the forward, as a tensor that belongs to no graph.

        It also works during the forward, which may run a backward of its own.
        RuntimeError: the argument was written to after the forward.
        """
        if self.saved is None:
            return self.tensor.detach() if self.copy is None else self.copy.clone()
        try:
            value = self.saved.tensor()
        except RuntimeError as error:
            raise RuntimeError(
                f"{name}: an argument was written to after the forward, and a replay in backward "
                f"needs it: {error}"
            ) from error
        # The replay writes to it again, and a later replay needs the value from before.
        return value.clone() if self.is_written else value
