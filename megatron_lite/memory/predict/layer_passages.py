"""The passages of a segment of layers: its forward and its backward, under any recompute policy.

    nothing rebuilt    the workspaces of the operations, one after the other
    a unit             forward: its input is kept. backward: the forward of its layers again, then
                       their backward
    a region           forward: its inputs are kept. backward: before the first operation that reads
                       a rebuilt tensor, the forward of the region again

The gradients under way are the same under every policy. So the allocations of an operation's
backward, besides the tensors that it frees, follow from its workspace. The kept and the rebuilt
tensors are counted by name. A replay holds the gradient of its output until it ends. Standard
library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from itertools import zip_longest
from typing import NamedTuple

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.regions import CORE_ATTENTION, REGIONS, Method
from megatron_lite.description.dropout_workspace import drawn_mask
from megatron_lite.description.operations import Course, LayerDescription, Operation, course
from megatron_lite.description.self_attention import attention_output
from megatron_lite.description.sizes import Sizes, is_widened, residual_element_bytes
from megatron_lite.memory.predict.keepers import first_keepers, inputs_until
from megatron_lite.memory.predict.kept_tensors import layer_terms
from megatron_lite.memory.predict.passages import Passage, change, joined, of_course
from megatron_lite.memory.predict.replays import kept_calls


class Passages(NamedTuple):
    """The forward and the backward of a part of a stage.

    When the forward begins, the input is held; when it ends, the output is held too. When the
    backward begins, the gradient of the output is held; when it ends, only that of the input is.
    """

    forward: Passage
    backward: Passage


class _Rebuild(NamedTuple):
    """A rebuild before the backward of an operation.

    course: the rebuild itself. made: the names and bytes of the tensors that are held then.
    until: the number of its first operation. What the rebuild itself holds is freed after the
        backward of that operation.
    discarded: the name of a discarded output, which a rebuild of its region holds; else "".
    gradient, output: the bytes of the gradient of a replay's output, which the replay holds until
        the backward of `until` has ended, and of the output if it is computed.
    what: what runs again.
    """

    course: Course
    made: dict[str, int]
    until: int
    what: str
    gradient: int = 0
    output: int = 0
    discarded: str = ""


def layer_passages(
    model: ModelConfig,
    layer: LayerDescription,
    regions: Set[str],
    sizes: Sizes,
    *,
    skip_tail: bool,
    returned: tuple[int, int] | None = None,
) -> Passages:
    """Returns the passages of a layer. regions: the names of the regions that it rebuilds.

    skip_tail: whether a replay leaves out what only its output needs.
    returned: the number of an operation, and the bytes that come back from host memory before its
        backward.
    """
    return Passages(
        _forward(layer, regions, sizes),
        _backward(model, layer, regions, sizes, skip_tail, returned=returned),
    )


def unit_passages(
    model: ModelConfig,
    layers: Sequence[LayerDescription],
    sizes: Sizes,
    *,
    skip_tail: bool,
    between: Sequence[Passage] = (),
) -> Passages:
    """Returns the passages of a unit that keeps its whole input.

    layers: the layers of the unit.
    between: what happens after the backward of each layer but the last one to run.
    """
    hidden, states = layers[0].input.num_bytes, sizes.rng_state_bytes
    plain = [layer_passages(model, one, frozenset(), sizes, skip_tail=False) for one in layers]
    # A layer keeps nothing. The output of the layer before is freed when it has run.
    runs = [one.forward._replace(end=0, kept=0) for one in plain]
    last = _backward(model, layers[-1], frozenset(), sizes, skip_tail, ends_replay=True)
    backward = [last, *(one.backward for one in reversed(plain[:-1]))]
    # A replay without its tail returns one element, expanded to the shape of the output.
    output = residual_element_bytes(model, sizes) if skip_tail else hidden
    whole = joined(
        _unit_replay(layers, sizes, skip_tail=skip_tail),
        *(one for pair in zip_longest(backward, between) for one in pair if one is not None),
        change(-hidden - output - states),
    )
    rebuilt = sum(sum(_kept(one, frozenset(), sizes).values()) for one in layers) - hidden
    return Passages(
        joined(runs[0], change(hidden), *runs[1:], change(states))._replace(kept=hidden + states),
        whole._replace(
            kept=-hidden - states, fullest=whole.fullest._replace(kept=0, rebuilt=rebuilt)
        ),
    )


def ops_passages(
    model: ModelConfig,
    layer: LayerDescription,
    ops: Sequence[str],
    sizes: Sizes,
    *,
    skip_tail: bool,
) -> Passages:
    """Returns the passages of a layer that keeps its input and the results of chosen operators."""
    hidden, states = layer.input.num_bytes, sizes.rng_state_bytes
    plain = layer_passages(model, layer, frozenset(), sizes, skip_tail=False)
    results = {
        tensor.name: tensor.num_bytes
        for _, call in kept_calls(layer, ops, skip_tail=skip_tail)
        for tensor in call.returns
    }
    kept = _kept(layer, frozenset(), sizes)
    again = sum(size for name, size in kept.items() if name not in results) - hidden
    # The layer's own backward frees the tensors that the layer saves, and not these.
    more = sum(size for name, size in results.items() if name not in kept) + states
    replay = _unit_replay((layer,), sizes, skip_tail=skip_tail)
    replay = replay._replace(most=max(again, replay.most - sum(results.values())), end=again)
    # The layer holds its kept results until its backward has ended, because it may run twice.
    backward = _backward(model, layer, frozenset(), sizes, False, lasting=results.keys())
    whole = joined(replay, backward, change(-more))
    total = hidden + states + sum(results.values())
    return Passages(
        plain.forward._replace(end=total, kept=total),
        whole._replace(kept=-total, fullest=whole.fullest._replace(rebuilt=again)),
    )


def _unit_replay(layers: Sequence[LayerDescription], sizes: Sizes, *, skip_tail: bool) -> Passage:
    # The generators' present states are put aside while the replay runs.
    parts = [change(sizes.rng_state_bytes)]
    for number, layer in enumerate(layers):
        tail = layer.tail_operations() if skip_tail and number == len(layers) - 1 else ()
        parts += [
            of_course(_forward_again(one, skip=one in tail), f"replay of {one.name}")
            for one in layer.operations
        ]
    return joined(*parts, change(-sizes.rng_state_bytes))


def _forward_again(operation: Operation, *, skip: bool) -> Course:
    return (
        operation.replayed.forward
        if skip and operation.replayed is not None
        else operation.workspace.forward
    )


def _forward(layer: LayerDescription, regions: Set[str], sizes: Sizes) -> Passage:
    """Returns the forward of a layer.

    A region that is replayed keeps nothing but its inputs, as soon as it has run. Outputs that are
    discarded live until the layer ends.
    """
    kept = _kept(layer, regions, sizes)
    whole = Passage()
    for one in layer.operations:
        whole = whole.then(of_course(one.workspace.forward, f"forward of {one.name}"))
        for region in _rebuilt_by("replay", one, regions):
            if one is list(layer.inside({region}))[-1]:
                inside = _missing(list(layer.inside({region})), kept)
                whole = whole.then(change(-sum(inside.values())))
    total = sum(kept.values())
    # The rest of a rebuilt region is freed now. The output is held, and the input was held before.
    return whole.then(change(total - whole.end))._replace(kept=total)


def _backward(
    model: ModelConfig,
    layer: LayerDescription,
    regions: Set[str],
    sizes: Sizes,
    skip_tail: bool,
    *,
    ends_replay: bool = False,
    returned: tuple[int, int] | None = None,
    lasting: Set[str] = frozenset(),
) -> Passage:
    """Returns the backward of a layer.

    ends_replay: whether it is the last one of a unit.
    lasting: the names of the kept tensors that are freed only when the backward ends.
    """
    operations = layer.operations
    own = first_keepers(operations)
    held = _kept(layer, regions, sizes)
    # by name: the number of the operation after whose backward the tensor is freed
    until = {name: own.get(name, 0) for name in held} | inputs_until(operations, regions, sizes)
    until |= dict.fromkeys(lasting & until.keys(), 0)
    whole, rebuilt = Passage(), set[str]()
    later = [0] * len(operations)  # further bytes that are freed after the backward of each
    for number in reversed(range(len(operations))):
        one = operations[number]
        work, gradient = one.workspace, 0
        if returned is not None and number == returned[0]:
            whole = whole.then(change(returned[1], kept=returned[1]))
        for rebuild in _rebuilds(model, layer, number, regions, held, sizes, skip_tail):
            held |= rebuild.made
            rebuilt |= rebuild.made.keys()
            until |= {name: own[name] for name in rebuild.made}
            if rebuild.discarded:
                until[rebuild.discarded] = rebuild.until
            later[rebuild.until] += rebuild.gradient + rebuild.output
            gradient += rebuild.gradient
            end = sum(rebuild.made.values()) + rebuild.output
            again = sum(held[name] for name in rebuilt)
            whole = whole.then(
                of_course(rebuild.course._replace(end=end), rebuild.what, rebuilt=again)
            )
        # Here the replay holds the gradient of its output, so this backward cannot free it or add
        # to it in place.
        if gradient or (ends_replay and one.name == layer.absorbs):
            work = one.replayed or work
        # The workspace frees what no earlier operation keeps. Here other tensors may be freed.
        natural = sum(
            tensor.num_bytes
            for tensor in one.keeps
            if own[tensor.name] == number and not tensor.shared
        )
        freed = [name for name in held if until[name] == number]
        end = one.workspace.backward.end + natural - sum(held[name] for name in freed) + gradient
        if ends_replay and one.name == layer.absorbs:
            end += layer.input.num_bytes  # the gradient of the output, which the replay holds
        whole = whole.then(
            of_course(
                Course(work.backward.most, end),
                f"backward of {one.name}",
                kept=-sum(held[name] for name in freed if name not in rebuilt),
                rebuilt=sum(held[name] for name in rebuilt),
            )
        ).then(change(-later[number]))
        rebuilt.difference_update(freed)
        for name in freed:
            del held[name]
    return whole


def _rebuilds(
    model: ModelConfig,
    layer: LayerDescription,
    number: int,
    regions: Set[str],
    held: dict[str, int],
    sizes: Sizes,
    skip_tail: bool,
) -> Iterator[_Rebuild]:
    """Yields what is rebuilt before the backward of operation `number`. held: what exists then."""
    operations = layer.operations
    one = operations[number]
    for region in _rebuilt_by("replay", one, regions):
        inside = [n for n, other in enumerate(operations) if region in other.regions]
        if number == inside[-1]:  # the first one of the region that backward reaches
            tail = {name for name, _ in layer.tail(region)} if skip_tail else set()
            again = [operations[n] for n in inside]
            gradient, output = _ends(model, region, sizes)
            yield _Rebuild(
                course(*(_forward_again(other, skip=other.name in tail) for other in again)),
                _missing(again, held),
                inside[0],
                f"replay of {region}",
                gradient,
                0 if tail else output,
            )
    for tensor in one.keeps:
        for place, other in enumerate(operations):
            if tensor.name not in held and tensor.name in _discards(other, regions):
                made = {tensor.name: tensor.num_bytes, **_missing([other], held)}
                what = f"replay of {other.name}"
                yield _Rebuild(other.workspace.forward, made, place, what, discarded=tensor.name)
    if _rebuilt_by("redraw", one, regions):
        for name, size in _missing([one], held).items():
            yield _Rebuild(drawn_mask(size, sizes), {name: size}, number, f"redraw of the {name}")


def _ends(model: ModelConfig, region: str, sizes: Sizes) -> tuple[int, int]:
    """Returns the bytes of the gradient that a region's replay alone holds, and of its output.

    Without dropout the gradient of the MLP's output is that of the residual stream, which is held
    anyway.
    """
    if region == CORE_ATTENTION:
        output = attention_output(model, sizes).num_bytes
        # A flash kernel saves its output, so that counts among the rebuilt tensors.
        return output, output if model.builds_scores(sizes.device) else 0
    hidden = sizes.local_tokens * model.hidden_size * sizes.element_bytes
    return hidden if model.hidden_dropout or is_widened(model, sizes) else 0, hidden


def _discards(operation: Operation, regions: Set[str]) -> set[str]:
    return {
        name for entry in operation.enters if entry.region in regions for name in entry.discards
    }


def _rebuilt_by(method: Method, operation: Operation, regions: Set[str]) -> list[str]:
    """Returns the recomputed regions of the operation that backward rebuilds by this method."""
    return [
        name for name in operation.regions if name in regions and REGIONS[name].method == method
    ]


def _missing(operations: Sequence[Operation], held: dict[str, int]) -> dict[str, int]:
    return {
        tensor.name: tensor.num_bytes
        for one in operations
        for tensor in one.keeps
        if tensor.name not in held and not tensor.shared
    }


def _kept(layer: LayerDescription, regions: Set[str], sizes: Sizes) -> dict[str, int]:
    """Returns the names and bytes of the tensors that a layer keeps, without shared tables."""
    return {
        term.tensor.name: term.num_bytes
        for term in layer_terms(layer.operations, 0, regions, sizes)
        if not term.tensor.shared
    }
