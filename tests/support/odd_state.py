"""Layers with state, and contexts around a forward, that a replay must restore or refuse.

Recomputation used to train them wrongly without an error. The names are rows of
docs/who-is-right.md.
"""

import contextvars
import copy
import itertools
import math
import os
import random
import threading
from array import array
from collections import Counter, OrderedDict, UserDict, deque, namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import CellType, MethodType
from typing import ClassVar
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.overrides import TorchFunctionMode

from megatron_lite.parallel.torch_internals import TorchDispatchMode
from tests.support.foreign import Foreign
from tests.support.odd_layers import Block, Model, Norms, batches


def plainly(model, number):
    return model(batches()[number])


class Slots:
    """Has an unset slot, a private one, and one for weak references."""

    __slots__ = ("__count", "__weakref__", "cache")

    def __init__(self):
        self.__count = 0

    def next(self):
        """Counts, and makes its tensor at the first call."""
        self.__count += 1
        if not hasattr(self, "cache"):
            self.cache = torch.ones(1)
        return self.__count


class Sequel(Block):
    """Keeps its state with its graph, for the next segment (BPTT)."""

    mem = None

    def forward(self, hidden):
        past = 0.0 if self.mem is None else torch.tanh(self.second(self.dropout(self.mem)))
        self.mem = self.first(hidden)
        return self.body(hidden) + past


def segments(model, number):
    """Returns the loss over three segments, each of which reads the memory of the one before."""
    for layer in model.layers:
        layer.mem = None
    return sum(plainly(model, each) for each in (number, 1, 2))


def frozen_in_forward(model, number):
    for layer in model.layers:
        layer.first.requires_grad_(False)
    loss = plainly(model, number)
    for layer in model.layers:
        layer.first.requires_grad_(True)
    return loss


class ParameterHook(Block):
    """Registers a hook on its own parameter in the first forward."""

    hook = None

    def forward(self, hidden):
        if self.hook is None:
            self.hook = self.first.weight.register_hook(lambda grad: 2 * grad)
        return self.body(hidden)


def doubled(module, args, output):
    """A hook that doubles the result of a module."""
    return 2 * output


class InnerHook(Block):
    """Registers a hook in its first forward. again: anew in each."""

    hook, again = None, False

    def forward(self, hidden):
        if self.again and self.hook:
            self.hook.remove()
        if self.again or not self.hook:
            self.hook = self.first.register_forward_hook(doubled)
        return self.body(hidden)


class HookAgain(InnerHook):
    again = True


def replace_forward(inner):
    inner.forward = lambda x: F.linear(x, 2 * inner.weight, inner.bias)


class ReplacesForward(Block):
    """Changes its inner forward once, in the first call."""

    def forward(self, hidden):
        hidden = self.body(hidden)
        replace_forward(self.first)
        return hidden


class WritesView(Model):
    """Its first layer gets a tensor and a view of it, and writes the view."""

    class Layer(Block):
        def forward(self, hidden, row):
            row.mul_(3.0)
            return self.body(hidden)

    def __init__(self):
        super().__init__(self.Layer)

    def forward(self, x):
        hidden = self.embedding(x).sin()
        return self.layers[0](row=hidden[0], hidden=hidden).square().mean()


class ReadsView(WritesView):
    """It reads both."""

    class Layer(Block):
        def forward(self, hidden, row):
            return self.body(hidden + row)


class Spectral(Block):
    """A layer with spectral norm, which updates its vectors in each forward."""

    def __init__(self, norm=spectral_norm):
        super().__init__()
        self.first = norm(self.first)


class HostGenerators(Block):
    """Draws from the generators of Python and NumPy; skips its body at random."""

    def forward(self, hidden):
        scale = float(np.random.normal())
        return hidden * scale + (
            self.body(hidden) if random.random() < 0.8 else hidden.sin()
        ) * random.gauss(1.0, 0.1)


def drawing(model, number):
    """Draws between forward and backward."""
    return plainly(model, number) * (random.random() > -1)


class Differentiates(Block):
    """A layer whose forward runs a backward, as models do that compute forces from an energy."""

    def forward(self, hidden):
        with torch.enable_grad():
            point = hidden.detach().requires_grad_()
            (force,) = torch.autograd.grad(
                torch.tanh(self.first(point)).square().sum(), point, create_graph=True
            )
        return self.body(hidden) + force.sin()


class WritesArgument(Block):
    def forward(self, hidden):
        hidden.mul_(2).add_(1)
        return self.body(hidden.clone()) + hidden.mul_(0.5)


class WritesProduct(Block):
    """Writes to its argument, which is a product of the layer before."""

    def forward(self, hidden):
        hidden = F.relu(hidden, inplace=True)
        return self.second(torch.tanh(self.first(hidden)))


class AccumulatesInside(Block):
    """Adds to the gradients of its own parameters in its forward."""

    def forward(self, hidden):
        with torch.enable_grad():
            self.first(hidden.detach()).square().mean().backward()
        return self.body(hidden)


class WritesParameter(Block):
    def forward(self, hidden):
        with torch.no_grad():
            self.first.weight.mul_(0.9)
        return self.body(hidden)


class ActNorm(Block):
    """Initializes its scale from the first batch."""

    def __init__(self, by_data=True):
        super().__init__()
        self.scale, self.by_data = nn.Parameter(torch.ones(6)), by_data
        self.register_buffer("initialized", torch.tensor(0))

    def forward(self, hidden):
        if not self.initialized:
            scale = 1 / (hidden.detach().std(0) + 1)
            if self.by_data:
                self.scale.data.copy_(scale)
            else:
                with torch.no_grad():
                    self.scale.copy_(scale)
            self.initialized.fill_(1)
        return self.body(hidden * self.scale)


class OwnRandom(Block):
    """Draws from a generator of its own."""

    def __init__(self, make):
        super().__init__()
        self.random = make(3)

    def forward(self, hidden):
        return self.body(hidden) * float(self.random.random())


class NestedGenerators(Block):
    def __init__(self):
        super().__init__()
        self.random = {"a": [torch.Generator().manual_seed(3)], "b": (random.Random(3),)}

    def forward(self, hidden):
        noise = torch.rand(hidden.shape, generator=self.random["a"][0])
        return self.body(hidden) * noise * self.random["b"][0].random()


class Load(Block):
    """Plain attributes written in place: a tensor, an array, what is in nested containers."""

    def __init__(self):
        super().__init__()
        self.load, self.count = torch.zeros(6), np.zeros(1)
        self.nested = {"loads": [torch.zeros(6)], "seen": ([0],)}

    def forward(self, hidden):
        self.load.add_(hidden.detach().mean(0))
        self.count += 1
        self.nested["loads"][0].add_(self.load)
        self.nested["seen"][0][0] += 1
        shift = self.load + self.nested["loads"][0] + float(self.count[0])
        return self.body(hidden + shift * self.nested["seen"][0][0])


class Counts(Block):
    """Counts its calls in a number of Python."""

    calls = 0

    def forward(self, hidden):
        self.calls += 1
        return self.body(hidden * self.calls)


class Collector:
    def __init__(self):
        self.total, self.log, self.kinds = 0.0, [], Counter()


class Collects(Block):
    """Changes an object that it holds."""

    def __init__(self):
        super().__init__()
        self.collector = Collector()

    def forward(self, hidden):
        self.collector.total += 1.0
        return self.body(hidden * self.collector.total)


class OnlyCounts(Collects):
    """Counts its calls in an object, which all layers may share."""

    everyone = Collector()

    def __init__(self, shared=False):
        super().__init__()
        self.stats = Counter()
        self.collector = self.everyone if shared else Collector()

    def forward(self, hidden):
        self.collector.total += 1.0
        self.collector.log.append(self.collector.total)
        self.collector.kinds["call"] += 1
        self.stats["call"] += 1
        return self.body(hidden)


CountsTogether = partial(OnlyCounts, shared=True)


class CountsOutside(Block):
    """Counts in an object that is reached by a function alone: no replay can put it back."""

    def __init__(self):
        super().__init__()
        self.next = partial(next, itertools.count())

    def forward(self, hidden):
        return self.body(hidden * (1.0 + self.next()))


TALLY, SUMS = Collector(), torch.zeros(1)


class Tallies(torch.autograd.Function):
    """Counts in an object of this module."""

    @staticmethod
    def forward(ctx, value):
        TALLY.total += 1
        return value + TALLY.total


def counting():
    """Returns a layer that counts around its methods, in a default, its class and this module, and
    draws a number that it puts back."""
    number = 0
    TALLY.__init__()
    SUMS.zero_()

    class CountsAround(Block):
        sums, calls = torch.zeros(1), 0

        @property
        def length(self):
            return TALLY.log.append(1) or len(TALLY.log)

        @classmethod
        def count(cls):
            cls.calls += 1

        @torch.no_grad()
        def add(self):
            return Tallies.apply(SUMS.add_(1)) + self.sums.add_(1)

        def forward(self, hidden, seen=[0]):  # noqa: B006
            nonlocal number
            number += 1
            seen[0] += 1
            self.count()
            state = random.getstate()
            counts = number + seen[0] + self.length + self.calls + random.random()
            random.setstate(state)
            return self.body(hidden * (counts + self.add()))

    return CountsAround()


class Routes(Block):
    """Sends two tokens to its expert, without top-k, by a noise that no replay can repeat."""

    noise = staticmethod(lambda size: torch.tensor([*os.urandom(size)]) / 255)

    def forward(self, hidden):
        scores = self.first(hidden)[:, 0].sigmoid() + self.noise(len(hidden))
        chosen = scores.argsort()[-2:]
        return hidden.index_add(0, chosen, self.body(hidden[chosen]))


def counted_noise():
    """Returns a router whose noise comes from a counter that only a function knows."""
    layer, counter = Routes(), itertools.count(1)
    layer.noise = lambda size: torch.tensor([math.sin(9.0 * next(counter)) for _ in range(size)])
    return layer


class RoutesAgain(Routes):
    """Its noise comes from torch's generator, so a replay repeats it."""

    noise = staticmethod(torch.rand)


def adapters_exchanged(model, number):
    """Chooses other adapters after the forward, as peft's `set_adapter` does."""
    for chosen in ("left", "right") if number else ("right", "left"):
        for layer in model.layers:
            layer.use(chosen)
        if chosen == ("left" if number else "right"):
            loss = plainly(model, number)
    return loss


class Adapters(Block):
    def __init__(self):
        super().__init__()
        self.adapters = nn.ModuleDict({name: nn.Linear(6, 6) for name in ("left", "right")})
        self.active = ["left"]

    def use(self, name):
        self.active = [name]
        for key, adapter in self.adapters.items():
            adapter.requires_grad_(key == name)

    def forward(self, hidden):
        return self.body(hidden) + sum(self.adapters[name](hidden) for name in self.active)


class WritesSaved(Block):
    """Writes to a result that an operator saved; plain torch refuses."""

    def forward(self, hidden):
        return torch.sigmoid(self.body(hidden)).mul_(2.0)


class RRelu(Block):
    def forward(self, hidden):
        return F.rrelu(self.body(hidden), training=True)


class Quantizes(Block):
    def forward(self, hidden):
        weight = self.first.weight
        before, weight.data = weight.data, 2 * weight.data
        hidden = hidden + self.first(hidden)[:, :6]
        weight.data = before
        return hidden


class RReluBeforeSum(Block):
    def forward(self, hidden):
        return hidden + F.rrelu(self.first(hidden), training=True)[:, :6]


def double_tanh(self, func, types, args=(), kwargs=None):
    result = func(*args, **(kwargs or {}))
    return 2 * result if func in (torch.tanh, torch.ops.aten.tanh.default) else result


class Doubles(TorchFunctionMode):
    __torch_function__ = double_tanh


class DoublesOperators(TorchDispatchMode):
    __torch_dispatch__ = double_tanh


def around(enter):
    """Returns a loss whose forward runs in a context, which backward does not have."""

    def loss(model, number):
        with enter(model):
            return plainly(model, number)

    return loss


def later(loss):
    """Returns a loss that is the plain one in the first two calls."""

    def changing(model, number):
        model.calls = getattr(model, "calls", 0) + 1
        return loss(model, number) if model.calls > 2 else plainly(model, number)

    return changing


def hook(model):
    return model.layers[1].first.register_forward_hook(doubled)


@contextmanager
def replaced(model):
    replace_forward(model.layers[1].first)
    yield
    del model.layers[1].first.forward


@contextmanager
def default_dtype(model):
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


class MakesTensors(Block):
    def forward(self, hidden):
        return self.body(hidden) + (torch.ones(6) / 3).sum().float()


SCALE = contextvars.ContextVar("scale", default=1.0)
LOCAL = threading.local()


class ReadsContext(Block):
    """Reads a setting of a library, which its caller sets for the forward alone."""

    def forward(self, hidden):
        return self.body(hidden * SCALE.get() * getattr(LOCAL, "scale", 1.0))


@contextmanager
def variable(model):
    token = SCALE.set(2.0)
    yield
    SCALE.reset(token)


def local(model):
    return mock.patch.object(LOCAL, "scale", 2.0, create=True)


def norm():
    return nn.BatchNorm1d(6)


class HiddenNorm(Block):
    """Holds a module that is none of its own, and gives the next layer to itself."""

    following = None

    def __init__(self):
        super().__init__()
        self.hidden = [norm()]

    def forward(self, hidden):
        hidden = self.body(self.hidden[0](hidden))
        return self.following[0](hidden) if self.following else hidden


class Nested(Model):
    """Its layers call each other, so a replay of the first runs all of them."""

    def __init__(self):
        super().__init__(HiddenNorm)
        self.norms = nn.ModuleList(layer.hidden[0] for layer in self.layers)
        for layer, following in itertools.pairwise(self.layers):
            layer.following = [following]

    def forward(self, x):
        return self.layers[0](self.embedding(x)).square().mean()


class Remote(Block):
    """Gets a module, functions and a tensor with attributes, all of which count."""

    def forward(self, hidden, norm, count, add):
        add(hidden.square().mean())
        return self.body(norm(hidden) * (1 + count() % 3) * hidden.scale)


class Remotes(Model):
    def __init__(self):
        super().__init__(Remote)
        self.norm, self.count, self.losses = norm(), Collector(), []

    def forward(self, x):
        number, shift = 0, self.embedding(x)

        def count():
            nonlocal number
            number += 1
            return number

        hidden = shift
        for layer in self.layers:
            hidden.scale = 1.5
            hidden = layer(hidden, lambda x: self.norm(x) + shift, count, self.losses.append)
        return hidden.square().mean()


def caught(model, number):
    """Adds what hooks caught, in a list that is emptied before backward."""
    if not hasattr(model, "caught"):
        model.caught = []
        for layer in model.layers:
            layer.first.register_forward_hook(
                lambda module, args, output: model.caught.append(output)
            )
    loss = plainly(model, number) + sum(each.square().mean() for each in model.caught)
    model.caught.clear()
    return loss


SHARED = []


def share(loss):
    """Collects a loss in a list of this module, as megablocks does."""
    SHARED.append(loss)


class Shares(Block):
    """Collects losses in lists of its class and of its module. It counts in a dictionary that has
    attributes."""

    losses: ClassVar = []

    def forward(self, hidden, counts):
        counts.calls += 1
        hidden = self.body(hidden) * counts.calls
        self.losses.append(hidden.mean())
        share(hidden.square().mean())
        return hidden


def shared(model, number):
    counts = UserDict()
    counts.calls = 0
    hidden = model.embedding(batches()[number])
    for layer in model.layers:
        hidden = layer(hidden, counts)
    loss = sum([hidden.sum(), *Shares.losses, *SHARED])
    Shares.losses.clear()
    SHARED.clear()
    return loss


def by_many_vectors(model, number):
    rows = torch.autograd.functional.jacobian(
        model, batches()[number], create_graph=True, vectorize=True
    )
    return rows.square().sum()


def in_inference_mode(model, number):
    loss = plainly(model, number)
    with torch.inference_mode():
        loss.backward()
    return loss.detach().clone().requires_grad_()


class Graphs(Model):
    """Passes a sparse matrix to each layer."""

    class Layer(Block):
        def forward(self, hidden, matrix):
            return torch.sparse.mm(matrix, self.body(hidden))

    def __init__(self):
        super().__init__(self.Layer)

    def forward(self, x):
        hidden, matrix = self.embedding(x), torch.eye(5).to_sparse()
        for layer in self.layers:
            hidden = layer(hidden, matrix)
        return hidden.square().mean()


class OnlyNorms(Norms):
    """Draws no random numbers, so other engines are equally wrong in each run."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.0)


def scripted():
    """Returns a function whose second run saves the same tensors in another order."""
    source = "def f(x: Tensor):\n    return x * torch.sigmoid(1.7 * x) + torch.tanh(x * 0.5)\n"
    return torch.jit.CompilationUnit(source).f


class Scripted(Block):
    """Calls a scripted function, and a traced part without the attributes of a module."""

    def __init__(self):
        super().__init__()
        traced = torch.jit.trace(nn.Linear(6, 6).eval(), batches()[0])
        self.gated, self.frozen = scripted(), torch.jit.freeze(traced)

    def forward(self, hidden):
        return self.gated(self.body(hidden)) + self.frozen(hidden)


Sums = namedtuple("Sums", ["mean", "add"])


class Items(OrderedDict):
    """Has an attribute for each item, as the outputs of transformers do."""

    clear = update = None

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        setattr(self, key, value)


class CountsEverywhere(Block):
    """Counts in objects with slots (its own and Python's), arrays, variables of functions, a
    partial, behind a method, in subclasses of containers, in objects that move, and in one that
    only some calls change."""

    def __init__(self):
        super().__init__()
        number, seen = 0, []

        def count(boxes):
            nonlocal number
            number += 1
            boxes[0] += 1
            seen.append(float(number))
            return number + boxes[0] + len(seen)

        def total(self):
            self.total += 1
            return self.total

        self.slots, self.path = Slots(), Path("here")
        self.bytes, self.floats = bytearray(2), array("d", [0.0])
        self.count, self.total = partial(count, [0]), MethodType(total, Collector())
        self.cells = [CellType([0]) for _ in range(4)]
        self.items, self.late, self.append = Items(calls=0), Collector(), [].append
        self.rows = deque(Collector() for _ in range(2))
        self.sums = Sums(torch.zeros(1), partial(torch.Tensor.add_, torch.zeros(1), 1))

    def forward(self, hidden):
        for each in self.cells:
            each.cell_contents[0] += 1
        hidden = hidden * sum(each.cell_contents[0] % 3 for each in self.cells)
        self.bytes[0] += 1
        self.floats[0] += 1
        self.append(1)
        self.items["calls"] += 1
        self.rows.rotate()
        self.rows[0].total += 1
        self.late.total += self.items.calls % 3 == 0
        hidden = hidden * (1 + self.sums.mean.add_(self.rows[0].total) % 7 + self.sums.add() % 3)
        hidden = hidden * (1 + self.late.total + self.items.calls % 2)
        counts = self.slots.next() % 5 + self.count() % 5 + self.total() % 3 + self.floats[0] % 2
        factor = (
            len(self.append.__self__)
            + counts
            + self.bytes[0] % 3
            + len(str(self.path))
            + hash(self.path) % 3
        )
        return self.body(hidden * factor / self.slots.cache)


class LateNorm(nn.Module):
    """Its BatchNorm gets zeros at first, which leave the mean as it was."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.norm = norm()

    def forward(self, hidden):
        self.calls += 1
        return hidden + self.norm(hidden * float(self.calls > 2))


def traced():
    model = Model(Block)
    model.layers[1] = torch.jit.trace(model.layers[1], batches()[0], check_trace=False)
    return model


def by_a_copy(model, number):
    """Calls a copy of a layer, which has other weights and shares its forward."""
    if not hasattr(model, "extra"):
        model.extra = copy.copy(model.layers[1])
        model.extra._modules = {**model.extra._modules, "first": nn.Linear(6, 12)}
    return model.extra(model.layers[0](model.embedding(batches()[number]))).square().mean()


def in_two_threads(model, number):
    """Runs two backwards at once. Returns a loss whose gradient is the sum of theirs."""
    parameters = [*model.parameters()]
    losses = [plainly(model, each) for each in (number, 2)]
    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(lambda loss: torch.autograd.grad(loss, parameters), losses)]
    return sum(
        (one * (first + second)).sum()
        for one, first, second in zip(parameters, *found, strict=True)
    )


def case(build, loss=plainly, *, may_refuse=False):
    """Returns a model. build: makes the model, or one layer of it."""
    whole = build in (WritesView, ReadsView, Nested, Remotes, Graphs, traced)
    make = build if whole else (lambda: Model(build))
    return Foreign(build=make, loss=loss, may_refuse=may_refuse)


STATES = {
    "a memory with its graph, for the next segment": case(Sequel, segments),
    "its parameters, frozen during the forward alone": case(Block, frozen_in_forward),
    "a hook on its own parameter, registered once": case(ParameterHook),
    "a hook on an inner module, registered once": case(InnerHook),
    "a hook on an inner module, registered anew": case(HookAgain),
    "an inner forward, replaced once": case(ReplacesForward),
    "an argument and a view of it, which it writes": case(WritesView, may_refuse=True),
    "an argument, which it writes": case(WritesArgument),
    "its own parameter, which it writes": case(WritesParameter),
    "ActNorm, by weight.data": case(ActNorm),
    "ActNorm, without gradients": case(partial(ActNorm, by_data=False)),
    "NumPy's generator": case(partial(OwnRandom, np.random.default_rng)),
    "NumPy's older generator": case(partial(OwnRandom, np.random.RandomState)),
    "a Random of Python": case(partial(OwnRandom, random.Random)),
    "the generators of Python and NumPy": case(HostGenerators),
    "generators in containers": case(NestedGenerators),
    "plain tensors, arrays and nested lists that it writes": case(Load),
    "a number that it changes and reads": case(Counts),
    "an object that it changes and reads": case(Collects),
    "objects that only count": case(OnlyCounts),
    "an object that only counts, of all layers": case(CountsTogether),
    "a counter that only a function knows": case(CountsOutside, may_refuse=True),
    "a router whose noise repeats": case(RoutesAgain),
    "a router whose noise does not repeat": case(counted_noise, may_refuse=True),
    "a copy (copy.copy) with other weights, which is called": case(Block, by_a_copy),
    "BatchNorm, and two backwards in two threads": case(OnlyNorms, in_two_threads),
    "adapters exchanged before backward": case(Adapters, adapters_exchanged),
    "a saved result that it writes afterwards": case(WritesSaved, may_refuse=True),
    "RReLU, last": case(RRelu),
    "RReLU, before a sum": case(RReluBeforeSum),
}
CONTEXTS = {
    "a mode on torch's functions": case(Block, around(lambda model: Doubles())),
    "the same, from the third call on": case(Block, later(around(lambda model: Doubles()))),
    "a hook on an inner module": case(Block, around(hook)),
    "a hook on all modules": case(
        Block,
        around(
            lambda model: nn.modules.module.register_module_forward_hook(
                lambda module, args, output: 2 * output if isinstance(module, nn.Dropout) else None
            )
        ),
    ),
    "another inner forward": case(Block, around(replaced)),
    "the default dtype": case(MakesTensors, around(default_dtype)),
    "a context variable of a library": case(ReadsContext, around(variable)),
    "a thread-local variable": case(ReadsContext, around(local), may_refuse=True),
}
# These have no row on the page.
UNLISTED = {
    "a weight that is another for one matmul": case(Quantizes),
    "a view of an argument, before it, which it reads": case(ReadsView),
    "objects with slots, that move or change late, arrays, functions": case(CountsEverywhere),
    "scripted functions and frozen traces": case(Scripted),
    "a product, which the next layer writes to": case(WritesProduct),
    "a backward into its own parameters": case(AccumulatesInside, may_refuse=True),
    "counters around methods, of classes and in globals; a draw put back": case(counting, drawing),
    "the older spectral norm": case(partial(Spectral, nn.utils.spectral_norm)),
    "a gradient of its own": case(Differentiates),
    "hidden modules, and layers that call each other": case(Nested),
    "modules, functions and attributes of arguments": case(Remotes),
    "what hooks caught, in a list that is emptied before backward": case(Block, caught),
    "lists of its class and of its module": case(Shares, shared),
    "a Jacobian by many vectors at once": case(Block, by_many_vectors),
    "a backward in inference mode": case(Block, in_inference_mode),
    "a sparse argument": case(Graphs),
    "BatchNorm on zeros at first": case(LateNorm),
    "a traced layer": case(traced),
    "a dispatch mode, from the third call on": case(
        Block, later(around(lambda model: DoublesOperators())), may_refuse=True
    ),
}
