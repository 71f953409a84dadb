"""Compares one replay of any layer with its forward: what it computed, and what it left behind.

    compared bit for bit    arguments, tensors saved for backward, results, buffers, losses kept on
                            the layer, random-number streams
    compared as a graph     the arguments and parameters that the results reach; a lost edge would
                            silently lose a gradient
    left behind             after a replay the layer's parameters, buffers and attributes must be
                            what they were before it

Everything is hashed on its device, and read once at the end of the replay. The tensors that a
verified forward saves are held until the layer returns: some operators fill them after they saved
them (RReLU).

Saved tensors that alone differ are a doubt and no error. Some kernels leave memory unset in what
they save. The layer's next call keeps the forward's own bits of such a tensor, and its replay takes
its gradients twice, with these bits and with its own. If they agree, backward never reads the
difference.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_lite.parallel.rng import Generators
from megatron_lite.parallel.tensor_hash import differing, quick_hash, read
from megatron_lite.parallel.torch_internals import (
    address_of,
    base_of,
    disable_current_modes,
    tree_flatten_with_path,
    tree_leaves,
    tree_path_text,
    without_torch_function,
)
from megatron_lite.recompute.contents import Value, contents, same
from megatron_lite.recompute.guard import Guard, Signature
from megatron_lite.recompute.layer_state import STANDARD, is_sharded
from megatron_lite.recompute.randomness import Randomness
from megatron_lite.recompute.verify import RecomputeMismatch
from megatron_lite.recompute.versions import version_of

ROUNDING = 1e-3  # relative to a result's largest value, for kernels that add in any order
NUM_LAST = 4  # so many saved tensors are compared at the point where replays may stop


class Witness:
    """The record of one call of a layer, with which a replay is compared.

    guard: remembers what the layer's replays showed.
    rewritten: the numbers of the saved tensors that the forward wrote to later.
    """

    def __init__(
        self,
        name: str,
        rng: Generators | None,
        layer: nn.Module,
        guard: Guard,
        signature: Signature | None,
    ) -> None:
        self._name, self._rng, self._layer = name, rng, layer
        self.guard, self._signature, self._call = guard, signature, guard.calls
        self.rewritten: set[int] = set()
        self._forward = self._replay = _Run()
        self._saved: list[tuple[Tensor, int | None, Tensor | None]] = []
        self._is_sharded = is_sharded(layer)
        self._doubtful: dict[int, Tensor] = {}
        self._chosen: dict[int, Tensor] = {}
        self._left: list[_Belongings] = []

    @property
    def is_done(self) -> bool:
        """Whether later replays of this call need not be compared."""
        return self.guard.verify == "first" and not self.rewritten

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begins the forward or a replay. No saved-tensor hooks of the call may be in force."""
        self._replay = run = _Run()
        self._saved = []
        with _unobserved():
            paths = tree_flatten_with_path((args, kwargs))[0]
            given = {
                f"argument {tree_path_text(path).partition(']')[2]}": value
                for path, value in paths
                if isinstance(value, Tensor)
            }
            for place, value in given.items():
                run.see(place, value)
            run.see_streams("at the start", self._rng)
            for place, value in (*given.items(), *self._attributes()):
                if value.requires_grad:
                    run.enter(place, value)

    def save(self, tensor: Tensor) -> None:
        """Takes note of a tensor that is saved for backward."""
        # FSDP2 frees gathered weights before the layer returns, so their views are hashed now.
        hashed = None
        if self._is_sharded:
            with _unobserved():
                hashed = quick_hash(tensor)
        self._saved.append((tensor, version_of(tensor), hashed))

    def end(self, outputs: Any) -> None:
        """Ends the forward or a replay, with the layer in the state after it."""
        run = self._replay
        run.outputs = [each for each in tree_leaves(outputs) if isinstance(each, Tensor)]
        lost = dict(self._attributes())
        with _unobserved():
            for number, (tensor, _, hashed) in enumerate(self._saved):
                run.see(f"saved tensor {number}", tensor, hashed)
            for number, tensor in enumerate(run.outputs):
                run.see(f"result {number}", tensor)
            for place, tensor in lost.items():
                run.see(place, tensor)
            run.see_streams("at the end", self._rng)
        # FSDP2 has other parameters in the layer during a forward than in a replay.
        named = () if self._is_sharded else self._layer.named_parameters()
        names = {id(each): name for name, each in named}
        run.reached = frozenset(run.reaches([*run.outputs, *lost.values()], names))

    def settle(self) -> None:
        """Ends the record of the forward."""
        self._forward = run = self._replay
        for number, (tensor, version, _) in enumerate(self._saved):
            if version_of(tensor) != version:
                self.rewritten.add(number)
            if number in self.guard.doubts:
                self._doubtful[number] = tensor.detach()
        self._saved = []
        # Outputs are kept only where kernels may round differently. The next layer keeps them, too.
        run.outputs = [each.detach() for each in run.outputs] if _may_round(run.outputs) else []
        run.entries = {}

    def look(self) -> None:
        """Takes note of what the layer holds, before and after a replay."""
        with _unobserved():
            self._left.append(_Belongings(self._layer))

    def chosen(self, kept: tuple[int, Tensor]) -> Tensor:
        """Returns a tensor that the replay saved, or in its place the forward's bits."""
        number, tensor = kept
        return self._chosen.get(number, tensor)

    def compare(self, rebuilt: list[Tensor]) -> None:
        """Compares the replay with the forward, and the layer before and after the replay.

        rebuilt: the tensors that the replay saved.
        RecomputeMismatch: they differ.
        """
        forward, replay = self._forward, self._replay
        values = iter(
            read(
                [*forward.hashes, *replay.hashes, *(h for left in self._left for h in left.hashes)]
            )
        )
        if forward.places != replay.places:
            self._refuse(f"it took another path: {_first_other(forward.places, replay.places)}")
        before, now = ([next(values) for _ in forward.places] for _ in range(2))
        places = [
            place
            for place, one, other in zip(forward.places, before, now, strict=True)
            if one != other
        ]
        if forward.reached != replay.reached:
            self._refuse_graph(forward.reached, replay.reached)
        for one, other in pairwise(self._left):
            self._compare_left(one, other, list(values))
        self._left = []
        self._judge(places, rebuilt)
        self._replay, self._doubtful = _Run(), {}
        if self._signature is not None:
            self.guard.saw(self._signature)

    def _judge(self, places: list[str], rebuilt: list[Tensor]) -> None:
        saved = {int(place.split()[2].rstrip(":")) for place in places if place.startswith("saved")}
        others = [place for place in places if not place.startswith("saved")]
        if others and all(place.startswith("result") for place in others) and self._rounds():
            return
        if others:
            streams = [place for place in others if place.startswith("stream")]
            self._refuse(
                f"{places[0]} differs from the forward's; "
                + (f"RNG {streams[0]} stood elsewhere" if streams else "the RNG streams agree")
            )
        for number in sorted(saved - self.guard.harmless):
            if number not in self._doubtful:
                self.guard.doubts.add(number)
            elif self._reads(number, rebuilt[number]):
                self._refuse(f"{places[0]} differs from the forward's, and backward reads it")
            else:
                self.guard.harmless.add(number)
                self.guard.doubts.discard(number)
        self.guard.doubts -= self._doubtful.keys() - saved

    def _reads(self, number: int, rebuilt: Tensor) -> bool:
        """Tells whether gradients depend on what differs in a saved tensor."""
        kept = self._doubtful[number]
        if _address(kept) == _address(rebuilt):
            return True  # the layer writes to a tensor that it does not own
        results = [each for each in self._replay.outputs if each.requires_grad]
        if not results:
            return True
        first, again = (self._replay.gradients(results, self._layer) for _ in range(2))
        self._chosen[number] = kept
        other = self._replay.gradients(results, self._layer)
        self._chosen.clear()
        if any(differing(list(zip(first, again, strict=True)))):  # no two are equal on this device
            return not all(map(_is_near, first, other))
        return any(differing(list(zip(first, other, strict=True))))

    def _rounds(self) -> bool:
        before, now = self._forward.outputs, self._replay.outputs
        if not before or not all(map(_is_near, before, now)):
            return False
        warnings.warn(
            f"{self._name}: a replay differs from its forward by rounding, because a kernel of "
            "this device does not repeat itself. torch.use_deterministic_algorithms(True) names it",
            stacklevel=2,
        )
        return True

    def _compare_left(self, before: _Belongings, now: _Belongings, values: list[int]) -> None:
        size = len(before.hashes)
        if before.names == now.names:
            for name, one, other in zip(before.names, values[:size], values[size:], strict=True):
                if one != other:
                    self._refuse(f"it changed {name}, a second time after the forward")
        for name, parts in before.parts.items():
            if not same(parts, now.parts.get(name, [])):
                self._refuse(f"it changed {name}, a second time after the forward")

    def _refuse_graph(self, before: frozenset[str], now: frozenset[str]) -> None:
        lost, new = sorted(before - now), sorted(now - before)
        changes = [f"lost {', '.join(lost)}"] if lost else []
        changes += [f"has {', '.join(new)} besides"] if new else []
        raise RecomputeMismatch(
            f"{self._name}: the graph of a replay is not the forward's: it {' and '.join(changes)}"
        )

    def _refuse(self, what: str) -> None:
        earlier = (
            ""
            if self._call == 1 or self.guard.verify is True
            else " Earlier steps may have been wrong already."
        )
        raise RecomputeMismatch(
            f"a replay is not what its forward was at {self._name}, {what}.{earlier} The layer "
            "reads or changes something that a replay cannot restore (docs/any-model.md): take the "
            "layer out of the policy"
        )

    def _attributes(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the buffers, and the tensors with a graph among the modules' attributes."""
        for path, module in self._layer.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield f"buffer {path}.{name}", buffer
            for name, value in vars(module).items():
                if name not in STANDARD:
                    for number, each in enumerate(_tensors(value)):
                        if each.grad_fn is not None:
                            yield f"attribute {path}.{name} {number}", each


class _Run:
    """What is seen of one run: of the forward, or of a replay.

    places: the names of what is hashed, with shapes. hashes: one each, on its device.
    entries: the arguments by their edges in the graph, since a replay gets new tensors.
    reached: the names of the arguments and parameters that the results reach.
    outputs: the tensors among the results.
    """

    def __init__(self) -> None:
        self.places: list[str] = []
        self.hashes: list[Tensor] = []
        self.entries: dict[tuple[Any, int], str] = {}
        self.reached: frozenset[str] = frozenset()
        self.outputs: list[Tensor] = []

    def see(self, place: str, tensor: Tensor, hashed: Tensor | None = None) -> None:
        """Hashes a tensor, unless that was done before."""
        self.places.append(f"{place}: tensor 0 {list(tensor.shape)}")
        self.hashes.append(quick_hash(tensor) if hashed is None else hashed)

    def see_streams(self, when: str, rng: Generators | None) -> None:
        """Hashes the states of the random-number generators."""
        if rng is None:
            return
        now = Randomness.now(rng)
        for name, state in zip((*now.names.names, "cpu"), now.states, strict=False):
            self.places.append(f"stream {name} {when}")
            self.hashes.append(quick_hash(state))

    def enter(self, place: str, value: Tensor) -> None:
        """Takes note of an input of the graph, which its base stands for as well."""
        base = base_of(value)
        for each in (value, base) if base is not None and base.requires_grad else (value,):
            edge = get_gradient_edge(each)
            self.entries.setdefault((edge.node, edge.output_nr), place)

    def reaches(self, results: list[Tensor], parameters: dict[int, str]) -> Iterator[str]:
        """Yields the names of the inputs and parameters that the results depend on."""
        edges: list[tuple[Any, int]] = [
            (value.grad_fn, value.output_nr) for value in results if value.grad_fn is not None
        ]
        # The search goes back through the graph and stops at the inputs: their own history is
        # that of the caller, and a replay does not have it. A node with a `variable` accumulates
        # the gradient of that leaf.
        seen = set()
        while edges:
            edge = edges.pop()
            node = edge[0]
            if node is None or edge in seen:
                continue
            seen.add(edge)
            if edge in self.entries:
                yield self.entries[edge]
                continue
            if hasattr(node, "variable"):
                yield parameters.get(
                    id(node.variable), "a tensor that is no parameter of the layer"
                )
            edges += node.next_functions

    def gradients(self, results: list[Tensor], layer: nn.Module) -> list[Tensor]:
        """Returns the gradients of the results, weighted at random, of all inputs."""
        inputs: list[Any] = [GradientEdge(*edge) for edge in self.entries]
        inputs += [each for each in layer.parameters() if each.requires_grad]
        random = torch.Generator().manual_seed(1)
        weights = [
            torch.rand(each.shape, generator=random).to(each)
            if each.layout == torch.strided and not each.is_nested
            else torch.ones_like(each)
            for each in results
        ]
        found = torch.autograd.grad(results, inputs, weights, retain_graph=True, allow_unused=True)
        return [torch.zeros(0) if each is None else each for each in found]


class _Belongings:
    """What a layer holds at one moment: hashes of tensors, and the contents of other attributes."""

    def __init__(self, layer: nn.Module) -> None:
        seen: set[int] = set()
        self.parts: dict[str, list[Any]] = {}
        tensors: dict[str, Tensor] = {}
        for path, module in layer.named_modules():
            # FSDP2 exchanges parameters by itself.
            registries = (
                [module._buffers] if is_sharded(layer) else [module._parameters, module._buffers]
            )
            for registry in registries:
                for name, value in registry.items():
                    if value is not None:
                        tensors[f"{path}.{name}".lstrip(".")] = value
            for name, value in vars(module).items():
                if name not in STANDARD and name != "forward":
                    key = f"attribute {path}.{name}".replace(" .", " ")
                    parts = self.parts[key] = list(contents(value, seen))
                    for number, part in enumerate(parts):
                        if isinstance(part, Value):
                            tensors[f"{key} {number}"] = part.tensor
        self.names = list(tensors)
        self.hashes = [quick_hash(each) for each in tensors.values()]


def hash_last(tensors: list[Tensor]) -> list[Tensor]:
    """Returns the hashes of the tensors that a replay saved last, when it might stop."""
    with _unobserved():
        return [quick_hash(each) for each in tensors[-NUM_LAST:]]


def is_repeated(before: list[Tensor], now: list[Tensor]) -> bool:
    """Tells whether these hashes agree. Waits once."""
    values = read([*before, *now])
    return values[: len(before)] == values[len(before) :]


@contextmanager
def _unobserved() -> Iterator[None]:
    """Hides operations from modes and from autograd: they are no part of the layer."""
    with torch.no_grad(), disable_current_modes(), without_torch_function():
        yield


def _tensors(value: Any) -> list[Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def _address(tensor: Tensor) -> int | None:
    return address_of(tensor.untyped_storage()) if tensor.layout == torch.strided else None


def _may_round(tensors: list[Tensor]) -> bool:
    return not torch.are_deterministic_algorithms_enabled() and any(
        each.device.type != "cpu" for each in tensors
    )


def _is_near(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or not one.is_floating_point():
        return one.shape == other.shape and torch.equal(one, other)
    size = one.detach().double().abs().amax() if one.numel() else torch.zeros(())
    error = (one.detach().double() - other.detach().double()).abs()
    return bool((error <= ROUNDING * size).all())


def _first_other(before: list[str], now: list[str]) -> str:
    for one, other in zip(before, now, strict=False):
        if one != other:
            return f"{one} in forward, {other} in the replay"
    return f"{len(before)} tensors in forward, {len(now)} in the replay"
