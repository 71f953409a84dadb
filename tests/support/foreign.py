"""Models that are not ours: how to train them, and the exact comparison of two trainings.

    foreign_families.py    models of transformers, called as by default
    foreign_layers.py      layers of plain torch with every kind of output, argument, side channel
    this file              `train` runs a model in a situation: twice into the same gradients, under
                           autocast, with most parameters frozen, through functional_call and so on.
                           `differences` compares two outcomes bit for bit.

This file depends on no recomputation engine: the argument `prepare` puts one on the model. Dropout
is on in every model that has it.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.pytorch_utils import Conv1D

from tests.support.equality import difference

SEED = 3


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """A model that is not ours.

    build: returns the model, in training mode.
    loss: returns the model's loss on the batch `number`. Equal numbers give equal batches.
    lists: the names of the lists of layers that get a policy.
    inner: the name of a list of modules inside one of these layers.
    may_refuse: whether an engine may refuse the model with one clear error. If False, the gradients
        must be equal.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], Tensor]
    lists: tuple[str, ...] = ("layers",)
    inner: str | None = None
    may_refuse: bool = False


@dataclass(frozen=True)
class Outcome:
    """The result of a training: losses, gradients, buffers, and the state of torch's generator.

    The gradient of a parameter without one is None.
    """

    losses: list[Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    generator: Tensor


Prepare = Callable[[nn.Module], nn.Module | None]


def train(foreign, situation="two micro-batches", prepare=None):
    """Builds the model from a fixed seed and trains it in the situation. Returns the outcome.

    prepare: changes the model before the training, or returns another one.
    """
    torch.manual_seed(SEED)
    model = foreign.build()
    if "adapters" in situation:
        freeze_all_but_adapters(model)
    model = (prepare(model) if prepare is not None else None) or model
    torch.manual_seed(SEED + 1)
    random.seed(SEED)
    return SITUATIONS[situation](model, foreign)


def differences(expected, found):
    """Returns one line for everything that is not equal to the bit."""
    lines = [
        f"loss {number}"
        for number, (one, other) in enumerate(zip(expected.losses, found.losses, strict=True))
        if not torch.equal(one, other)
    ]
    assert expected.gradients.keys() == found.gradients.keys()
    lines += [
        f"gradient of {name}: {error}"
        for name, one in expected.gradients.items()
        if (error := _unequal(one, found.gradients[name]))
    ]
    lines += [
        f"buffer {name}"
        for name, one in expected.buffers.items()
        if not torch.equal(one, found.buffers[name])
    ]
    return lines + (
        [] if torch.equal(expected.generator, found.generator) else ["torch's generator"]
    )


def _unequal(one, other):
    if one is None or other is None:
        return None if one is other else "lost" if other is None else "made up: it was None"
    return None if torch.equal(one, other) else f"off by {difference(one, other):.1e}"


def outcome(model, losses, gradients=None):
    """Returns the outcome of a training, under the names that the model has without wrappers.

    gradients: by default those in the parameters' `.grad`.
    """
    if gradients is None:
        gradients = {
            clean(name): _copy(parameter.grad) for name, parameter in model.named_parameters()
        }
    return Outcome(
        [loss.detach().clone() for loss in losses],
        gradients,
        {clean(name): buffer.clone() for name, buffer in model.named_buffers()},
        torch.get_rng_state(),
    )


def clean(name):
    """Returns a name without the prefixes of torch.compile and DistributedDataParallel."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def _copy(tensor):
    return None if tensor is None else tensor.detach().clone()


def two_micro_batches(model, foreign, *, autocast=False):
    losses = []
    for number in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses.append(foreign.loss(model, number))
        losses[-1].backward()
    return outcome(model, losses)


def _in_flight(model, foreign):
    """Runs two forwards, as a pipeline does, and the later backward first."""
    losses = [foreign.loss(model, number) for number in range(2)]
    for one in reversed(losses):
        one.backward()
    return outcome(model, losses)


def _two_backwards(model, foreign):
    one = foreign.loss(model, 0)
    one.backward(retain_graph=True)
    one.backward()
    return outcome(model, [one])


def _autograd_grad(model, foreign):
    """Computes the gradients by torch.autograd.grad, which accumulates nothing."""
    named = {
        clean(name): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    one = foreign.loss(model, 0)
    found = torch.autograd.grad(one, list(named.values()), allow_unused=True)
    return outcome(model, [one], dict(zip(named, found, strict=True)))


def _second_order(model, foreign):
    """Adds a penalty on the gradients' norm, which needs backward through a backward."""
    one = foreign.loss(model, 0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    first = torch.autograd.grad(one, trained, create_graph=True, allow_unused=True)
    penalty = sum(
        (gradient.square().sum() for gradient in first if gradient is not None), torch.zeros(())
    )
    (one + penalty).backward()
    return outcome(model, [one, penalty])


class _Whole(nn.Module):
    """The model and its loss as one module, for functional_call."""

    def __init__(self, model, foreign):
        super().__init__()
        self.model, self._loss = model, foreign.loss

    def forward(self, number):
        """Returns the loss."""
        return self._loss(self.model, number)


def _functional_call(model, foreign):
    """Calls the model with other weights. When backward runs, the module holds its own again."""
    weights = {
        name: (parameter.detach() * 1.25).requires_grad_(parameter.requires_grad)
        for name, parameter in model.named_parameters()
    }
    one = functional_call(
        _Whole(model, foreign), {f"model.{name}": weight for name, weight in weights.items()}, (0,)
    )
    one.backward()
    return outcome(model, [one], {clean(name): weight.grad for name, weight in weights.items()})


def _weight_written(model, foreign):
    """Changes the layers' weights between forward and backward, which plain torch refuses."""
    one = foreign.loss(model, 0)
    with torch.no_grad():
        for name in foreign.lists:
            for parameter in model.get_submodule(name).parameters():
                parameter.mul_(1.5)
    one.backward()
    return outcome(model, [one])


under_autocast = partial(two_micro_batches, autocast=True)
SITUATIONS = {
    "two micro-batches": two_micro_batches,
    "two forwards in flight": _in_flight,
    "bf16 autocast": under_autocast,
    "adapters": two_micro_batches,
    "adapters under bf16 autocast": under_autocast,
    "backward twice": _two_backwards,
    "torch.autograd.grad": _autograd_grad,
    "functional_call": _functional_call,
    "second-order gradients": _second_order,
    "weights written before backward": _weight_written,
}


class Adapter(nn.Module):
    """A frozen linear layer and a trained low-rank update beside it, with dropout on the update's
    input (LoRA)."""

    def __init__(self, base):
        super().__init__()
        rows, columns = (
            base.weight.shape if isinstance(base, Conv1D) else reversed(base.weight.shape)
        )
        self.base, self.dropout = base, nn.Dropout(0.1)
        self.down, self.up = nn.Linear(rows, 2, bias=False), nn.Linear(2, columns, bias=False)

    @property
    def weight(self):
        """Returns the frozen weight. T5 reads the dtype of a linear layer's weight."""
        return self.base.weight

    def forward(self, hidden_states):
        """Returns the sum of both. Its shape is that of the frozen layer's output."""
        return self.base(hidden_states) + self.up(self.down(self.dropout(hidden_states)))


ADAPTED = frozenset({"c_attn", "q_proj", "v_proj", "q", "v", "query", "value", "in_proj", "first"})


def freeze_all_but_adapters(model):
    """Freezes every parameter, embeddings included, and puts adapters beside the projections of
    queries and values."""
    model.requires_grad_(False)
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if name in ADAPTED
    ]
    assert found, "nothing to adapt"
    for parent, name, child in found:
        setattr(parent, name, Adapter(child))
    model.train()


def count_unequal(expected, found, tolerance):
    """Returns how many gradients are "wrong", "rounded", "lost" and "made up".

    "wrong" differs by more than `tolerance`, "rounded" by less. "lost" is None instead of a
    gradient, "made up" is a gradient instead of None. Errors are relative to the gradient's largest
    value, or to a 10,000th of the model's largest one if that is more. The floor is for gradients
    that are 0 except for rounding, such as that of a key's bias.
    """
    kinds = {"wrong": 0, "rounded": 0, "lost": 0, "made up": 0}
    largest = [
        one.abs().max().item()
        for one in expected.gradients.values()
        if one is not None and one.numel()
    ]
    floor = 1e-4 * max(largest, default=0.0)
    for name, one in expected.gradients.items():
        other = found.gradients[name]
        if one is None or other is None:
            kinds["lost"] += other is None and one is not None
            kinds["made up"] += one is None and other is not None
        elif not torch.equal(one, other):
            kinds["wrong" if difference(one, other, floor) > tolerance else "rounded"] += 1
    return kinds
