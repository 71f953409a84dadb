"""CUDA graphs on a CPU: a generator like a GPU's, and a capture like a CUDA graph's.

`Device` draws every random number from a seed and an offset alone, as a CUDA generator does. A
`StandIn` captures a function: it runs the function twice over the same buffers, which must launch
the same operators with the same numbers both times, and puts back what they wrote. A replay calls
these operators again on the same tensors, and nothing else: no Python of the function runs. As in a
capture, nothing may read a value on the host, make a tensor from the host's memory or touch the
generator's state.
"""

from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from megatron_lite.parallel.collectives import WAITING
from megatron_lite.parallel.rng import RngSnapshot
from megatron_lite.parallel.state import parallel_state
from megatron_lite.training.build_trainer import build_trainer
from megatron_lite.training.graphs import Recorder
from megatron_lite.training.step import train_step
from tests.support.dispatch import tensors_in
from tests.support.storages import address, addresses

READ_ON_THE_HOST = {
    *("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select"),
    *("aten::is_nonzero", "aten::_unique2"),
}


class State:
    """A state of the generator (ATen's CUDAGeneratorState).

    in_graph: how far a capture has drawn. base: where a replay begins, read as it draws.
    """

    def __init__(self, seed, offset):
        self.seed, self.offset, self.in_graph = seed, offset, 0
        self.base = (seed, offset)

    def set_state(self, state):
        self.seed, self.offset = state.view(torch.int64).tolist()


class Device(TorchDispatchMode):
    """The device: its generator, for as long as the mode is active."""

    def __init__(self):
        super().__init__()
        self.state, self.is_capturing, self.is_waiting = State(0, 0), False, False

    def get_state(self):
        assert not self.is_capturing, "the generator's state cannot be read while capturing"
        return torch.tensor([self.state.seed, self.state.offset]).view(torch.uint8)

    def set_state(self, state):
        assert not self.is_capturing, "the generator's state cannot be set while capturing"
        self.state.set_state(state)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not draws(func):
            return func(*args, **(kwargs or {}))
        results = drawn(func, args, kwargs, self.state.seed, self.state.offset)
        self.state.offset += drawn_numbers(results)
        return results


def draws(func):
    return torch.Tag.nondeterministic_seeded in func.tags


def drawn_numbers(results):
    return -(-max(one.numel() for one in tree_leaves(results)) // 4) * 4


def drawn(func, args, kwargs, seed, offset):
    """The results of an operator that draws from this place."""
    torch.default_generator.manual_seed(hash((seed, offset)) & (2**63 - 1))
    with _disable_current_modes():  # the device would draw once more
        return func(*args, **(kwargs or {}))


class Launch(NamedTuple):
    """An operator that was captured. copies: (place of the result, its tensor) of new results.
    draws: the state that it draws from, and how far into the graph's draws."""

    func: Any
    args: Any
    kwargs: Any
    copies: list[tuple[int, Tensor]]
    draws: tuple[State, int] | None

    def signature(self):
        return [
            self.func,
            *(
                tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf
                for leaf in tree_leaves((self.args, self.kwargs))
                if isinstance(leaf, (Tensor, int, float, bool, torch.dtype))
            ),
        ]

    def tensors(self):
        """The storages that it reads or writes."""
        return addresses(tensors_in((self.args, self.kwargs)))

    def again(self):
        """Launches it. Returns the works that it began."""
        if self.draws is None:
            results = self.func(*self.args, **self.kwargs)
        else:
            state, distance = self.draws
            seed, offset = state.base
            results = drawn(self.func, self.args, self.kwargs, seed, offset + distance)
        leaves = tree_leaves(results)
        for place, tensor in self.copies:
            tensor.copy_(leaves[place])
        unbox = torch._C._distributed_c10d.Work.unbox
        return [unbox(leaf) for leaf in leaves if isinstance(leaf, torch.ScriptObject)]


class _Recording(TorchDispatchMode):
    def __init__(self, device):
        super().__init__()
        self.launches = []
        self._device = device
        self._made = {}  # storages of this capture, held so that no other is there
        self._before = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func._schema.name
        if self._device.is_waiting:  # gloo copies the result of a reduce-scatter in its `wait`
            return func(*args, **kwargs)
        of_host = name == "aten::lift_fresh" and args[0].dim() > 0  # one number is an argument
        if name in READ_ON_THE_HOST or of_host:
            raise RuntimeError(f"{func}: operation not permitted when stream is capturing")
        given = tensors_in((args, kwargs))
        if func._schema.is_mutable or name.startswith("c10d::"):
            for tensor in given:
                self._keep(tensor)
        place = None
        if draws(func):
            place = (self._device.state, self._device.state.in_graph)
            results = drawn(func, args, kwargs, place[0].seed, place[0].offset + place[1])
            place[0].in_graph += drawn_numbers(results)
        else:
            results = func(*args, **kwargs)
        storages = addresses(given)
        copies = []
        for number, leaf in enumerate(tree_leaves(results)):
            if isinstance(leaf, Tensor) and not addresses([leaf]) & storages:
                storage = leaf.untyped_storage()
                self._made[address(storage)] = storage
                copies.append((number, leaf.detach()))
        self.launches.append(Launch(func, args, kwargs, copies, place))
        return results

    def _keep(self, tensor):
        storage = tensor.untyped_storage()
        if address(storage) not in self._made and address(storage) not in self._before:
            flat = tensor.detach().new_empty(0).set_(storage)
            self._before[address(storage)] = (flat, flat.clone())

    def put_back(self):
        for flat, before in self._before.values():
            flat.copy_(before)


class StandIn:
    """A capture (training/graphs.py)."""

    def __init__(self, device):
        self._device, self._states, self._launches = device, [], []

    def register(self):
        self._states.append(State(self._device.state.seed, self._device.state.offset))
        return self._states[-1]

    def draw_from(self, state):
        assert self._device.is_capturing and state in self._states
        self._device.state = state

    def record(self, function):
        own, self._device.is_capturing = self._device.state, True
        try:
            (_, first), (result, self._launches) = (self._recorded(function) for _ in range(2))
        finally:
            self._device.state, self._device.is_capturing = own, False
        assert [one.signature() for one in first] == [one.signature() for one in self._launches]
        return tree_map(lambda one: one.detach() if isinstance(one, Tensor) else one, result)

    def _recorded(self, function):
        for state in self._states:
            state.in_graph = 0
        recording, device, kind = _Recording(self._device), self._device, type(WAITING)

        def changed(name, waits):
            real = getattr(kind, name)

            def entering_or_leaving(*args):
                device.is_waiting = waits
                return real(*args)

            return patch.object(kind, name, entering_or_leaving)

        try:
            with recording, changed("__enter__", True), changed("__exit__", False):
                result = function()
        finally:
            recording.put_back()
        return result, recording.launches

    @torch.no_grad()
    def replay(self):
        for state in self._states:
            state.base = (state.seed, state.offset)
            state.offset += state.in_graph
        # A collective is waited for where its tensors are used next: the peer may come later.
        under_way = []
        for launch in self._launches:
            used = launch.tensors()
            for tensors, works in under_way:
                if tensors & used:
                    for work in works:
                        work.wait()
                    works.clear()
            under_way = [one for one in under_way if one[1]]
            under_way.append((used, launch.again()))
        for _, works in under_way:
            for work in works:
                work.wait()


@contextmanager
def built(config, *, captures):
    """The trainer of a run on such a device, which is active in the block."""
    device = Device()
    with parallel_state(config.parallel, seed=config.training.seed) as parallel:
        rng, before = parallel.rng, parallel.rng.snapshot()
        rng.generator = device
        states = {
            name: torch.tensor([hash(bytes(one.tolist())) % 2**40, 0]).view(torch.uint8)
            for name, one in before.states.items()
        }
        rng.restore(RngSnapshot(before.current, states))
        with device:
            trainer = build_trainer(config, parallel)
            if captures:
                trainer.graphs = Recorder(
                    partial(train_step, trainer.runner, trainer.optimizer),
                    rng,
                    warmup_steps=config.training.cuda_graph_warmup_steps,
                    new_capture=partial(StandIn, device),
                )
            yield trainer
