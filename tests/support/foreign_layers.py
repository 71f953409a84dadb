"""Models of plain torch whose layers have every kind of output, argument, write and state.

Each model is a chain: an embedding, three layers, a head and a loss. `Chain` calls its layers
through a function `follow`, which passes a layer its arguments and reads its output. The names of
the models are rows of docs/who-is-right.md.
"""

import random
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from tests.support.foreign import Foreign

WIDTH, ROWS = 16, 6


class Mlp(nn.Module):
    """A layer that returns x + fc2(dropout(gelu(fc1(norm(x)))))."""

    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.2)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x):
        """Returns a tensor of the same shape."""
        return x + self.fc2(self.dropout(nn.functional.gelu(self.fc1(self.norm(x)))))


def plainly(chain, layer, x):
    """Passes x alone. The output is the next x."""
    return layer(x)


class Chain(nn.Module):
    """A chain of three layers.

    losses: terms of the loss that a layer or its caller adds.
    memory: a value that `follow` keeps from layer to layer of one forward.
    """

    def __init__(self, layer, follow=plainly, *, frozen_embedding=False):
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH).requires_grad_(not frozen_embedding)
        self.side = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)
        self._follow = follow
        self.losses = []
        self.memory = None

    def forward(self, tokens):
        """Returns the loss."""
        x, self.losses, self.memory = self.embedding(tokens), [], None
        for layer in self.blocks:
            x = self._follow(self, layer, x)
        loss = self.head(x).square().mean() + sum(self.losses, torch.zeros(()))
        self.losses, self.memory = [], None
        return loss


def chain_loss(model, number):
    """Returns the loss on 6 tokens."""
    return model(
        torch.randint(0, 20, (ROWS,), generator=torch.Generator().manual_seed(60 + number))
    )


def chain(layer, follow=plainly, *, frozen_embedding=False, may_refuse=False, inner=None):
    """Returns the description of a chain of such layers."""
    return Foreign(
        build=lambda: Chain(layer, follow, frozen_embedding=frozen_embedding).train(),
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


class Returning(Mlp):
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


class WithUnused(Mlp):
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


class Chosen(Mlp):
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


class Halves(Mlp):
    """Returns two views of one tensor."""

    def forward(self, x):
        """Returns the two halves of the channels."""
        return super().forward(x).chunk(2, dim=-1)


# ---- state


class Normalised(Mlp):
    """A layer with BatchNorm, which updates its statistics in each forward."""

    def __init__(self):
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        """Returns a tensor of the same shape."""
        return super().forward(self.batch_norm(x))


class Spectral(Mlp):
    """A layer with spectral norm, which updates its vectors in each forward."""

    def __init__(self):
        super().__init__()
        self.fc1 = spectral_norm(self.fc1)


class Counting(Mlp):
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


class CountingInPython(Mlp):
    """A layer whose output depends on the number of its calls, in a Python number.

    No recomputation engine sees that number.
    """

    calls = 0

    def forward(self, x):
        """Returns a tensor of the same shape."""
        self.calls += 1
        return super().forward(x * self.calls)


class Aside(Mlp):
    """A layer that stores a loss on itself, as mixture-of-experts layers do."""

    def forward(self, x):
        """Returns a tensor of the same shape."""
        x = super().forward(x)
        self.aux = self.fc1(x).square().mean()
        return x


def collecting(chain, layer, x):
    """Adds the loss that the layer stored."""
    x = layer(x)
    chain.losses.append(layer.aux)
    return x


class Hooked(Mlp):
    """A layer with a forward hook inside that stores a hidden state for the loss.

    A replay stores another tensor in its place, which nobody reads.
    """

    def __init__(self):
        super().__init__()
        self.fc1.register_forward_hook(self._catch)

    def _catch(self, module, args, output):
        self.caught = output


def catching(chain, layer, x):
    """Adds a loss of the tensor that the hook stored."""
    x = layer(x)
    chain.losses.append(layer.caught.square().mean())
    return x


class Attended(Mlp):
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


class Writing(Mlp):
    """A layer that writes into its argument and returns another tensor."""

    def forward(self, x):
        """Returns a tensor of the same shape."""
        x.mul_(1.5)
        return super().forward(x)


class Given(Mlp):
    """A layer that takes tensors as keyword arguments, one of them inside a dictionary."""

    def forward(self, *, hidden, scale):
        """Returns a tensor of the same shape."""
        return super().forward(hidden["x"]) * scale + hidden["rest"][0]


def giving(chain, layer, x):
    """Passes tensors by keyword and in a dictionary. All need gradients."""
    side = chain.side(x)
    return layer(hidden={"x": x, "rest": [side]}, scale=side.sigmoid())


class Remembering(Mlp):
    """A layer with a cache: it appends its normed input to a list argument and reads the list."""

    def forward(self, x, cache):
        """Returns a tensor of the same shape."""
        cache.append(self.norm(x))
        return super().forward(torch.stack(cache).mean(0))


def remembering(chain, layer, x):
    """Passes one list to all layers."""
    chain.memory = [] if chain.memory is None else chain.memory
    return layer(x, chain.memory)


def writing_output(chain, layer, x):
    """Writes into the layer's output."""
    return layer(x).add_(chain.side(x))


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


class Failing(Mlp):
    """A layer whose first call raises an error halfway."""

    failed = False

    def forward(self, x):
        """Returns a tensor of the same shape."""
        if not self.failed:
            self.dropout(self.norm(x))
            self.failed = True
            raise ArithmeticError("once")
        return super().forward(x)


def trying_again(chain, layer, x):
    """Calls the layer, and once again if it fails."""
    try:
        return layer(x)
    except ArithmeticError:
        return layer(x)


# ---- randomness and inner engines


class OwnGenerator(Mlp):
    """A layer that draws from its own generator, which no engine can know."""

    def __init__(self):
        super().__init__()
        self._generator = torch.Generator().manual_seed(5)

    def forward(self, x):
        """Returns a tensor of the same shape."""
        return super().forward(x * torch.rand(WIDTH, generator=self._generator))


class PythonRandom(Mlp):
    """A layer that draws from Python's generator."""

    def forward(self, x):
        """Returns a tensor of the same shape."""
        return super().forward(x * random.random())


class CheckpointInside(Mlp):
    """A layer that uses torch.utils.checkpoint inside."""

    def forward(self, x):
        """Returns a tensor of the same shape."""
        return checkpoint(super().forward, x, use_reentrant=False) * 2


class Parts(nn.Module):
    """A layer with a list of modules inside."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x):
        """Returns a tensor of the same shape."""
        for part in self.parts:
            x = part(x)
        return x


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


class Custom(Mlp):
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
    "a tensor": chain(Mlp),
    "dictionary": chain(
        lambda: Returning(lambda x, y: {"x": x, "extra": y}),
        reading(lambda out: (out["x"], out["extra"])),
    ),
    "list": chain(lambda: Returning(lambda x, y: [x, y]), reading(lambda out: (out[0], out[1]))),
    "dataclass": chain(lambda: Returning(Hidden), reading(lambda out: (out.x, out.extra))),
    "named tuple": chain(lambda: Returning(Pair), reading(lambda out: (out.x, out.extra))),
    "nested tuple": chain(
        lambda: Returning(lambda x, y: ((x,), ({"y": y},))),
        reading(lambda out: (out[0][0], out[1][0]["y"])),
    ),
    "integers, masks, None beside the tensor": chain(Chosen, choosing),
    "an output that nobody reads": chain(WithUnused, lambda chain, layer, x: layer(x)[0]),
    "its argument and a parameter": chain(
        Unchanged, lambda chain, layer, x: layer(x)[0] * layer(x)[1]
    ),
    "two views of one tensor": chain(Halves, lambda chain, layer, x: torch.cat(layer(x)[::-1], -1)),
    "BatchNorm": chain(Normalised),
    "spectral norm": chain(Spectral),
    "a counter and a running mean in buffers": chain(Counting),
    "self.aux in the loss": chain(Aside, collecting),
    "a forward hook's catch in the loss": chain(Hooked, catching),
    "a tensor on self, put there by the caller": chain(Attended, with_context),
    "tensors by keyword, inside a dictionary": chain(Given, giving),
    "a cache: a list that layers append to": chain(Remembering, remembering, may_refuse=True),
    "an argument written in place": chain(
        Writing, lambda chain, layer, x: layer(x * 1.0), may_refuse=True
    ),
    "a frozen embedding written in place": chain(Writing, frozen_embedding=True, may_refuse=True),
    "a frozen embedding": chain(Mlp, frozen_embedding=True),
    "the output written by the caller": chain(Mlp, writing_output),
    "the input written by the caller afterwards": chain(Adding, writing_input, may_refuse=True),
    "each layer called twice": chain(Mlp, twice),
    "a call without gradients before": chain(Mlp, partly_without_gradients),
    "a call that failed before": chain(Failing, trying_again),
    "torch.utils.checkpoint inside": chain(CheckpointInside),
    "a list of modules inside": chain(Parts, inner="blocks.1.parts"),
    "an autograd Function that keeps a tensor aside": chain(Custom),
    "GRU and TransformerEncoderLayer": chain(Recurrent, may_refuse=True),
}
# Replays of these layers go wrong without a sign that an engine could see. Only `verify` finds it.
UNSEEN = {
    "a generator of its own": chain(OwnGenerator),
    "Python's random numbers": chain(PythonRandom),
    "a counter in Python": chain(CountingInPython),
}
