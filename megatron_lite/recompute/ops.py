"""Keeps the results of chosen operators of a layer and rebuilds the rest: `ops(...)` in a policy.

    forward   The layer runs under a dispatch mode, which keeps the results that `KeptResults`
              chooses.
    backward  The layer runs again, as far as backward reads. An operator whose result was kept
              returns that result and does not run.

Kept results go through the saved-tensor hooks in force, so hooks that count or move saved tensors
also see them. Backward may run twice.

Two kinds of operators are refused, because their kept results would give wrong gradients:
    An operator that writes into its arguments.
    An operator that draws random numbers. The replay would skip its draws, so all later draws in
    the replay would differ from the forward's. An attention kernel may be chosen, but a call with
    dropout runs again in the replay.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from megatron_lite.config.checks import InputError
from megatron_lite.config.policy import GROUPS, IN_GROUPS, Choice, parse_entry
from megatron_lite.parallel.torch_internals import (
    KEY_OF_VERSIONS,
    KeepsResults,
    OpOverload,
    address_of,
    schema_of,
    tree_leaves,
    tree_map,
    tree_map_only,
    without_dispatch_key,
)

from .contents import tensors_of
from .saved import Args, Kwargs, WrittenTo, saved_value, version_of

WRITTEN = -1  # the version of a result that was written to, whatever torch counts
Place = tuple[Any, int]  # an operator, and the number of the call among all calls of that operator
Run = Callable[[Place, Args, Kwargs], Any]


class KeptResults:
    """The kept results of one run of one layer, and the choice of which results are kept.

    ops: the entries of the policy's `ops(...)`, such as matmul/2.
    skip_tail: whether a replay ends as soon as it has rebuilt all that backward reads. If so, no
        result of an operator after `enter_tail` is kept.
    operators: the operators of `ops`, with their names.
    counting: the mode that numbers their calls at the moment.
    InputError: torch does not have an operator of `ops`, or its result cannot be kept.
    """

    def __init__(self, ops: Sequence[str], *, skip_tail: bool) -> None:
        self.skip_tail = skip_tail
        self.operators = find_operators(ops)
        self._choice = Choice(ops)
        self._open = ExitStack()
        self.counting: KeepsResults | None = None
        self._kept: dict[Place, Any] = {}
        self._storages: dict[int, _Result] = {}

    def keeping(self) -> AbstractContextManager[None]:
        """Keeps the chosen results of the forward inside the block, up to the layer's tail."""
        return self._under(self._keep)

    def save(self) -> None:
        """Passes the kept results to the saved-tensor hooks in force. Call it after the forward.

        A result that the layer wrote to is not kept, so a replay computes it.
        """
        self._storages.clear()
        self._kept = {
            place: tree_map_only(_Result, lambda each: saved_value(each.value), result)
            for place, result in self._kept.items()
            if not _is_written(result)
        }

    def reusing(self, *, again: bool = False) -> AbstractContextManager[None]:
        """Returns kept results in place of calls inside the block, up to the layer's tail.

        again: runs these calls again instead, so that the layer's results prove something.
        The block is around a replay. A replay may also happen inside the forward, if the forward
        runs a backward of its own.
        """
        return self._under(self._run_again if again else self._reuse)

    def enter_tail(self) -> None:
        """Marks the start of the layer's tail: the operations that only the layer's output needs.

        With `skip_tail` a replay leaves them out, so the numbers of its calls would differ from the
        forward's. Therefore the mode ends here, in the forward and in the replay.
        """
        if self.skip_tail:
            self._open.close()

    def keeps(self, operator: Any, args: Args, kwargs: Kwargs) -> bool:
        """Tells whether the result of this call is kept.

        It counts the calls (matmul/2 keeps every second), so every call in the forward must ask
        once, in order.
        """
        # An attention kernel with dropout draws random numbers.
        dropout = _named(operator, args, kwargs).get("dropout_p", 0.0) > 0.0
        return not dropout and self._choice.keeps(self.operators[operator])

    @contextmanager
    def _under(self, run: Run) -> Iterator[None]:
        # A replay inside the forward has a mode of its own. The forward's mode stays on torch's
        # stack below it and would see the same calls, so it counts only while it is the present
        # one.
        outer = self.counting, self._open
        self.counting = _Numbering(self, run)
        try:
            with ExitStack() as self._open:
                self._open.enter_context(self.counting)
                yield
        finally:
            self.counting, self._open = outer

    def _keep(self, place: Place, args: Args, kwargs: Kwargs) -> Any:
        operator, _ = place
        result = operator(*args, **kwargs)
        if self.keeps(operator, args, kwargs):
            self._kept[place] = kept = tree_map_only(Tensor, _Result, result)
            self._storages |= {each.storage: each for each in _results_in(kept)}
        return result

    def see_write(self, operator: Any, args: Args, kwargs: Kwargs) -> None:
        """Marks the kept results that an operator is about to write to.

        Versions alone would miss some writes: the results of torch's `unsafe_` view operators do
        not share the version of the tensor that they are a part of.
        """
        given = _named(operator, args, kwargs)
        for argument in schema_of(operator).arguments:
            if argument.alias_info:
                for tensor in tensors_of(given.get(argument.name)):
                    if tensor.layout != torch.strided:
                        continue
                    result = self._storages.get(address_of(tensor.untyped_storage()))
                    if not result:
                        continue
                    # matmul's squeeze_ changes no bit
                    is_view = torch.Tag.inplace_view in operator.tags
                    result.version = (result.version or 0) + 1 if is_view else WRITTEN

    def _run_again(self, place: Place, args: Args, kwargs: Kwargs) -> Any:
        # Other ranks need not verify this call, so they would not take part in a collective.
        is_collective = "c10d" in place[0].namespace
        return self._reuse(place, args, kwargs) if is_collective else place[0](*args, **kwargs)

    def _reuse(self, place: Place, args: Args, kwargs: Kwargs) -> Any:
        kept = self._kept.get(place)
        if kept is not None and not _is_written(kept):
            # The next layer may have written to it: torch.nn.ReLU(inplace=True) after a linear one.
            with suppress(WrittenTo):
                return tree_map(lambda saved: saved() if callable(saved) else saved, kept)
        return place[0](*args, **kwargs)


class _Numbering(KeepsResults):
    """A dispatch mode that numbers the calls of the operators of `kept` and passes them to `run`.

    While it is not the mode in use, every call runs as it is.

    run: called as `run(place, args, kwargs)` in place of each call; returns its result.
    """

    supports_higher_order_operators = True

    def __init__(self, kept: KeptResults, run: Run) -> None:
        super().__init__()
        self._kept, self._run = kept, run
        self._numbers = Counter[Any]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._kept.counting is self and isinstance(func, OpOverload):
            if func in self._kept.operators:
                self._numbers[func] += 1
                return self._run((func, self._numbers[func]), args, kwargs)
            if schema_of(func).is_mutable:
                self._kept.see_write(func, args, kwargs)
        return func(*args, **kwargs)


class _Result:
    """A kept tensor, until the forward ends and `save` passes it to the saved-tensor hooks."""

    def __init__(self, tensor: Tensor) -> None:
        self.storage = address_of(tensor.untyped_storage())
        # Without the guard the detached tensor would have a version of its own. Then writes to
        # the tensor that the layer holds would not show in it.
        with without_dispatch_key(KEY_OF_VERSIONS, False):
            self.value = tensor.detach()
        self.version = version_of(self.value)

    def __call__(self) -> Tensor:
        """Returns the tensor to a replay that happens inside the forward."""
        return self.value.detach()


def _results_in(kept: Any) -> list[_Result]:
    return [each for each in tree_leaves(kept) if isinstance(each, _Result)]


def _is_written(kept: Any) -> bool:
    """Tells whether the layer wrote to a kept result, or to one of several."""
    return any(version_of(each.value) != each.version for each in _results_in(kept))


def find_operators(ops: Sequence[str], *, setting: str = "--recompute-policy") -> dict[Any, str]:
    """Returns the torch operators that the entries of `ops(...)` name, with their names.

    A group gives those of its operators that this version of torch has.

    setting: the name of the policy in messages.
    InputError: torch lacks an operator that is named by itself, or its result cannot be kept.
    """
    found = {}
    for entry in map(parse_entry, ops):
        for name in entry.operators:
            try:
                operator = attrgetter(name)(torch.ops)
            except AttributeError:
                if entry.name in GROUPS:
                    continue
                raise InputError(
                    f"{setting} ops({entry.name}): torch {torch.__version__} has no operator {name}"
                ) from None
            if schema_of(operator).is_mutable:
                raise InputError(
                    f"{setting} ops({name}): it writes into its argument, and what it returns "
                    "cannot be kept"
                )
            # Attention kernels carry this tag too, although they draw only with dropout. They are
            # in a group, and `keeps` decides on them call by call.
            if torch.Tag.nondeterministic_seeded in operator.tags and name not in IN_GROUPS:
                raise InputError(
                    f"{setting} ops({name}): it draws random numbers. In a replay without it all "
                    "later draws would be others, and the gradients wrong"
                )
            found[operator] = name
    return found


def _named(operator: Any, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    names = (argument.name for argument in schema_of(operator).arguments)
    return dict(zip(names, args, strict=False)) | kwargs
