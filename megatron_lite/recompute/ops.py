"""Keeps the results of chosen operators of a layer and rebuilds everything else: `ops(...)` of a recompute policy.

    forward   the layer runs under torch's selective checkpoint, which keeps the results that `KeptResults` chooses
    backward  the layer runs again, as far as backward reads; an operator whose result was kept returns it and does not run

What torch does not do by itself is done here: the named random-number streams are restored; kept results go through the
saved-tensor hooks in force, so that whoever counts or moves saved tensors finds them; backward may run twice. What torch
would do wrongly in silence is refused: keeping what an operator returns that writes into its arguments, or that draws
random numbers (it would not draw them in the replay, and later draws would be others).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from megatron_lite.config.checks import InputError
from megatron_lite.config.operators import GROUPS, IN_GROUPS, Choice, parse_entry
from megatron_lite.parallel.rng import Generators
from megatron_lite.recompute.checkpoint import Randomness
from megatron_lite.recompute.phase import recomputing
from megatron_lite.recompute.saved import hooks_in_force

OLDEST_TORCH = (2, 13)  # whose selective checkpoint has its results in `storage`, by operator and number; older ones: not tried


class KeptResults:
    """Which results of one run of one layer are kept.

    skip_tail: a replay ends where backward has all it reads, and nothing is kept of what follows `enter_tail`.
    InputError: an operator that torch does not have, or whose result cannot be kept.
    """

    def __init__(self, ops: Sequence[str], *, skip_tail: bool) -> None:
        self.skip_tail = skip_tail
        self._operators = find_operators(ops)
        self._choice = Choice(ops)
        self._mode = ExitStack()

    @contextmanager
    def under(self, mode: AbstractContextManager[Any]) -> Iterator[None]:
        """Runs the layer under one of torch's two modes, as far as the tail."""
        with ExitStack() as self._mode:
            self._mode.enter_context(mode)
            yield

    def enter_tail(self) -> None:
        """From here on the replay runs less than the forward: what only the layer's output needs. The mode ends before it."""
        if self.skip_tail:
            self._mode.close()

    def decide(self, _: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """The policy function of torch's selective checkpoint."""
        name = self._operators.get(operator)
        if name is None or _draws_dropout(operator, args, kwargs) or not self._choice.keeps(name):
            return CheckpointPolicy.MUST_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE


def keep_results(function: Callable[..., Any], *args: Any, results: KeptResults, rng: Generators,
                 replay: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, of whose activations the chosen results and the tensors among `args` are kept.

    Parameters as of recompute.checkpoint.checkpoint. results: made for this call. replay: saves the same tensors as `function`.
    The first operator that runs under a selective checkpoint costs seconds of imports, once per process.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    run = _Run(function, replay or function, results, rng)
    output = torch_checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, context_fn=run.contexts,
                              early_stop=results.skip_tail, **kwargs)
    run.save_results()
    return output


def find_operators(ops: Sequence[str]) -> dict[Any, str]:
    """The torch operators that the entries of `ops(...)` name, with their names. Of a group, those that this torch has.

    InputError: as `KeptResults`.
    """
    if ops and tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        raise InputError(f"--recompute-policy ops(...) needs torch {'.'.join(map(str, OLDEST_TORCH))} or newer, of which it uses "
                         f"inner parts (this is {torch.__version__})")
    found = {}
    for entry in map(parse_entry, ops):
        for name in entry.operators:
            operator = _operator(name)
            if operator is not None:
                _check(operator, name)
                found[operator] = name
            elif entry.name not in GROUPS:
                raise InputError(f"--recompute-policy ops({entry.name}): torch {torch.__version__} has no operator {name}")
    return found


def _operator(name: str) -> Any:
    namespace, operator, overload = name.split(".")
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    return getattr(packet, overload, None)


def _check(operator: Any, name: str) -> None:
    if operator._schema.is_mutable:
        raise InputError(f"--recompute-policy ops({name}): it writes into its argument, and what it returns cannot be kept")
    if torch.Tag.nondeterministic_seeded in operator.tags and name not in IN_GROUPS:
        raise InputError(f"--recompute-policy ops({name}): it draws random numbers. In a replay without it all later draws would "
                         "be others, and the gradients wrong")


def _draws_dropout(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an attention kernel draws random numbers."""
    names = [argument.name for argument in operator._schema.arguments]
    if "dropout_p" not in names:
        return False
    return dict(zip(names, args, strict=False), **kwargs).get("dropout_p", 0.0) > 0.0


class _Run:
    """The function that torch's checkpoint runs, in forward and again in backward, and what it keeps besides its arguments."""

    def __init__(self, function: Callable[..., Any], replay: Callable[..., Any], results: KeptResults, rng: Generators) -> None:
        self._function, self._replay, self._results, self._rng = function, replay, results, rng
        randomness = Randomness.now(rng)
        self._streams = randomness.names
        self._states = [_Saved(state) for state in randomness.copies()]
        self._kept: dict[Any, dict[int, Any]] = {}
        self._replaying = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._replay if self._replaying else self._function)(*args, **kwargs)

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Around the forward, and around each replay."""
        keeping, reusing = create_selective_checkpoint_contexts(self._results.decide)
        self._kept = keeping.storage
        return self._results.under(keeping), _Reentrant(lambda: self._replayed(reusing))

    def save_results(self) -> None:
        """After the forward: hands what was kept to the saved-tensor hooks. RuntimeError: one was written to in the meantime."""
        for operator, calls in self._kept.items():
            for number, result in calls.items():
                calls[number] = tree_map(lambda value, operator=operator: _SavedResult.of(value, operator), result)

    @contextmanager
    def _replayed(self, reusing: Any) -> Iterator[None]:
        randomness = Randomness(self._rng, self._streams, [state.tensor() for state in self._states])
        # torch takes out each result that it has used: from a copy, so that another backward finds it again.
        reusing.storage = {operator: dict(calls) for operator, calls in self._kept.items()}
        self._replaying = True
        try:
            with randomness.replayed(), recomputing(), self._results.under(reusing):
                yield
        finally:
            self._replaying = False


class _Saved:
    """A tensor handed to the saved-tensor hooks in force, as autograd does. Lives as long as the graph needs it."""

    def __init__(self, tensor: Tensor) -> None:
        hooks = hooks_in_force()
        self._packed = tensor if hooks is None else hooks.pack(tensor)
        self._unpack = None if hooks is None else hooks.unpack
        self._version = tensor._version

    def tensor(self) -> Tensor:
        """The tensor, apart from any graph. RuntimeError: it was written to; with hooks in force that is theirs to notice."""
        if self._unpack is not None:
            return self._unpack(self._packed).detach()
        if self._packed._version != self._version:
            raise RuntimeError(f"a tensor {list(self._packed.shape)} kept for backward has been modified by an inplace "
                               f"operation: is at version {self._packed._version}, expected {self._version}")
        return self._packed.detach()


class _SavedResult(_Saved):
    """A kept result, in its place among those of torch's selective checkpoint."""

    @classmethod
    def of(cls, value: Any, operator: Any) -> Any:
        """In place of a value that torch keeps: what was a tensor. (The rest are numbers, and marks of results not kept.)"""
        tensor = getattr(value, "val", None)
        if not isinstance(tensor, Tensor):
            return value
        if tensor._version != value.version:
            raise RuntimeError(f"the result of {operator} is to be kept for backward, but was written to later in the layer")
        return cls(tensor)

    def get_val(self, _: bool) -> Tensor:
        """The tensor; called by torch in a replay."""
        return self.tensor()


class _Reentrant:
    """A context that can be entered again: torch enters the replay's once for every backward."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make, self._stack = make, ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(self._make())

    def __exit__(self, *exception: Any) -> bool | None:
        return self._stack.__exit__(*exception)
