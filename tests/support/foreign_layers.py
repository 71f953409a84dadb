"""Models of plain torch whose layers have every kind of output, argument, write and state.

Each model is a chain: an embedding, three layers, a head and a loss. `Chain` calls its layers
through a function `follow`, which passes a layer its arguments and reads its output. The names of
the models are rows of docs/who-is-right.md.
"""

from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.foreign import Foreign
from tests.support.odd_layers import WIDTH, Block, InOrder, Model, Norms, SetsAux
from tests.support.odd_state import Spectral, WritesArgument


def plainly(chain, layer, x):
    """Passes x alone. The output is the next x."""
    return layer(x)


class Chain(Model):
    """A chain of three layers.

    losses: terms of the loss that a layer or its caller adds.
    memory: a value that `follow` keeps from layer to layer of one forward.
    """

    def __init__(self, layer, follow, frozen_embedding):
        super().__init__(layer)
        self.embedding = nn.Embedding(20, WIDTH).requires_grad_(not frozen_embedding)
        self.side, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self._follow = follow

    def forward(self, tokens):
        """Returns the loss."""
        x, self.losses, self.memory = self.embedding(tokens), [], None
        for layer in self.layers:
            x = self._follow(self, layer, x)
        loss = self.head(x).square().mean() + sum(self.losses, torch.zeros(()))
        self.losses, self.memory = [], None
        return loss


def chain_loss(model, number):
    """Returns the loss on 6 tokens."""
    return model(torch.randint(0, 20, (6,), generator=torch.Generator().manual_seed(60 + number)))


def chain(layer, follow=plainly, *, frozen_embedding=False, may_refuse=False, inner=None):
    """Returns the description of a chain of such layers."""
    return Foreign(
        build=lambda: Chain(layer, follow, frozen_embedding),
        loss=chain_loss,
        may_refuse=may_refuse,
        inner=inner,
    )


# ---- outputs


@dataclass
class Hidden:
    """An output of a class that torch's pytrees do not know."""

    x: Tensor
    extra: Tensor


class Pair(NamedTuple):
    """An output of a class that torch's pytrees know."""

    x: Tensor
    extra: Tensor


class Returning(Block):
    """Returns the hidden state and its mean square, packed by `form`."""

    def __init__(self, form):
        super().__init__()
        self._form = form

    def forward(self, x):
        """Returns the result of `form`."""
        x = super().forward(x)
        return self._form(x, x.square().mean())


def reading(read):
    """Returns a `follow` that adds the second part of a layer's output to the loss."""

    def follow(chain, layer, x):
        x, extra = read(layer(x))
        chain.losses.append(extra)
        return x

    return follow


class WithUnused(Block):
    """A layer whose second output nobody reads.

    Only this output reads the parameter `gauge`, so the gradient of `gauge` stays None.
    """

    def __init__(self):
        super().__init__()
        self.gauge = nn.Linear(WIDTH, 1)

    def forward(self, x):
        """Returns the hidden state and an output that nobody reads."""
        x = super().forward(x)
        return x, self.gauge(x)


class Chosen(Block):
    """Returns integers, booleans, None and numbers beside the hidden state."""

    def forward(self, x):
        """Returns the hidden state, the largest channels' numbers, a mask, None and a number."""
        x = super().forward(x)
        return x, x.argmax(-1), x > 0, None, 3


def choosing(chain, layer, x):
    """Reads all outputs of `Chosen`."""
    x, largest, mask, nothing, number = layer(x)
    assert nothing is None and largest.dtype == torch.int64
    return torch.where(mask, x * number, x.gather(-1, largest[:, None]))


class Unchanged(nn.Module):
    """Returns its argument, and a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        """Returns both, unchanged."""
        return x, self.scale


class Halves(Block):
    """Returns two views of one tensor."""

    def forward(self, x):
        """Returns the two halves of the channels."""
        return super().forward(x).chunk(2, dim=-1)


# ---- state


class Counting(Block):
    """A layer whose output depends on the number of its calls and on a running mean, in buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x):
        """Returns a tensor of the same shape."""
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().abs().mean()  # replaces the buffer's tensor
        return super().forward(x) * self.calls / self.mean


def collecting(chain, layer, x):
    """Adds the loss that the layer stored."""
    x = layer(x)
    chain.losses.append(layer.aux)
    return x


class Hooked(Block):
    """A layer with a forward hook inside that stores a hidden state for the loss.

    A replay stores another tensor in its place, which nobody reads.
    """

    def __init__(self):
        super().__init__()
        self.first.register_forward_hook(self._catch)

    def _catch(self, module, args, output):
        self.caught = output


def catching(chain, layer, x):
    """Adds a loss of the tensor that the hook stored."""
    x = layer(x)
    chain.losses.append(layer.caught.square().mean())
    return x


class Attended(Block):
    """A layer that reads a tensor which its caller set as an attribute before the call."""

    def forward(self, x):
        """Returns a tensor of the same shape."""
        return super().forward(x) + self.context * x


def with_context(chain, layer, x):
    """Sets one tensor, which needs a gradient, on all layers."""
    if chain.memory is None:
        chain.memory = chain.side(x)
    layer.context = chain.memory
    return layer(x)


# ---- arguments


class Given(Block):
    """A layer that takes tensors as keyword arguments, one of them inside a dictionary."""

    def forward(self, *, hidden, scale):
        """Returns a tensor of the same shape."""
        return super().forward(hidden["x"]) * scale + hidden["rest"][0]


def giving(chain, layer, x):
    """Passes tensors by keyword and in a dictionary. All need gradients."""
    side = chain.side(x)
    return layer(hidden={"x": x, "rest": [side]}, scale=side.sigmoid())


class Remembering(Block):
    """A layer with a cache: it appends its normed input to a list argument and reads the list."""

    def forward(self, x, cache):
        """Returns a tensor of the same shape."""
        cache.append(self.second(self.first(x)))
        return super().forward(torch.stack(cache).mean(0))


def remembering(chain, layer, x):
    """Passes one list to all layers."""
    chain.memory = [] if chain.memory is None else chain.memory
    return layer(x, chain.memory)


def writing_input(chain, layer, x):
    """Writes into the layer's argument after the call.

    The layer's backward does not read it, so plain torch allows the write.
    """
    given = x * 1.0
    out = layer(given)
    given.zero_()
    return out


class Adding(nn.Module):
    """A layer that reads its argument only in an addition, whose backward does not need it."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        """Returns a tensor of the same shape."""
        return self.fc((x + self.bias).tanh())


# ---- calls


def twice(chain, layer, x):
    """Runs each layer twice, with the same weights."""
    return layer(layer(x))


def partly_without_gradients(chain, layer, x):
    """Calls the layer first without gradients. The result is the target of its second call."""
    with torch.no_grad():
        target = layer(x)
    x = layer(x)
    chain.losses.append((x - target).square().mean())
    return x


class Failing(Block):
    """A layer whose first call raises an error halfway."""

    failed = False

    def forward(self, x):
        """Returns a tensor of the same shape."""
        if not self.failed:
            self.dropout(self.first(x))
            self.failed = True
            raise ArithmeticError("once")
        return super().forward(x)


def trying_again(chain, layer, x):
    """Calls the layer, and once again if it fails."""
    try:
        return layer(x)
    except ArithmeticError:
        return layer(x)


# ---- inner engines


class CheckpointInside(Block):
    """A layer that uses torch.utils.checkpoint inside."""

    def forward(self, x):
        """Returns a tensor of the same shape."""
        return checkpoint(super().forward, x, use_reentrant=False) * 2


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.kept = x.detach() * 2  # a plain attribute, which no saved-tensor hook sees
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x * ctx.kept * 1.5


class Custom(Block):
    """A layer with an autograd Function that saves one tensor and keeps another on its context."""

    def forward(self, x):
        """Returns a tensor of the same shape."""
        return _Cube.apply(super().forward(x).tanh())


class Recurrent(nn.Module):
    """A layer of nn.GRU and nn.TransformerEncoderLayer, with dropout."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, num_layers=2, dropout=0.2)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout=0.2)

    def forward(self, x):
        """Returns a tensor of the same shape."""
        return self.encoder(self.rnn(x)[0])


LAYERS = {
    "a tensor": chain(Block),
    "dictionary": chain(
        lambda: Returning(lambda x, y: {"x": x, "extra": y}), reading(itemgetter("x", "extra"))
    ),
    "list": chain(lambda: Returning(lambda x, y: [x, y]), reading(tuple)),
    "dataclass": chain(lambda: Returning(Hidden), reading(attrgetter("x", "extra"))),
    "named tuple": chain(lambda: Returning(Pair), reading(attrgetter("x", "extra"))),
    "nested tuple": chain(
        lambda: Returning(lambda x, y: ((x,), ({"y": y},))),
        reading(lambda out: (out[0][0], out[1][0]["y"])),
    ),
    "integers, masks, None beside the tensor": chain(Chosen, choosing),
    "an output that nobody reads": chain(WithUnused, lambda chain, layer, x: layer(x)[0]),
    "its argument and a parameter": chain(
        Unchanged, lambda chain, layer, x: layer(x)[0] * layer(x)[1]
    ),
    "a part of a parameter as the argument": chain(
        Block, lambda chain, layer, x: x + layer(chain.side.weight[: len(x)])
    ),
    "two views of one tensor": chain(Halves, lambda chain, layer, x: torch.cat(layer(x)[::-1], -1)),
    "BatchNorm": chain(Norms),
    "spectral norm": chain(Spectral),
    "a counter and a running mean in buffers": chain(Counting),
    "self.aux in the loss": chain(SetsAux, collecting),
    "a forward hook's catch in the loss": chain(Hooked, catching),
    "a tensor on self, put there by the caller": chain(Attended, with_context),
    "tensors by keyword, inside a dictionary": chain(Given, giving),
    "a cache: a list that layers append to": chain(Remembering, remembering, may_refuse=True),
    "a frozen embedding written in place": chain(
        WritesArgument, frozen_embedding=True, may_refuse=True
    ),
    "a frozen embedding": chain(Block, frozen_embedding=True),
    "the output written by the caller": chain(
        Block, lambda chain, layer, x: layer(x).add_(chain.side(x))
    ),
    "the input written by the caller afterwards": chain(Adding, writing_input, may_refuse=True),
    "each layer called twice": chain(Block, twice),
    "a call without gradients before": chain(Block, partly_without_gradients),
    "a call that failed before": chain(Failing, trying_again),
    "torch.utils.checkpoint inside": chain(CheckpointInside),
    "a list of modules inside": chain(lambda: InOrder(Block), inner="layers.1.layers"),
    "an autograd Function that keeps a tensor aside": chain(Custom),
    "GRU and TransformerEncoderLayer": chain(Recurrent, may_refuse=True),
}
