"""A stand-in for a GPU, on which a training step of one rank runs and is watched.

torch lets Python register a device of its own. Under FakeTensorMode the tensors of that device have
shapes and no values, so it needs no kernels. FakeTensorMode itself raises if an operator has
tensors of both devices. `Watch` notes what else a GPU would punish with a wait or with wrong
values:

    a tensor of the step that is created on the CPU, or copied between the CPU and the device
    a value that Python reads: `.item()`, `bool(tensor)`, `.tolist()`, printing, `nonzero`
    memory that two streams use in no order (streams.py)

A process cannot give the device back, so `run_watched` must run in a process of `run_ranks`.
"""

from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
import torch.utils.backend_registration as backends
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.memory.measure.step_meter import SimulatedTensors, simulated_rank
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel import state
from megatron_lite.recompute import stores
from megatron_lite.recompute.offload import CudaCopyStreams
from megatron_lite.recompute.phase import is_allocating_on_host
from megatron_lite.training.batches import document_rules
from megatron_lite.training.build_trainer import build_runner
from megatron_lite.training.dry_run import SameTokens, sample_shape
from megatron_lite.training.step import StageRunner, train_step
from tests.support.dispatch import tensors_in
from tests.support.storages import addresses
from tests.support.streams import MAIN, Streams

NAME = "standin"
READS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2")
# They allocate memory of their argument's shape and do not read it.
ALLOCATIONS = ("empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "set_")


class Watch(TorchDispatchMode):
    """Notes the faults of the operators in the block, each with the line of the library.

    streams: the order of the device's work.
    """

    def __init__(self, streams):
        super().__init__()
        self.streams, self.inside = streams, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=MappingProxyType({})):
        name = func._schema.name.partition("::")[2]
        given = tensors_in((args, kwargs))
        if name in READS and any(tensor.device.type == NAME for tensor in given):
            self.streams.fault(f"{name} reads a value of the device")
        self.inside = True  # torch may print the tensors of an operator for its own messages
        results = func(*args, **kwargs)
        self.inside = False
        made = tensors_in(results)
        self._check_devices(name, given, made)
        if not _is_view(func) and name not in ALLOCATIONS:
            self._order(func, args, kwargs, made)
        return results

    def _check_devices(self, name, given, made):
        if is_allocating_on_host() or self.streams.current is not MAIN:
            return
        if name == "clone" and given[0].dtype == torch.uint8:  # the state of a generator
            return
        known = addresses(given)
        kinds = {tensor.device.type for tensor in given if tensor.dim()}
        for tensor in made:
            if not tensor.numel():
                continue
            if tensor.device.type == "cpu" and not known & addresses([tensor]):
                self.streams.fault(f"{name} makes a tensor on the CPU")
            elif tensor.device.type == NAME and kinds == {"cpu"}:
                self.streams.fault(f"{name} copies a tensor of the CPU")
        if name == "copy_" and len({tensor.device.type for tensor in given}) > 1:
            self.streams.fault("copy_ copies between the CPU and the device")

    def _order(self, func, args, kwargs, made):
        """Tells the streams what memory the operator reads and writes."""
        written = [*made]
        for number, argument in enumerate(func._schema.arguments):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                written += tensors_in(value)
        self.streams.use(
            reads=tensors_in((args, kwargs)), writes=written, stream=self.streams.current
        )


def _is_view(func):
    """Whether the operator reads nothing: it returns a view, or a fact such as the device."""
    aliases = [one.alias_info for one in func._schema.returns]
    return func.namespace == "prim" or any(
        alias is not None and not alias.is_write for alias in aliases
    )


if not hasattr(backends, "_DummyBackendModule"):
    pytest.skip("this torch lets Python register no device", allow_module_level=True)


class _Module(backends._DummyBackendModule):
    """What torch asks of the module of a device."""

    def get_amp_supported_dtype(self):
        return [torch.float16, torch.bfloat16]


@contextmanager
def rank_on_the_device(config, patch, fake, **place):
    """Yields the state of a simulated rank whose device is the stand-in. place: see simulated_rank.

    The offloaded tensors take the way that they take on CUDA.
    """
    if not hasattr(torch, NAME):
        backends._setup_privateuseone_for_python_backend(NAME, _Module())
    patch.setattr(state, "choose_device", lambda *_: torch.device(NAME, 0))
    patch.setattr(stores, "copy_streams_of", lambda _: CudaCopyStreams())
    with simulated_rank(config.parallel, fake, **place) as parallel:
        yield parallel


class StandInStep(NamedTuple):
    """The parts of a training step on the stand-in, within the modes of its tensors."""

    streams: Streams
    runner: StageRunner
    optimizer: Optimizer
    batches: SameTokens


@contextmanager
def step_on_the_device(config, patch, *, num_microbatches=1, **place):
    """Yields what a training step of a rank takes. place: see simulated_rank."""
    fake = SimulatedTensors()
    with (
        Streams.in_place_of_cuda(patch) as streams,
        rank_on_the_device(config, patch, fake, **place) as parallel,
        fake,
        # A dispatch mode belongs to its thread.
        torch.autograd.set_multithreading_enabled(False),
    ):
        host_state = torch.get_rng_state()
        patch.setattr(torch, "get_rng_state", lambda: fake.from_tensor(host_state))
        patch.setattr(torch, "set_rng_state", lambda _: None)
        samples = torch.zeros(sample_shape(config), dtype=torch.int64, device=parallel.device)
        runner, optimizer, _ = build_runner(config, parallel)
        batches = SameTokens(samples, num_microbatches, parallel, document_rules(config))
        yield StandInStep(streams, runner, optimizer, batches)


def run_watched(config, rank, *, world_size, num_microbatches, steps=1):
    """Runs training steps of one rank on the stand-in. Returns the faults, and how often each was.

    config: with a vocabulary size. Building the model and the optimizer is not watched.
    """
    with (
        pytest.MonkeyPatch.context() as patch,
        step_on_the_device(
            config, patch, rank=rank, world_size=world_size, num_microbatches=num_microbatches
        ) as (streams, runner, optimizer, batches),
    ):
        watch, show = Watch(streams), torch._tensor_str._str

        def noted(tensor, **options):
            if not watch.inside:
                streams.fault("a tensor is printed")
            return show(tensor, **options)

        patch.setattr(torch._tensor_str, "_str", noted)
        with watch:
            for _ in range(steps):
                train_step(runner, optimizer, batches, learning_rate=1e-6)
            optimizer.finish()
        streams.finish()
        return streams.faults
