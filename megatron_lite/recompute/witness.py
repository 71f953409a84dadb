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

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megatron_lite.parallel.tensor_hash import Hashes, are_equal, hash_once, quick_hash
from megatron_lite.parallel.torch_internals import address_of, tree_flatten_with_path

from .call_arguments import argument_name
from .contents import Contents, sharded, tensors_of, unobserved
from .guard import Guard, Signature
from .randomness import Generators
from .replay import RecomputeMismatch
from .saved import Args, Kwargs, parameter_of, version_of
from .verify import NOT_THE_SAME, STREAM, Execution, Graph, described, inputs_of

ROUNDING = 1e-3  # relative to a result's largest value, for kernels that add in any order
SAVED = "saved tensor"


class Witness:
    """The record of one call of a layer, with which a replay is compared.

    guard: remembers what the layer's replays showed.
    is_rewritten: whether the forward wrote to a tensor after it was saved.
    known: the hashes of what the run has saved, as long as that is held.
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
        self.is_rewritten = False
        self.known: Hashes = {}
        self._forward = self._replay = _LayerRun({}, {})
        self._saved: list[tuple[Tensor, int | None, Tensor | None, Tensor | None]] = []
        self._producers: list[str] = []
        self._is_sharded = sharded(layer)
        self._doubtful: dict[int, Tensor] = {}
        self._chosen: dict[int, Tensor] = {}
        self._given = set[int]()  # parameters that an argument of the forward is a part of

    @property
    def is_done(self) -> bool:
        """Whether later replays of this call need not be compared."""
        return self.guard.verify == "first" and not self.is_rewritten

    def begin(self, args: Args, kwargs: Kwargs) -> None:
        """Begins the forward or a replay. No saved-tensor hooks of the call may be in force."""
        self._saved, self._producers, self.known = [], [], {}
        paths = tree_flatten_with_path((args, kwargs))[0]
        given = {argument_name(path): value for path, value in paths if isinstance(value, Tensor)}
        self._replay = run = _LayerRun(given, self._attributes(of_objects=True))
        # A replay may reach the forward's inputs in another way than by its arguments.
        run.inputs |= self._forward.inputs
        with unobserved():
            for place, value in given.items():
                run.see(place, value)
                self._given.add(id(parameter_of(value)))
            run.see_streams("the start", self._rng)

    def save(self, tensor: Tensor) -> None:
        """Takes note of a tensor that is saved for backward."""
        # FSDP2 frees gathered weights before the layer returns, so their views are hashed now.
        weight = hashed = None
        if self._is_sharded:
            with unobserved():
                hashed = quick_hash(tensor)
        else:
            weight = parameter_of(tensor)
            weight = None if id(weight) in self._given else weight
        self._saved.append((tensor.detach(), version_of(tensor), hashed, weight))
        self._producers.append(_operator(tensor.grad_fn))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Refuses a replay inside the block that adds to the gradient of a parameter, as a forward
        does that calls `backward`. Other threads may."""
        thread = get_ident()

        def refuse(name: str, _: Tensor) -> None:
            if get_ident() == thread:
                self._refuse(f"it adds to the gradient of {name}, a second time after the forward")

        with ExitStack() as around:
            for name, each in () if self._is_sharded else self._layer.named_parameters():
                if each.is_leaf and each.requires_grad:
                    hook = each.register_post_accumulate_grad_hook(partial(refuse, name))
                    around.callback(hook.remove)
            yield

    def end(self, outputs: Any) -> None:
        """Ends the forward or a replay, with the layer in the state after it."""
        run = self._replay
        run.outputs = tensors_of(outputs)
        lost = self._attributes()
        seen = {f"result {number}": tensor for number, tensor in enumerate(run.outputs)} | lost
        with unobserved():
            # All are alive, so an address belongs to one. Several operators save a tensor.
            for number, (tensor, _, hashed, weight) in enumerate(self._saved):
                place = f"{SAVED} {number}:"
                if weight is not None:  # all its parts have one hash
                    place += f" at {tensor.storage_offset()} by {tensor.stride()} of a parameter"
                    hashed = hash_once(weight, run.weights)
                run.see(place, tensor, hash_once(tensor, self.known) if hashed is None else hashed)
            for place, tensor in seen.items():
                run.see(place, tensor, hash_once(tensor, self.known))
            run.see_streams("the end", self._rng)
        # FSDP2 has other parameters in the layer during a forward than in a replay.
        for name, parameter in () if self._is_sharded else self._layer.named_parameters():
            run.inputs.setdefault(id(parameter), name)
        run.graph = Graph.of([*run.outputs, *lost.values()], run.inputs)

    def settle(self) -> None:
        """Ends the record of the forward."""
        self._forward = run = self._replay
        for number, (tensor, version, *_) in enumerate(self._saved):
            if version_of(tensor) != version:
                self.is_rewritten = True
            if number in self.guard.doubts | self.guard.harmless:
                self._doubtful[number] = tensor
        self._saved, self.known = [], {}
        # Outputs are kept only where kernels may round differently. The next layer keeps them, too.
        run.outputs = [each.detach() for each in run.outputs] if _may_round(run.outputs) else []
        # Those that the results depend on live as long as these. Others, such as a result of an
        # earlier forward in an attribute, would keep the graph of that forward.
        run.inputs = {
            edge: name
            for edge, name in run.inputs.items()
            if isinstance(edge, tuple) and name in run.graph.ends
        }
        run.given = []

    def look(self) -> None:
        """Takes note of what the layer holds before a replay."""
        self._before = Contents.of_layer(self._layer)
        self._before.hash_values({**self._forward.weights})

    def chosen(self, kept: tuple[int, Tensor]) -> Tensor:
        """Returns a tensor that the replay saved, or in its place the forward's bits."""
        number, tensor = kept
        return self._chosen.get(number, tensor)

    def compare(self, rebuilt: list[Tensor]) -> None:
        """Compares the replay with the forward, and the layer before and after the replay.

        rebuilt: the tensors that the replay saved.
        RecomputeMismatch: they differ.
        """
        places, other = self._forward.differences(self._replay, whole=False)
        if other:
            self._refuse(other)
        others = []
        for part in self._before.written(self._replay.weights):
            if isinstance(part.value, nn.Parameter):
                self._refuse(f"{part.name} is not what it was after the forward")
            others.append(part.name)
        for name in [*others, *(name for name, _ in self._before.changed())]:
            self._refuse(f"it changed {name}, a second time after the forward")
        del self._before
        self._judge(places, rebuilt)
        self._replay, self._doubtful = _LayerRun({}, {}), {}
        if self._signature:
            self.guard.saw(self._signature)

    def _judge(self, places: list[str], rebuilt: list[Tensor]) -> None:
        saved = {
            int(place.split(maxsplit=3)[2].rstrip(":")): place
            for place in places
            if place.startswith(SAVED)
        }
        others = [place for place in places if not place.startswith(SAVED)]
        drew = all(place.startswith(STREAM) for place in others)
        if others and drew and not saved and self.guard.verify is not True:
            # The layer drew what it drew in the forward: all tensors agree.
            warnings.warn(
                f"{self._name}: {described(others)}, and all tensors agree: another thread draws "
                "from a generator of torch",
                stacklevel=2,
            )
            return
        if others:
            chose = next((place for place in saved.values() if " of torch." in place), None)
            if not chose and self._rounds(others, saved):
                return
            self._refuse(described(places), bool(chose))
        for number in sorted(saved):
            if number not in self._doubtful:
                self.guard.doubts.add(number)
            elif self._reads(number, rebuilt[number]):
                self._refuse(f"{saved[number]} differs from the forward's, and backward reads it")
            else:
                self.guard.harmless.add(number)
                self.guard.doubts.discard(number)
        agreeing = self._doubtful.keys() - saved.keys() - self.guard.harmless
        self.guard.doubts -= agreeing
        for number in sorted(agreeing):
            warnings.warn(
                f"{self._name}: {SAVED} {number} of an earlier replay differed from its forward's, "
                "and now it agrees. If backward reads it, that step's gradients were wrong",
                stacklevel=2,
            )

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
        if not are_equal(first, again):  # no two are equal on this device
            return not all(map(_is_near, first, other))
        return not are_equal(first, other)

    def _rounds(self, others: list[str], saved: dict[int, str]) -> bool:
        """Tells whether results alone differ, by rounding. Warns with the name of the operator."""
        before, now = self._forward.outputs, self._replay.outputs
        if not before or not all(place.startswith("result") for place in others):
            return False
        if not all(map(_is_near, before, now)):
            return False
        result = now[int(others[0].split()[1])]
        operator = self._producers[min(saved)] if saved else _operator(result.grad_fn)
        warnings.warn(
            f"{self._name}: a replay differs from its forward by rounding, first in the result of "
            f"{operator}: this operator does not repeat itself on this device. With "
            "torch.use_deterministic_algorithms(True) gradients are equal to the bit",
            stacklevel=2,
        )
        return True

    def _refuse(self, what: str, chose: bool = False) -> None:
        earlier = (
            ""
            if self._call == 1 or self.guard.verify is True
            else " Earlier steps may have been wrong already."
        )
        raise RecomputeMismatch(
            f"{NOT_THE_SAME} {self._name}, {what}.{earlier} "
            + (
                "The layer chose otherwise, as a router does whose noise or ties do not repeat: "
                "make the choice repeatable, or"
                if chose
                else "The layer reads or changes something that a replay cannot restore "
                "(docs/any-model.md):"
            )
            + " take the layer out of the policy"
        )

    def _attributes(self, *, of_objects: bool = False) -> dict[str, Tensor]:
        """Returns the tensors that the layer's modules hold, without parameters."""
        parts = Contents.of_layer(self._layer, of_objects).parts
        return {
            f"tensor {name}": part.value
            for name, part in parts.items()
            if isinstance(part.value, Tensor) and not isinstance(part.value, nn.Parameter)
        }


class _LayerRun(Execution):
    """One run of a layer.

    given, attributes: the arguments, and the tensors of the layer that are inputs of the graph.
    inputs: the names of the graph's inputs. outputs: the tensors among the results.
    weights: the hashes of parameters of which parts were saved.
    """

    def __init__(self, given: dict[str, Tensor], attributes: dict[str, Tensor]) -> None:
        super().__init__()
        named = given | attributes
        self.inputs = inputs_of(named.items())
        self.given: list[Any] = [
            each if each.is_leaf else get_gradient_edge(each)
            for each in named.values()
            if each.requires_grad and each.layout == torch.strided  # torch has no edge of others
        ]
        self.outputs: list[Tensor] = []
        self.weights: Hashes = {}

    def gradients(self, results: list[Tensor], layer: nn.Module) -> list[Tensor]:
        """Returns the gradients of the results, weighted at random, of all inputs."""
        inputs = [*self.given, *(each for each in layer.parameters() if each.requires_grad)]
        random = torch.Generator().manual_seed(1)
        weights = [
            torch.rand(each.shape, generator=random).to(each)
            if each.layout == torch.strided and not each.is_nested
            else torch.ones_like(each)
            for each in results
        ]
        found = torch.autograd.grad(results, inputs, weights, retain_graph=True, allow_unused=True)
        return [torch.zeros(0) if each is None else each for each in found]


def _address(tensor: Tensor) -> int | None:
    return address_of(tensor.untyped_storage()) if tensor.layout == torch.strided else None


def _may_round(tensors: list[Tensor]) -> bool:
    return not torch.are_deterministic_algorithms_enabled() and any(
        each.device.type != "cpu" for each in tensors
    )


def _operator(node: Any) -> str:
    """Returns the name of the operator that made a tensor. node: the tensor's grad_fn, or None."""
    name = node.name() if node else "an operator without a gradient"
    return name.partition("Backward")[0]


def _is_near(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or not one.is_floating_point():
        return one.shape == other.shape and torch.equal(one, other)
    size = one.detach().double().abs().amax() if one.numel() else torch.zeros(())
    error = (one.detach().double() - other.detach().double()).abs()
    return bool((error <= ROUNDING * size).all())
