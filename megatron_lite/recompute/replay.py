"""What every replay is, whichever engine runs it: the forward once more, under its conditions.

    random numbers, autocast    those of the forward, and afterwards those of before
    gradients                   on, since the replay exists for its graph or what its graph saves
    `is_recomputing()`          true
    inputs                      belong to no graph; `ReplayInputs` takes their gradients

What differs between the engines is how the inputs and states are kept, and where backward goes on:
checkpoint.py through the graph of the replay, hooked.py through that of the forward.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .phase import recomputing
from .randomness import Generators, Randomness, autocast_states, drawn_again


class RecomputeMismatch(RuntimeError):
    """A replay computed something else than its forward, so its gradients would be wrong."""


class Conditions:
    """The random numbers and the autocast of a forward. Make it right before the forward.

    rng: the streams that the function draws from; None if it draws nothing.
    kinds: the kinds of devices of the arguments, such as "cuda".
    """

    def __init__(self, rng: Generators | None, kinds: Iterable[str]) -> None:
        self.kinds = {"cpu", *kinds}
        self._randomness = None if rng is None else Randomness.of(rng)
        self.autocast = autocast_states(self.kinds)

    def take_states(self) -> list[Tensor]:
        """Returns copies of the generators' states, which the caller keeps from here on."""
        if not self._randomness:
            return []
        states = self._randomness.states
        self._randomness = self._randomness._replace(states=dict.fromkeys(states))
        # Snapshots share the tensors of streams that did not draw in between. With copies, each
        # call keeps as many bytes as the memory model predicts for it.
        return [state.clone() for state in states.values()]

    @contextmanager
    def repeated(self, states: Iterable[Tensor]) -> Iterator[None]:
        """Runs a block as a replay. states: those of `take_states`, which it does not change.

        The block is only the run. Its gradient runs under the settings that backward was called
        with, as it would without recomputation.
        """
        random = []
        if found := self._randomness:
            random = [found._replace(states=dict(zip(found.states, states, strict=True)))]
        with drawn_again(random), torch.enable_grad(), recomputing(), ExitStack() as around:
            for state in self.autocast:
                # A disabled autocast must be entered only if backward runs under an enabled one.
                if state["enabled"] or torch.is_autocast_enabled(state["device_type"]):
                    around.enter_context(torch.autocast(**state))
            yield


class ReplayInputs(torch.autograd.Function):
    """Makes the inputs of a replay results of an operation, and collects their gradients.

    A layer may write to such tensors in place, which autograd refuses for leaves that require grad.
    A leaf's `.grad` would get the strides of the leaf. A later sum over that gradient (the weight
    gradient of a norm) would add in another order, and the bits would differ from a run without
    recomputation.

    received: filled by backward with the gradient of each input, or None, by its number.
    """

    @staticmethod
    def forward(
        ctx: Any, received: dict[Any, Tensor], numbers: list[Any], *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.received, ctx.numbers = received, numbers
        # Without recomputation an input that no output depends on gets None, and not zeros.
        ctx.set_materialize_grads(False)
        return tuple(leaf.detach() for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.received.update(zip(ctx.numbers, grads, strict=True))
        return None, None, *[None] * len(grads)


def replay_inputs(values: dict[Any, Tensor]) -> tuple[dict[Any, Tensor], dict[Any, Tensor]]:
    """Returns tensors that belong to no graph as inputs of a replay that require grad, by their
    numbers, and the dictionary in which backward collects their gradients. Gradients are on."""
    received, inputs, plain = dict[Any, Tensor](), dict[Any, Tensor](), dict[Any, Tensor]()
    for name, tensor in values.items():
        tensor.requires_grad_()
        if tensor.is_nested and tensor.layout == torch.strided:  # no Function of Python takes it
            inputs[name] = torch.ops.aten.alias(tensor)
            inputs[name].register_hook(partial(received.__setitem__, name))
        else:
            plain[name] = tensor
    if plain:
        made = ReplayInputs.apply(received, [*plain], *plain.values())
        inputs |= zip(plain, made, strict=True)
    return inputs, received
