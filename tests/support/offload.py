"""Models whose policies move tensors to host memory, and stand-ins for a device's copies.

`Late` runs each copy at the last moment that the order between streams allows. If the code reads,
frees or overwrites memory too early, the result has wrong bits or `Late` records a fault.
"""

import weakref

import torch

from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.parallel.rng import RngStreams
from megatron_lite.recompute.offload import CopyStreams
from tests.support.models import sample_tokens
from tests.support.planned import planned

NUM_LAYERS = 5
CPU = torch.device("cpu")
POLICIES = (
    "*:full@host",
    "*:full/2@host",
    "*:none@host",
    "*:pointwise@host",
    "*:core_attn+mlp@host",
    "*:ops(matmul)@host",
    "*:none@host(attn_norm+core_attn+linear_fc2)",
    "0-1:none@host(qkv_linear); 2:none@host; *:none@host(activation+mlp_norm)",
    "0:full; 1:none@host; 2:none; *:full@host",
)
CONTIGUOUS = "*:full@host, contiguous"


class Late(CopyStreams):
    """Copies that run only when the code waits for them, or for a later one of the same direction.

    faults: the memory that was freed before its copy, as text.
    """

    def __init__(self):
        self.queues = {"out": [], "back": []}
        self.count = 0
        self.faults = []

    def copy(self, target, source, *, after, back):
        return (self._back if back else self._out)(target, source, after)

    def _out(self, host, source, after):
        original = weakref.ref(source.untyped_storage())

        def make():
            if original() is None:
                self.faults.append("an original was freed before its copy was made")
            else:
                host.copy_(torch.empty(0, dtype=torch.uint8).set_(original()))

        return self._queue("out", make, after)

    def _back(self, target, host, after):
        target.fill_(255)  # these bytes are NaN in every floating-point format
        place = weakref.ref(target.untyped_storage())

        def make():
            if place() is None:
                self.faults.append("the place of a copy was freed before the copy was made")
            else:
                torch.empty(0, dtype=torch.uint8).set_(place()).copy_(host)

        return self._queue("back", make, after)

    def wait(self, mark):
        direction, number = mark
        while self.queues[direction] and self.queues[direction][0][0] <= number:
            self.queues[direction].pop(0)[1]()

    def forsake(self, target):
        """Keeps the memory until the copy has run, as the allocator of a device does."""
        self.wait(("back", self.count))

    def _queue(self, direction, make, after):
        def make_in_order():
            if after is not None:
                self.wait(after)
            make()

        self.count += 1
        self.queues[direction].append((self.count, make_in_order))
        return direction, self.count


def config_of(policy):
    return RecomputeConfig(
        recompute_policy=policy.removesuffix(", contiguous"),
        contiguous_saved_activations="contiguous" in policy,
    )


def build(policy, copy_streams=None, **overrides):
    model = planned(
        config_of(policy),
        **{"num_layers": NUM_LAYERS, "hidden_dropout": 0.1, "attention_dropout": 0.1, **overrides},
    )
    if copy_streams is not None:
        model.decoder.stores.copy_streams = copy_streams
    return model


def step(model, *, batches=(3,)):
    """Returns the gradients of micro-batches that are all in flight before the first backward.

    The random numbers are the same at every call.
    """
    draw_alike(model)
    model.zero_grad()
    device = model.context.device
    for loss in [
        model(*(one.to(device) for one in sample_tokens(batch))).mean() for batch in batches
    ]:
        loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def draw_alike(model):
    model.context.rng.restore(RngStreams(model.context.device, seed=5).snapshot())


def equal(first, second):
    return all(map(torch.equal, first, second))
