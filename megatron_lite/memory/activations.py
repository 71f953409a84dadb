"""Bytes that one micro-batch keeps for backward on one rank, in closed form: a sum of named tensors.

    activation_bytes    on the device        host_bytes    in host memory, under @host

    Every tensor is a storage that lives from forward to backward and is no parameter. memory/meter.py measures the same figure,
    and the two are equal to the byte. Terms beyond sbh(34 + 5as/h)/t of 2205.05198 have names too: see `in_paper`.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from typing import NamedTuple

from megatron_lite.config.model import ModelConfig
from megatron_lite.memory.layer_operators import kept_results
from megatron_lite.memory.layer_tensors import KeptTensor, LayerTensors, Sizes, layer_tensors
from megatron_lite.recompute.plan import RecomputePlan, Segment

ROTARY_TABLES = "rotary tables"
EMBEDDING, HEAD = "embedding", "head"


class Term(NamedTuple):
    """layer: the number of a layer in its stage; None before the first and after the last. operation: who keeps it first.

    on_host: it waits for backward in host memory. In an arena a tensor counts as much as anywhere: as its own bytes.
    """

    layer: int | None
    operation: str
    tensor: KeptTensor
    on_host: bool = False

    @property
    def num_bytes(self) -> int:
        """Of the tensor."""
        return self.tensor.num_bytes


def activation_terms(model: ModelConfig, plan: RecomputePlan, sizes: Sizes) -> tuple[Term, ...]:
    """Every tensor that is kept, in the order of the forward."""
    layer = layer_tensors(model, sizes)
    terms = list(_embedding(model, sizes)) if sizes.has_embedding else []
    for segment in plan.segments:
        terms += _segment_terms(layer, segment, sizes)
        terms += _results(model, plan, segment, sizes)
    terms += _head(model, sizes) if sizes.has_head else []
    return tuple(_placed(_tables_once(terms), plan))


def activation_bytes(model: ModelConfig, plan: RecomputePlan, sizes: Sizes) -> int:
    """The sum of those `activation_terms` that are on the device."""
    return sum(term.num_bytes for term in activation_terms(model, plan, sizes) if not term.on_host)


def host_bytes(model: ModelConfig, plan: RecomputePlan, sizes: Sizes) -> int:
    """The sum of those that are in host memory."""
    return sum(term.num_bytes for term in activation_terms(model, plan, sizes) if term.on_host)


def working_set_bytes(model: ModelConfig, sizes: Sizes) -> int:
    """What a layer that is being replayed holds besides its input, when its backward begins."""
    layer = layer_tensors(model, sizes)
    whole = layer_terms(layer, 0, frozenset(), sizes)
    return sum(term.num_bytes for term in whole) - layer.input.num_bytes


def layer_terms(layer: LayerTensors, number: int, rebuilt: Set[str], sizes: Sizes) -> Iterator[Term]:
    """What one layer keeps that rebuilds the named regions."""
    lent = {name for region in rebuilt for name in layer.regions[region].lent}
    candidates = []
    entered = set()
    for operation in layer.operations:
        if operation.region not in rebuilt:
            candidates += [Term(number, operation.name, tensor) for tensor in operation.keeps]
        elif operation.region is not None:
            region = layer.regions[operation.region]
            candidates += [Term(number, f"{operation.region} (rebuilt)", tensor) for tensor in region.inputs]
            if region.draws and operation.region not in entered:
                states = KeptTensor(f"RNG states of {operation.region}", sizes.rng_state_bytes)
                candidates.append(Term(number, f"{operation.region} (rebuilt)", states))
            entered.add(operation.region)
    seen = set(lent)
    for term in candidates:
        if term.tensor.name not in seen:
            seen.add(term.tensor.name)
            yield term


def _segment_terms(layer: LayerTensors, segment: Segment, sizes: Sizes) -> Iterator[Term]:
    first = segment.first_layer
    if not segment.unit and not segment.ops:
        for number in range(first, first + segment.num_layers):
            yield from layer_terms(layer, number, segment.regions, sizes)
        return
    kept = layer.input
    if segment.split:
        kept = kept._replace(name=f"1/{sizes.tp_size} of the layer input", num_bytes=kept.num_bytes // sizes.tp_size)
    yield Term(first, "unit", kept)
    yield Term(first, "unit", KeptTensor("RNG states", sizes.rng_state_bytes))


def _results(model: ModelConfig, plan: RecomputePlan, segment: Segment, sizes: Sizes) -> Iterator[Term]:
    """What the operators return whose results a segment keeps, besides its input."""
    if segment.ops:
        for result in kept_results(model, segment.ops, sizes, skip_tail=plan.skip_tail):
            yield from (Term(segment.first_layer, result.operation, tensor) for tensor in result.tensors)


def _embedding(model: ModelConfig, sizes: Sizes) -> Iterator[Term]:
    yield Term(None, EMBEDDING, KeptTensor("token ids", 8 * sizes.tokens))
    if sizes.tp_size > 1:
        yield Term(None, EMBEDDING, KeptTensor("which ids are elsewhere", sizes.tokens))
    if model.hidden_dropout > 0.0:
        yield Term(None, EMBEDDING, KeptTensor("embedding dropout mask", sizes.local_tokens * model.hidden_size))


def _head(model: ModelConfig, sizes: Sizes) -> Iterator[Term]:
    hidden = sizes.local_tokens * model.hidden_size * sizes.element_bytes
    statistics = next(tensor for operation in layer_tensors(model, sizes).operations for tensor in operation.keeps
                      if tensor.name == "input norm statistics")
    yield Term(None, HEAD, KeptTensor("output of the last layer", hidden))
    yield Term(None, HEAD, statistics._replace(name="final norm statistics"))
    yield Term(None, HEAD, KeptTensor("normed output", hidden))
    if sizes.loss_chunk_size is None:
        logits = sizes.tokens * sizes.padded_vocab_size // sizes.tp_size * sizes.element_bytes
        yield Term(None, HEAD, KeptTensor("logits", logits))
    yield Term(None, HEAD, KeptTensor("labels", 8 * sizes.tokens))
    yield Term(None, HEAD, KeptTensor("which labels are here", sizes.tokens))
    yield Term(None, HEAD, KeptTensor("share of the softmax", sizes.accumulate_bytes * sizes.tokens))


def _placed(terms: Iterable[Term], plan: RecomputePlan) -> Iterator[Term]:
    """Those of segments that keep on the host: there, but for what no policy moves."""
    moved = {layer for segment in plan.segments if segment.on_host
             for layer in range(segment.first_layer, segment.first_layer + segment.num_layers)}
    return (term._replace(on_host=term.layer in moved and not term.tensor.stays) for term in terms)


def _tables_once(terms: list[Term]) -> Iterator[Term]:
    """The rotary tables are one storage for all layers."""
    seen = False
    for term in terms:
        if term.tensor.name != ROTARY_TABLES:
            yield term
        elif not seen:
            seen = True
            yield term
