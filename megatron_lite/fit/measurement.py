"""Measures what each action on each kind of layers costs and saves in a step.

    1   The step runs with every layer rebuilt in full, which needs about the least memory.
    2   It runs again with other actions on single layers of each kind. The differences at these
        layers are what the actions cost and save. One such step tries several actions, on
        different layers; if that fails, one at a time.

Before a step is measured it runs twice: verified, so that replays prove themselves, and once more,
since first calls copy what they might write to.
"""

import gc
import weakref
from collections import ChainMap, Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import chain
from operator import le, sub
from statistics import median_low
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from megatron_lite.parallel.weights import bytes_of
from megatron_lite.recompute.apply import apply_policy_, remove_policy_
from megatron_lite.recompute.contents import tensors_of
from megatron_lite.recompute.replay import RecomputeMismatch

from .gauges import Gauge, clock, cpu_gauge, cuda_gauge
from .layers import kind_of, stage_of
from .plans import (
    AFTER,
    BACKWARD,
    CALL,
    FORWARD,
    OUTSIDE,
    Moment,
    Option,
    Plan,
    Problem,
    Shared,
    policy_text,
)
from .ranks import OtherShapes, Ranks
from .step import ONE_BATCH, VARIES, Span, Step

FULL = "full"
CANDIDATES = ("none", "ops(matmul,attention)", "ops(matmul/2,attention)", "ops(attention)")
ON_RANKS = ("full@split",)  # they need tensor-parallel layers
ON_HOST = ("none@host", "full@host")  # they need a GPU, which has pinned memory beside it
MOST_TRIES = 10  # to measure a step whose inputs vary
DRAWS = 8  # of chance, where layers of a list have not run
ENOUGH = 2  # draws, if they take what the first one takes
CHANCE = 0.01  # of the peaks of a step's parts, from which on draws differ
CHANGES = "note: chance decides what a step takes, so a later one may take more"
TIMED = 2  # runs on a CPU, of which the fastest counts
FIGURES = "kept", "held", "forward", "backward", "nanoseconds", "left", "late"  # of an option
IMPOSSIBLE = 1 << 60  # the bytes of an action that a layer cannot have


class Measurement:
    """A measured step.

    model: the model, which has a policy only as long as a step is measured.
    problem: what plans.py chooses from.
    terms: the bytes of weights, gradients and optimizer states.
    notes: what a reader should know of the figures.
    """

    def __init__(
        self,
        model: nn.Module,
        lists: Mapping[str, list[nn.Module]],
        step: Callable[[], Any],
        optimizer: Any,
        gauge: Callable[[Callable[[], int]], AbstractContextManager[Gauge]] | None = None,
        *,
        ranks: Ranks | None = None,
        buckets: int = 0,
        around: Callable[..., list[Span]] | None = None,
        kinds: Mapping[nn.Module, Hashable] | None = None,
    ) -> None:
        """lists: the layers, by the names of their lists in the model.
        optimizer: see fit/update.py.
        gauge: makes what reads the device (gauges.py); None: the one for the device of the model.
        ranks: those that are fitted together.
        buckets: the bytes that data parallelism holds beside weights and gradients.
        around: runs a step on fake tensors, which neither need a first run nor prove replays. It
            gets the step, what makes a gauge, and the actions of layers; others keep everything.
        kinds: those of layers; None: as the first run shows.
        Raises ValueError if the step runs no backward through the layers.
        """
        self.model, self._lists, self._around = model, lists, around
        self._kinds = kinds
        self._like: dict[nn.Module, nn.Module | None]  # of layers that chance has dropped
        self._dropped: Counter[int]  # like each layer
        self._ranks, device = ranks or Ranks(), next(model.parameters()).device
        self._on_gpu = device.type == "cuda"
        self._gauge = gauge or (partial(cuda_gauge, device) if self._on_gpu else cpu_gauge)
        while isinstance(within := getattr(optimizer, "optimizer", None), Optimizer):
            optimizer = within  # of the wrapper of accelerate
        self._full = dict.fromkeys(chain.from_iterable(lists.values()), FULL)
        # A loss may have parameters of its own.
        groups = getattr(optimizer, "param_groups", [])
        trained = chain(model.parameters(), *[each["params"] for each in groups])
        self._parameters = [*dict.fromkeys(trained)]
        self._step = Step(model, [*self._full], step, self._parameters, self._ranks)
        states = tensors_of(list(getattr(optimizer, "state", {}).values()))
        weights = [*self._parameters, *model.buffers()]
        self._held = buckets + bytes_of([*weights, *states])
        self._missing = self._update = 0
        self.notes: list[str] = []
        if optimizer:
            from .update import update_bytes

            counted = partial(update_bytes, model, optimizer, device, self.notes)
            self._missing, self._update = self._ranks.agreed(counted)
        self.terms = {
            "weights and buffers": bytes_of(weights),
            "gradients": bytes_of(each for each in self._parameters if each.requires_grad),
            "buckets of gradients": buckets,
            "optimizer states": bytes_of(states) + self._missing,
        }
        self._notes_before, self._tries = [*self.notes], 0
        self.measure()

    def measure(self) -> None:
        """Measures the step, and begins again if a run has larger inputs than those before it."""
        while self._tries < MOST_TRIES:
            self._tries += 1
            self.notes[:] = self._notes_before
            with suppress(OtherShapes):
                return self._measure()
        raise ValueError(f"the inputs of the step get larger and larger: {ONE_BATCH}")

    def _measure(self) -> None:
        lists, self._like, self._dropped = self._lists, {}, Counter[int]()
        self._step.forget_layers()
        try:
            spans = self._measured(self._full)
        except RecomputeMismatch as error:
            raise ValueError(
                f"{error}: name the lists of the others with layers_fqn, among {', '.join(lists)}"
            ) from error
        except (OtherShapes, torch.OutOfMemoryError):
            raise
        except Exception as error:  # such as of labels that are no input of the model
            if not self._step.varies:
                raise
            raise ValueError(
                f"{VARIES}, and fails with the largest ({error}): {ONE_BATCH}"
            ) from error
        self._notes, self._layers = self._step.sharing, [*self._step.numbers]
        self._ranks.agreed(partial(_check_backward, spans, lists))
        self._find_dropped(self._calls(spans))
        spans = self._completed(spans)
        for name, layers in lists.items():
            if not {*layers} & {*self._layers}:
                self.notes.append(
                    f"note: {name} does not run in this step, so what it would keep is in no figure"
                )
        candidates = [*CANDIDATES, *ON_RANKS * self._step.is_divided]
        candidates += ON_HOST * self._on_gpu
        self.problem = self._problem(spans, candidates)
        if any(self._ranks.told(self._step.varies)) or self._step.seed is not None:
            self.notes.append(f"note: {VARIES}; these figures are for the largest seen")

    def confirmed(self, plan: Plan) -> tuple[dict[str, str], int]:
        """Puts a plan on the model. Returns the policies of the lists of layers, by name, and the
        peak of a real step with them. Raises OtherShapes if larger inputs were not measured."""
        remove_policy_(self.model)
        try:
            actions = [option.action for option in plan.choice]
            return self._apply_(dict(zip(self._layers, actions, strict=True))), self.peak()
        except BaseException:
            remove_policy_(self.model)
            raise

    def peak(self) -> int:
        """Returns the peak of a step with the policy that is on the model, on the fullest rank."""
        most, first = self._fullest()
        draws, varies = not (self._around or self._like) and self._step.draws, False
        if not any(self._ranks.told(draws)):
            return most
        sizes = {self._step.seed: max(self._ranks.told(self._step.size))}
        for seed in range(DRAWS):  # a layer may draw whether it does its work, a step its inputs
            if seed == ENOUGH and not varies:
                return most
            with self._step.drawing(seed):
                more, peaks = self._fullest()
            most = max(most, more)
            sizes.setdefault(seed, max(self._ranks.told(self._step.size)))
            alike = len(peaks) == len(first) and np.allclose(peaks, first, CHANCE)
            varies |= not all(self._ranks.told(alike))
        largest = max(sizes, key=sizes.__getitem__)  # the first of them
        if largest is not None and largest != self._step.seed:
            self._step.draw_from(largest)
            raise OtherShapes
        self.notes = [*dict.fromkeys([*self.notes, CHANGES])]
        return most

    def _fullest(self) -> tuple[int, list[int]]:
        spans = self._completed(self._read())
        peaks = [span.peak for span in spans]
        most = max(max(peaks) + self._missing, spans[-1].end + self._update)
        return max(self._ranks.told(most)), peaks

    def name_of(self, place: int) -> str:
        """Returns the name of a layer of the problem."""
        layer = self._layers[place]
        return next(
            f"{name}.{layers.index(layer)}"
            for name, layers in self._lists.items()
            if layer in layers
        )

    def _apply_(self, actions: Mapping[nn.Module, str], *, verify: bool = False) -> dict[str, str]:
        self._actions, rest, policies = actions, dict(actions), {}
        rest |= {layer: rest.get(like or layer, FULL) for layer, like in self._like.items()}
        for name, layers in self._lists.items():
            # A layer may stand in a list twice.
            policies[name] = policy_text([rest.pop(layer, "none") for layer in layers])
            apply_policy_(self.model, layers_fqn=name, policy=policies[name], verify=verify)
        return policies

    def _read(self) -> list[Span]:
        if not self._around:
            self._step.run()
        gc.collect()  # memory in cycles of the step before would be counted, or not, by chance
        # The step may free the gradients that are there when it begins.
        there = [weakref.ref(x.grad) for x in self._parameters if x.grad is not None]
        make = partial(self._gauge, lambda: self._held + bytes_of(one() for one in there))
        if self._around:
            return self._around(self._step, make, self._actions)
        return self._step.run(make(), takes_notes=False)

    def _measured(self, actions: Mapping[nn.Module, str]) -> list[Span]:
        """Returns the parts of a step with these actions, and leaves the model without a policy."""
        try:
            if not self._around:
                self._apply_(actions, verify=True)
                self._step.run()
                remove_policy_(self.model)
            self._apply_(actions)
            spans = self._read()
            self._ranks.agreed(self._check_layers)
            if self._gauge is cpu_gauge:  # its profiler takes time by itself
                runs = [self._step.run(clock(), takes_notes=False) for _ in range(TIMED)]
                times = [min(one.nanoseconds for one in same) for same in zip(*runs, strict=False)]
                pairs = zip(spans, times, strict=False)
                spans = [span._replace(nanoseconds=time) for span, time in pairs]
            return self._completed(spans)
        finally:
            remove_policy_(self.model)

    def _check_layers(self) -> None:
        """Raises ValueError if a layer has run before, and not in the last run with notes."""
        if not self._around and len(self._step.sharing.needs) < len(self._step.numbers):
            raise ValueError(
                "the step calls other layers in each run, though the global generators are "
                "restored: let it call all of them while it is measured"
            )

    def _calls(self, spans: list[Span]) -> Counter[nn.Module]:
        layers = [*self._step.numbers]
        return Counter(layers[span.layer] for span in spans if span.name == FORWARD)

    def _find_dropped(self, calls: Counter[nn.Module]) -> None:
        """Finds the layers that chance has dropped in the step.

        From then on each changes the bytes as much as one that is alike and has run.
        """
        lists = {name: x for name, x in self._lists.items() if len({*map(calls.get, x)}) > 1}
        if self._around or not any(self._ranks.told(bool(lists))):
            return
        drawn, seen = list[Counter[nn.Module]](), {*calls}
        try:
            self._apply_(self._full)
            for seed in range(DRAWS):
                with self._step.drawing(seed):
                    spans = self._step.run(clock(), takes_notes=False)
                drawn.append(self._calls(spans))
                seen |= drawn[-1].keys()
                if all(self._ranks.told(seen.issuperset(chain.from_iterable(lists.values())))):
                    break
        finally:
            remove_policy_(self.model)
        numbers = self._step.numbers
        self._step.forget_layers(len(self._layers))
        for name, layers in lists.items():
            if all(one[layer] == calls[layer] for layer in layers for one in drawn):
                continue
            ran = [(place, one) for place, one in enumerate(layers) if calls[one]]
            for place, layer in enumerate(layers):
                alike = [
                    (self._notes.needs[numbers[one]][::-1], at < place, -abs(at - place), one)
                    for at, one in ran
                    if kind_of(one) == kind_of(layer)
                ]
                if not calls[layer] and layer in seen:
                    self._like[layer] = max(alike)[-1] if alike else None
            note = f"note: chance drops layers of {name}; the figures are of a step that drops none"
            if None in self._like.values() or len({calls[one] for _, one in ran}) > 1:
                note += ", as far as like ones have run, so a later step may take more"
            self.notes.append(note)
        self._dropped = Counter(numbers[like] for like in self._like.values() if like)

    def _completed(self, spans: list[Span]) -> list[Span]:
        """Returns the parts of the step as if chance had dropped no layer."""
        more, found = 0, list[Span]()
        for span in spans:
            times = self._dropped[span.layer]
            change = times * (span.end - span.start)
            found.append(
                span._replace(
                    start=span.start + more,
                    end=span.end + more + change,
                    peak=span.peak + more + max(0, change),
                    nanoseconds=(1 + times) * span.nanoseconds,
                )
            )
            more += change
        return found

    def _problem(self, spans: list[Span], candidates: list[str]) -> Problem:
        by_kind: dict[Any, list[int]] = {}
        known = self._kinds or self._notes.kinds()
        self._used = {span.layer for span in spans if span.name == BACKWARD}
        calls = Counter(span.layer for span in spans if span.name == FORWARD)
        stages = {layer: stage_of(name) for name, layers in self._lists.items() for layer in layers}
        # Without a backward, what is kept is soon freed.
        keys = [
            (known[layer], stages[layer], n in self._used, calls[n], self._dropped[n])
            for n, layer in enumerate(self._layers)
        ]
        order = [*map([*self._full].index, self._layers)]
        told = self._ranks.told((order, self._notes.shared(), [*map(keys.index, keys)]))
        orders, shared, alike = zip(*told, strict=True)
        self._shared = _of_all_ranks(orders, shared)
        # What a router sends to its experts may differ from rank to rank.
        for number, key in enumerate(zip(*alike, strict=True)):
            by_kind.setdefault(key, []).append(number)
        kinds = [*by_kind.values()]
        self._alike = {number: same for same in kinds for number in same}
        waiting = [(numbers, list(candidates)) for numbers in kinds]
        found, shown = dict[tuple[int, str], Option](), dict[tuple[int, str], int]()
        self._finds_left = False  # whether a forward after a backward does
        # what a call of a layer keeps, in thousandths of its largest call, if it has a backward
        backwards = {(span.layer, span.call) for span in spans if span.name == BACKWARD}
        self._weights = {
            call: size for span in spans for call, size in span.alive.items() if call in backwards
        }
        while any(actions for _, actions in waiting):
            tried = dict[int, str]()
            for numbers, actions in waiting:
                # The first and the last layer of a kind may have other neighbours. A layer that is
                # rebuilt holds the cache of one before it, so no neighbours are tried together.
                # Two layers that copy to the host would wait for each other. What a layer without
                # a backward keeps is seen by what is there, not by what its backward frees.
                for number in numbers[1:-1] or numbers:
                    near = {number - 1, number, number + 1}
                    copies = any(action in ON_HOST for action in tried.values())
                    if (
                        actions
                        and not (tried.keys() - self._used or (tried and number not in self._used))
                        and not tried.keys() & near
                        and not (copies and actions[0] in ON_HOST)
                    ):
                        tried[number] = actions.pop(0)
            for number, one in self._compared(tried, spans).items():
                key = self._alike[number][0], one.action
                found[key], shown[key] = one, number
        # After how many layers others release the results that options keep: 0 if they hold none.
        # Those that are released right after their layer are left out (`Option.late`).
        self._outlive = set[int]()
        options: list[list[Option]] = [[] for _ in self._layers]
        for numbers in kinds:
            agreed = self._agreed([found[numbers[0], action] for action in candidates])
            kept = {FULL: 0} | {one.action: one.kept for one in agreed}
            # Without its twin on the device, which ran out of memory, it is not known what moves.
            agreed = [
                one._replace(moved=kept[twin] - one.kept)
                for one in agreed
                if (twin := one.action.removesuffix("@host")) in kept
            ]
            # What a layer without a backward keeps serves nothing, and is there for a time that
            # others decide.
            if numbers[0] not in self._used and agreed and agreed[0].kept > 0:
                agreed = []
            for number in numbers:
                full = Option(FULL, keeps=frozenset(self._notes.kept[number]))
                options[number] = [
                    self._at(number, one, full.keeps, shown.get((numbers[0], one.action), number))
                    for one in (*agreed, full)
                ]
        are_held = bool(self._outlive) and min(self._outlive) > 0
        time = sum(span.nanoseconds for span in spans)
        sizes = {key: one.num_bytes * self._weight(one.first) for key, one in self._shared.items()}
        told = self._ranks.told((spans[-1].end + self._update, time, are_held, sizes, options))
        ends, times, held, of_calls, every = zip(*told, strict=True)
        options = [[*map(_dearest, zip(*same, strict=True))] for same in zip(*every, strict=True)]
        # Most shared tensors are kept by every option.
        differ = {key for each in options for one in each for key in one.keeps ^ each[-1].keeps}
        moments = self._moments(spans)
        return Problem(
            options=[[one._replace(keeps=one.keeps & differ) for one in each] for each in options],
            begin=max(one.peak for one in moments[-1]),
            end=max((one.peak for one in moments[-1] if one.name == AFTER), default=0),
            moments=moments[:-1],
            update=max(ends),
            nanoseconds=max(times),
            shared={
                key: self._shared[key]._replace(num_bytes=min(one[key] for one in of_calls) // CALL)
                for key in differ
            },
            are_held=all(held),
        )

    def _moments(self, spans: list[Span]) -> list[list[Moment]]:
        """Returns the peaks by the place of their layer, and at the end those where none waits."""
        found = []
        again = _second_forward(spans)
        calls = [*map(self._weight, range(len(self._layers)))]
        for at, span in enumerate(spans):
            alive, place = [0] * len(self._layers), span.layer
            for (number, call), size in span.alive.items():
                alive[number] += self._weights.get((number, call), size)
            alive = [-(-CALL * one // whole) for one, whole in zip(alive, calls, strict=True)]
            # Outside of layers it is the last one of those that wait the most.
            if place < 0 and any(alive):
                place = max(range(len(alive)), key=lambda n: (alive[n], n))
            behind = place + (span.name != FORWARD)
            waiting = max(alive[:behind], default=0), max(alive[behind:], default=0)
            finds_left = self._finds_left and at >= again and span.name in (FORWARD, OUTSIDE)
            peak = span.peak + self._missing
            found.append((place, Moment(span.name, peak, *waiting, finds_left)))
        moments: list[list[Moment]] = [[] for _ in (*self._layers, None)]
        for place, one in sorted(chain(*self._ranks.told(found)), key=lambda each: -each[1].peak):
            here = moments[place]
            if not any(one.name == more.name and all(map(le, one, more)) for more in here):
                here.append(one)
        return moments

    def _shared_at(self, number: int, places: Iterable[int]) -> frozenset[int]:
        """Returns the shared tensors at places among the arguments and results of a layer."""
        tensors = self._notes.tensors[number]
        keys = {tensors[place] for place in places if place < len(tensors)}
        return frozenset(keys & self._shared.keys())

    def _is_elsewhere(self, number: int, place: int) -> bool:
        """Tells whether others hold an argument or result of a layer as well."""
        tensor = self._notes.tensors[number][place]
        return tensor in self._shared or tensor in self._notes.saved_later(number)

    def _at(self, number: int, option: Option, full: frozenset[int], like: int) -> Option:
        """Returns an option with the tensors that this layer shares, and with the bytes of what it
        keeps alone, such as the last layer its result.

        full: the places of what a full recompute keeps.
        like: the layer that has shown the option.
        """
        notes, tensors = self._notes, self._notes.tensors[number]
        later, more, shared = notes.saved_later(number), option.keeps - full, self._shared.keys()
        made = {tensors[place] for place in more} - notes.given(number) - shared
        self._outlive |= {later.get(each, number) - number for each in made} - {1}
        alone = {tensors[place] for place in more if self._is_elsewhere(like, place)} - shared
        late = {each for each in alone if later.get(each) == number + 1}
        calls = self._weight(number)
        return option._replace(
            keeps=self._shared_at(number, option.keeps),
            kept=option.kept * calls // CALL,
            held=(option.held + notes.num_bytes(alone - late)) * calls // CALL,
            late=notes.num_bytes(late) * calls // CALL,
        )

    def _weight(self, number: int) -> int:
        """Returns what all calls of a layer keep that have a backward, in thousandths of its
        largest call."""
        return sum(one for (n, _), one in self._weights.items() if n == number) or CALL

    def _compared(self, tried: dict[int, str], full: list[Span]) -> dict[int, Option]:
        """Returns the options that are tried, by the layers that try them.

        tried: the actions of some layers. All others are rebuilt in full.
        """
        failure = ""
        try:
            actions = {self._layers[number]: action for number, action in tried.items()}
            spans = self._measured(self._full | actions)
        # The device has too little memory, or the layer cannot follow.
        except RuntimeError as error:
            failure = str(error) or "RuntimeError"
        if failure:  # the error has ended: it would hold what the step had
            if len(tried) == 1:
                ((number, action),) = tried.items()
                self.notes.append(f"note: {action} is left out: {failure.splitlines()[0]}")
                return {number: Option(action, IMPOSSIBLE, IMPOSSIBLE)}
            return dict(ChainMap(*(self._compared(dict([one]), full) for one in tried.items())))
        found = {}
        grown = {n: [*map(sub, _figures(spans, n), _figures(full, n))] for n in tried}
        earlier, later = sum(kept for kept, *_ in grown.values()), 0
        for number, action in sorted(tried.items(), reverse=True):
            places = self._step.sharing.kept[number]
            kept, held, forward, backward, end, time = grown[number]
            # What a smaller call keeps may be less than its share, as with attention's squares.
            if action == CANDIDATES[0] and kept > 0:
                calls = _kept_by_call(spans, number)
                calls.subtract(_kept_by_call(full, number))
                for each, call in self._weights:
                    if each in self._alike[number] and self._weights[each, call] != CALL:
                        self._weights[each, call] = -(-CALL * calls[call] // kept)
            earlier -= kept
            keeps, left = self._shared_at(number, places), 0
            tensors = self._notes.tensors[number]
            for each in self._shared.keys() & tensors:
                one = self._shared[each]
                if one.first >= number:
                    held -= one.num_bytes * ((each in keeps) - (one.first == number))
            if number in self._used:
                notes, own = self._notes, {tensors[place] for place in places}
                given, later_on = notes.given(number), notes.saved_later(number).keys()
                made = own - given - self._shared.keys()
                held += notes.num_bytes(later_on & given - own) - notes.num_bytes(later_on & made)
                if 2 * (end - earlier - later) > kept - held > 0:
                    left, held = kept - held, kept
            later += left
            # Times are compared within one step, since others may use the machine as well.
            if others := [_figures(spans, n)[-1] for n in self._alike[number] if n not in tried]:
                time = _figures(spans, number)[-1] - median_low(others)
            found[number] = Option(
                action, kept, held, forward, backward, time, frozenset(places), left=left
            )
        if (again := _second_forward(full)) < len(full):
            self._finds_left |= 2 * (spans[again].start - full[again].start) > later > 0
        return found

    def _agreed(self, options: list[Option]) -> list[Option]:
        """Returns the options of a kind that all ranks can follow, each as dear as on any rank."""
        # A layer that keeps everything does the least, also where clocks are not exact.
        quickest = min(-1, *(option.nanoseconds for option in options))
        options[0] = options[0]._replace(nanoseconds=quickest)
        agreed = map(_dearest, zip(*self._ranks.told(options), strict=True))
        return [option for option in agreed if option.kept < IMPOSSIBLE]


def _check_backward(spans: list[Span], lists: Iterable[str]) -> None:
    if all(span.name != BACKWARD for span in spans):
        raise ValueError(
            f"the step runs no backward through {', '.join(lists)}: call "
            "loss.backward() in it, on a loss that depends on trainable parameters, and the "
            "layers as modules: no hook sees layer.forward(..)"
        )


def _dearest(same: Sequence[Option]) -> Option:
    """Returns an option with its highest figures on any rank."""
    figures = {name: max(getattr(one, name) for one in same) for name in FIGURES}
    # What a rank with a small batch saves in its backward is little, and so is what it holds there.
    figures["backward"] = max(one.held + one.backward for one in same) - figures["held"]
    return same[0]._replace(**figures)


def _second_forward(spans: list[Span]) -> int:
    """Returns the number of the first forward of a layer that follows a backward of one, or that of
    the parts."""
    first = next(number for number, span in enumerate(spans) if span.name == BACKWARD)
    after = (n for n, span in enumerate(spans) if n > first and span.name == FORWARD)
    return next(after, len(spans))


def _figures(spans: list[Span], layer: int) -> list[int]:
    """Returns the figures of an Option for a layer, which are not compared with anything yet, and
    the bytes at the end of its last backward."""
    own = [span for span in spans if span.layer == layer]
    forward = [span for span in own if span.name == FORWARD and span.is_largest]
    backward = [span for span in own if span.name == BACKWARD and span.is_largest]
    return [
        sum(span.end - span.start for span in forward),
        sum(span.start - span.end for span in backward),
        max((span.peak - span.start for span in forward), default=0),
        max((span.peak - span.start for span in backward), default=0),
        next((span.end for span in reversed(backward)), 0),
        sum(span.nanoseconds for span in own),
    ]


def _kept_by_call(spans: list[Span], layer: int) -> Counter[int]:
    """Returns how many bytes more there are after each forward of a layer than before it."""
    found = Counter[int]()
    for span in spans:
        if span.layer == layer and span.name == FORWARD:
            found[span.call] += span.end - span.start
    return found


def _of_all_ranks(
    orders: Sequence[list[int]], shared: Sequence[dict[int, Shared]]
) -> dict[int, Shared]:
    """Returns the shared tensors with the fewest bytes of any rank, or none if they differ.

    orders, shared: of each rank. Raises ValueError unless all call the same layers in one order.
    """
    if any(one != orders[0] for one in orders):
        raise ValueError(
            "the ranks call other layers, or in another order, so no policy serves all of "
            "them: fit the model before it is split into stages, and let chance drop no layers"
        )
    if any(one.keys() != shared[0].keys() for one in shared):
        return {}
    return {key: min(one[key] for one in shared) for key in shared[0]}
