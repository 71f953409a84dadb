"""The regions of a layer, as the model calls them.

The model passes the name of a region and its function. `Regions` decides whether backward rebuilds
the region. The facts about each region are in config/regions.py.

Output-discarding recomputation frees a region's output after the forward, and rebuilds it:

    forward    y = norm(x) keeps x only;   z = linear(y) stores a recipe for y instead of y
    backward   of linear: the recipe runs norm(x) again;   of norm: goes back through that same run

This serves the cheap functions between two matmuls. Nothing is resized or written in place: while a
layer runs, saved-tensor hooks store the recipe where an operation saves the output. Hooks that were
in force before receive every other saved tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from megatron_lite.config.regions import MLP_REGION, MOE, REGIONS
from megatron_lite.parallel.collectives import results_may_be_kept, results_not_kept
from megatron_lite.parallel.rng import RngStreams
from megatron_lite.parallel.torch_internals import address_of, hooks_in_force

from .phase import is_recomputing
from .saved import Handle, bytes_of, exchanging, results_of, saved_value, view_in

if TYPE_CHECKING:
    from .checkpoint import Record
    from .ops import KeptResults

DISCARDING = frozenset(name for name, facts in REGIONS.items() if facts.method == "discard")


@contextmanager
def discarding() -> Iterator[Callable[[Tensor], None]]:
    """Yields a function `discard(output)`, from which on a save of `output`, or of a view of it, in
    the block stores a recipe.

    The output must come from checkpoint(..), since the recipe rebuilds it through its grad_fn. The
    discarded outputs are released at the end of the block.
    """
    # By the address of the storage; the tensor keeps it in use.
    discarded: dict[int, Tensor] = {}

    def recipe(tensor: Tensor) -> Handle | None:
        owner = discarded.get(address_of(tensor.untyped_storage()))
        if owner is None:
            return None
        return view_in(partial(_rebuilt_bytes, owner.grad_fn, owner.output_nr), tensor)

    def discard(output: Tensor) -> None:
        discarded[address_of(output.untyped_storage())] = output

    with exchanging(recipe):
        try:
            yield discard
        finally:
            discarded.clear()


def _rebuilt_bytes(node: Any, number: int) -> Tensor:
    from .checkpoint import rebuilt_outputs

    return bytes_of(results_of(rebuilt_outputs(node))[number])


class Redraw(NamedTuple):
    """Draws a tensor of random numbers a second time.

    rng: the random-number streams of this rank.
    draw: returns the tensor, computed from the next numbers of the current stream.
    record: the hashes that a verified draw is compared with; None without --recompute-verify.
    """

    rng: RngStreams
    draw: Callable[[], Tensor]
    record: Record | None

    def made(self, tensor: Tensor) -> Tensor:
        """Returns `tensor`. With a record, the first call stores its hash; later calls compare."""
        return self.record.recorded(lambda: tensor)() if self.record else tensor

    def again(self, state: Tensor) -> Tensor:
        """Returns the tensor drawn from `state`. The stream's own state is the same afterwards."""
        with self.rng.drawn_from(state):
            return self.made(self.draw())


class Choices:
    """The choices of the layers of one forward. It lives as long as the graph of its replays.

    A choice is a tuple of tensors without gradients: indices of experts, counts of tokens. A router
    that draws noise, or whose kernel breaks ties in any order, could choose otherwise in a replay.
    Its tensors go to the saved-tensor hooks that are in force when this object is made.
    is_replayed: whether a replay calls the routers; else nothing is kept here.
    """

    def __init__(self, *, is_replayed: bool) -> None:
        self._is_replayed = is_replayed
        self._hooks = hooks_in_force()
        self._kept: dict[int, tuple[Handle, ...]] = {}

    def of(self, layer: int, choose: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Returns the choice of a layer: `choose()` in the forward, and the same in a replay."""
        if is_recomputing() and layer in self._kept:
            return tuple(each() for each in self._kept[layer])
        # A mode that numbers the calls of operators must not see calls that a replay leaves out.
        with results_not_kept() if results_may_be_kept() else nullcontext():
            choice = choose()
        if not self._is_replayed:
            return choice
        self._kept[layer] = tuple(saved_value(each, self._hooks) for each in choice)
        return choice


@dataclass(frozen=True, kw_only=True)
class Regions:
    """The regions of one layer that are rebuilt in backward. A layer's forward takes them as an
    argument, so that a replay inside a unit, or another micro-batch, may rebuild other regions.

    skip_region_tails: whether the replay of a region leaves out its last matmul.
    skip_layer_tail: whether this run of the layer leaves out its last matmul. It is the replay of a
        unit's last layer: its graph is needed, and the values of its output are not.
    record: where a unit that is being verified notes what its regions return.
    results: the results of operators that an `ops(...)` policy keeps.
    choices: what the routers chose. The runs of a unit share them.
    tiles: into how many tiles of the sequence a rebuilt MLP is cut.
    """

    rebuilt: frozenset[str]
    rng: RngStreams
    layer: int
    skip_region_tails: bool
    verify: bool
    choices: Choices
    skip_layer_tail: bool = False
    record: Record | None = None
    results: KeptResults | None = None
    tiles: int = 1
    _called: set[str] = field(default_factory=set)
    _discard: list[Callable[[Tensor], None]] = field(default_factory=list)

    def run(
        self,
        name: str,
        function: Callable[..., Any],
        *args: Any,
        skip_tail: bool = False,
        modules: tuple[nn.Module | None, ...] = (),
    ) -> Any:
        """Returns `function(*args, skip_tail)`; if the region is rebuilt, only its arguments are
        kept.

        skip_tail: whether the function may leave out what only the values of its output need.
        modules: those whose parameters an MLP reads. It may run in tiles of its first argument.
        """
        self._called.add(name)
        if name not in self.rebuilt:
            return self.noted(name, function(*args, skip_tail))
        # The replay exists only to rebuild the graph. Its output is not read, because the
        # operations after the region saved their own inputs. So the replay may skip the last
        # matmul.
        forward = _with_last(function, skip_tail)
        replay = _with_last(function, True) if self.skip_region_tails else None
        if name == MLP_REGION and self.tiles > 1:
            from .tiles import run_in_tiles

            calls = [
                self._verified(f"{name}, tile {tile}", forward, self.rng)
                for tile in range(self.tiles)
            ]
            return run_in_tiles(calls, replay, modules, self.rng, *args, skips=skip_tail)
        from .checkpoint import checkpoint

        return checkpoint(
            self._verified(name, forward, self.rng), *args, rng=self.rng, replay=replay
        )

    def run_discarding(
        self, name: str, function: Callable[..., Any], *args: Any, outputs: int = 1
    ) -> Any:
        """Returns `function(*args)`, which draws no random numbers. If the region is rebuilt,
        `args` are kept, and the first `outputs` results are freed once the layer has run."""
        self._called.add(name)
        # In a replay of a region around it, that region keeps nothing.
        if name not in self.rebuilt or is_recomputing():
            return self.noted(name, function(*args))
        from .checkpoint import checkpoint

        output = checkpoint(self._verified(name, function, None), *args, rng=None)
        # The recipe finds the replay through the output's grad_fn. Under no_grad there is none.
        for each in results_of(output)[:outputs]:
            if each.grad_fn:
                self._discard[0](each)
        return output

    def redraw(self, name: str, draw: Callable[[], Tensor]) -> Redraw | None:
        """Returns how to draw a tensor of random numbers again in backward from the stream's state,
        or None if the tensor is to be kept."""
        if name not in self.rebuilt:
            return None
        return Redraw(self.rng, draw, self._record(name, None))

    def choose(self, choose: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Returns `choose()`, or in a replay what it returned in the forward."""
        return self.choices.of(self.layer, choose)

    def enter_tail(self) -> None:
        """Marks that the layer's last matmul comes next.

        Only the layer's output needs the operations from here on, so a replay may leave them out.
        """
        if self.results:
            self.results.enter_tail()

    def noted(self, name: str, output: Any) -> Any:
        """Returns `output`. A unit that is being verified compares it with the output of the
        forward."""
        if self.record:
            self.record.see(f"layer {self.layer}, {name}", output)
        return output

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Puts the hooks for discarded outputs, if any, in force around the layer's forward.

        Raises ValueError if the layer has not called a region that is to be rebuilt.
        """
        if self.rebuilt & DISCARDING:
            with discarding() as discard:
                self._discard.append(discard)
                yield
        else:
            yield
        for name in sorted(self.rebuilt - self._called):
            # Without dropout, as in an evaluation, there is no mask to draw again, and so on. A
            # layer with experts has no other MLP.
            facts = REGIONS[name]
            has_experts = MOE in self._called and MLP_REGION in (name, facts.parent)
            if facts.needs in ("", "scores") and not has_experts:
                raise ValueError(
                    f"region {name} saves nothing: no layer calls it. Add regions.run(..), "
                    "regions.run_discarding(..) or regions.redraw(..) in megatron_lite/model/, or "
                    f"remove {name} from REGIONS in megatron_lite/config/regions.py"
                )

    def _verified(
        self, name: str, function: Callable[..., Any], rng: RngStreams | None
    ) -> Callable[..., Any]:
        record = self._record(name, rng)
        return record.recorded(function) if record else function

    def _record(self, name: str, rng: RngStreams | None) -> Record | None:
        if not self.verify:
            return None
        from .checkpoint import Record

        return Record(f"layer {self.layer}, {name}", rng)


def _with_last(function: Callable[..., Any], last: Any) -> Callable[..., Any]:
    return lambda *args: function(*args, last)
