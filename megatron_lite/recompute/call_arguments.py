"""Keeps the arguments of one call of a layer for its replays.

Arguments may be any nesting of containers, tensors and other objects.

Tensors are kept through the saved-tensor hooks in force, as autograd does with saved tensors. So an
outer policy rebuilds them, `@host` moves them, and a byte meter counts them.

A replay gets new containers, and tensors that belong to no graph, so it cannot change the caller's
objects. A change by the forward itself is found by comparing the versions of tensors, and the
contents of other objects.
"""

from typing import Any

from torch import Tensor, nn

from megatron_lite.parallel.torch_internals import (
    tree_flatten_with_path,
    tree_path_text,
    tree_unflatten,
)

from .contents import FUNCTIONS, Contents, behind
from .replay import replay_inputs
from .saved import Args, Handle, Kwargs, saved_value


def argument_name(path: Any) -> str:
    """Returns the name of an argument, by its path within `(args, kwargs)`."""
    return f"argument {tree_path_text(path).partition(']')[2]}"


class Arguments:
    """The `args` and `kwargs` of one call.

    Make it before the forward, call `settle` after the forward, and `again` for each replay.

    tensors: the tensors among the arguments by their names, until `settle`. A parameter is passed
        on itself, and is not among them. A tensor that is passed twice is one tensor in the replay.
    kinds: the kinds of devices of all tensors among the arguments.
    generators: the generators among the arguments, with their states before the forward.
    holders: the modules and functions among the arguments, whose state is restored as the layer's.
    given: all values among the arguments, until `settle`.
    """

    def __init__(self, name: str, args: Args, kwargs: Kwargs) -> None:
        self._name = name
        found, self._spec = tree_flatten_with_path((args, kwargs))
        self.given = [value for _, value in found]
        self._leaves: list[Any] = []
        kinds = nn.Module, *FUNCTIONS
        self._others, self.holders = Contents(constant=kinds), dict[str, Any]()
        self.kinds: set[str] = set()
        self.tensors: dict[str, Tensor] = {}
        known: dict[int, str] = {}
        self._names: list[str] = []
        for place, (path, value) in enumerate(found):
            name = argument_name(path)
            if isinstance(value, kinds) or behind(value) is not value:
                self.holders[name] = value
            elif not isinstance(value, Tensor):
                self._others.add(str(place), value)
            else:
                self.kinds.add(value.device.type)
                if not (value.is_leaf and isinstance(value, nn.Parameter)):
                    name = known.setdefault(id(value), name)
                    self.tensors[name], value = value, None
            self._names.append(name)
            self._leaves.append(value)
        # Those that a subclass of torch.Tensor makes itself are not taken over.
        self._attributes = {name: {**vars(value)} for name, value in self.tensors.items()}
        self._needing = {name for name, value in self.tensors.items() if value.requires_grad}
        self._kept: dict[str, Handle] = {}
        self._written: set[str] = set()
        self.generators = [state for _, state in self._others.generators]
        self._others.mark()

    def settle(self, copies: dict[str, Tensor]) -> None:
        """Keeps the tensors with their values before the forward. Call it after the forward.

        copies: those values of the tensors that the forward wrote to.
        """
        self._written = {*copies}
        self._kept = {
            name: saved_value(copies.get(name, tensor)) for name, tensor in self.tensors.items()
        }
        # From here on only the hooks keep the tensors. A reference here would hold the device
        # memory of tensors that the hooks moved to the host or discarded.
        self.tensors, self.given = {}, []

    def check_unchanged(self, when: str) -> None:
        """Raises RuntimeError if an object among the arguments has changed, such as a cache."""
        names = [part.name for part in self._others.written({})]
        names += [owner or name for name, owner in self._others.changed()]
        for name in names:
            place = int(name.partition(".")[0])
            raise RuntimeError(
                f"{self._name}: its {self._names[place]}, a {type(self._leaves[place]).__name__}, "
                f"was changed {when}: a replay in backward would compute something else. Call the "
                "model without it (for a cache: use_cache=False), or take the layer out of the "
                "policy"
            )

    def again(self, copies: dict[str, Tensor]) -> tuple[Args, Kwargs]:
        """Returns (args, kwargs) for a replay: the values of the forward, in new containers.

        copies: as in `settle`, for a replay in a backward inside the forward.
        RuntimeError: a tensor or an object among the arguments was changed since the forward.
        """
        self.check_unchanged("after the forward and before backward")
        made = {
            name: copies[name].clone() if name in copies else tensor.detach()
            for name, tensor in self.tensors.items()
        }
        for name, kept in self._kept.items():
            try:
                value = kept()
            except RuntimeError as error:
                raise RuntimeError(
                    f"{self._name}: an argument was written to after the forward, and a replay in "
                    f"backward needs it: {error}"
                ) from error
            # The replay writes to it again, and a later replay needs the value from before.
            made[name] = value.clone() if name in self._written else value
        made |= replay_inputs({name: made[name] for name in made if name in self._needing})[0]
        for name, value in made.items():
            vars(value).update(self._attributes[name] | vars(value))
        leaves = [
            made.get(name, value) for name, value in zip(self._names, self._leaves, strict=True)
        ]
        args, kwargs = tree_unflatten(leaves, self._spec)
        return args, kwargs
