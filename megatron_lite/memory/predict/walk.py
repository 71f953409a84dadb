"""Adds up what a micro-batch holds on a stage, and finds the fullest moment. Standard library only.

Under FSDP2 the walk also holds gathered weights and reduced gradients (below).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage
from megatron_lite.description.model_ends import embedding_operations, head_operations
from megatron_lite.description.operations import Operation, Parameter
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.transformer_layer import describe_layers

FLOAT32 = 4


# The weights and gradients that FSDP2 holds for a time, around what the layers hold.
#
# A unit is one layer; the root unit is everything else. With reshard after forward:
#
#     forward    root: gather, and stay until backward has ended
#                layer: gather into a buffer, free the buffer of the layer before, copy the weights
#                out; afterwards free the weights, but not the buffer
#     backward   root: starts the gather of the last layer
#                layer: copy the weights out of its buffer, free it, start the gather of the layer
#                before; afterwards free the weights and reduce the gradients
#                root: reduces its gradients at the very end
#
#     reduce     copy the gradients into one buffer, free them, sum the buffer over the ranks. The
#                buffer lives until the next reduction.
#
# With --fsdp-memory-efficient-wrapping and untied weights two more units exist:
#
#     embedding  gathered and freed like a layer in forward. Its backward needs no weight, and the
#                root reduces its gradients before its own.
#     output     gathered before the head, and whole until the head's backward has ended. Then it
#                reduces its gradients, before the last layer does.
#
# The facts are those of torch 2.13 and of parallel/fsdp.py. A tied weight that is a unit of
# its own is gathered for the head without a buffer that stays.


class FsdpUnit(NamedTuple):
    """The bytes of a unit of FSDP2.

    gathered: its weights on every rank, with the padding of rows. cast: this rank's rows in the
    dtype in which they are sent; 0 if that is the dtype of the rows.
    gradients: the gradients of the whole weights, as backward computes them.
    buffer: the gradients in the buffer that is reduced. rows: this rank's part of the sum.
    padded: the gradients that are copied, with the padding, before they are.
    """

    gathered: int = 0
    cast: int = 0
    gradients: int = 0
    buffer: int = 0
    rows: int = 0
    padded: int = 0


NOTHING = FsdpUnit()


class GatheredWeights(NamedTuple):
    """The units of a stage, and when their memory is allocated and freed.

    embedding, output: the units of the token embedding and of the output layer; NOTHING if they
        are parts of the root.
    layers: that of each layer of the stage.
    tied: whether `embedding` and `output` are one unit, which is gathered twice.
    reshards: whether a layer's weights are freed after its forward.
    staying: the bytes of weights that stay gathered, if several micro-batches of the stage are in
        flight at once, but for the end of a backward. They count once for all of them, and in no
        passage.
    """

    root: FsdpUnit = NOTHING
    embedding: FsdpUnit = NOTHING
    layers: tuple[FsdpUnit, ...] = ()
    output: FsdpUnit = NOTHING
    tied: bool = False
    reshards: bool = True
    staying: int = 0

    @classmethod
    def of(cls, config: RunConfig, sizes: Sizes, stage: Stage, shards: int) -> GatheredWeights:
        """Returns the units of a stage. shards: the ranks over which FSDP2 shards everything."""
        if shards == 1:
            return NOT_SHARDED
        model = config.model
        sent = sizes.element_bytes
        reduced = sent if config.data_parallel.grad_reduce_in_bf16 else FLOAT32
        first = _parameters(embedding_operations(sizes))
        last_ones = _parameters(head_operations(sizes))
        layers = describe_layers(sizes, (1,) * stage.num_layers)

        def unit(parameters: Sequence[Parameter]) -> FsdpUnit:
            if not parameters:
                return NOTHING
            # The rows of each are padded to a multiple of the ranks. A CPU copies their gradients.
            each = [
                (one, -(-one.shape[0] // shards) * (one.num_elements // one.shape[0]))
                for one in parameters
            ]
            own = sum(rows for _, rows in each)
            uneven = sum(rows for one, rows in each if rows * shards != one.num_elements)
            return FsdpUnit(
                shards * own * sent,
                own * sent if sent != FLOAT32 else 0,
                sum(one.num_elements for one in parameters) * sent,
                shards * own * reduced,
                own * FLOAT32,
                shards * uneven * sent * (sizes.device == "cpu"),
            )

        untied = model.untie_embeddings_and_output_weights
        wraps = config.data_parallel.fsdp_memory_efficient_wrapping
        tied = wraps and not untied and sizes.has_head
        words = _largest(first) if tied or (wraps and untied) else []
        logits = _largest(last_ones) if wraps and untied else []
        rest = [one for one in (*first, *last_ones) if one not in (*words, *logits)]
        reshards = config.data_parallel.torch_fsdp2_reshard_after_forward
        root = unit(rest)
        alike = {id(one): one for one in layers}
        units = {key: unit(_parameters(one.operations)) for key, one in alike.items()}
        staying = 0
        size = config.parallel.pipeline_model_parallel_size
        if size > 1 and (stage.count > size or not stage.is_last):
            staying = root.gathered
            if not reshards:
                staying += sum(units[id(one)].gathered for one in layers)
                units = {key: one._replace(gathered=0, cast=0) for key, one in units.items()}
        return cls(
            root,
            unit(words),
            tuple(units[id(one)] for one in layers),
            unit(words if tied else logits),
            tied,
            reshards,
            staying,
        )


NOT_SHARDED = GatheredWeights()


def _parameters(operations: Iterable[Operation]) -> list[Parameter]:
    return [one for each in operations for one in each.parameters]


def _largest(parameters: Sequence[Parameter]) -> list[Parameter]:
    """Returns the largest of the parameters alone, which is a matrix of the whole vocabulary."""
    return sorted(parameters, key=lambda one: one.num_elements)[-1:]


class Moment(NamedTuple):
    """A moment, and the bytes held at it.

    where: the operation that runs, such as "backward of linear_fc2".
    layer: the number of the layer in its stage, or None outside of the layers.
    kept: the bytes kept for backward. rebuilt: those that a replay has rebuilt.
    other: hidden states, gradients, temporaries and gathered weights.
    arrived: a tensor that has arrived for the next action of a pipeline. sent: tensors that may
        still be on their way.
    gradients: this rank's rows of the gradients that FSDP2 has reduced.
    """

    where: str = ""
    layer: int | None = None
    kept: int = 0
    rebuilt: int = 0
    other: int = 0
    arrived: int = 0
    sent: int = 0
    gradients: int = 0

    @property
    def num_bytes(self) -> int:
        """All bytes together."""
        return sum(self[2:])


class Passage:
    """Adds up what a forward or a backward of a stage allocates and frees; see Moment.

    kept, rebuilt, other, gradients: the bytes held now, beyond those held when it began. They are
        negative if it has freed more than it has allocated.
    fullest: the moment at which most is held.
    buffer: the bytes of the buffer into which FSDP2 gathered weights last. reduced: those of the
        buffer of its last reduction. Both are among the others.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.kept = self.rebuilt = self.other = self.buffer = self.reduced = self.gradients = 0
        self.fullest = Moment()

    def look(self, held: Moment) -> None:
        """Notes a moment at which these bytes are held besides."""
        found = held._replace(
            kept=self.kept + held.kept,
            rebuilt=self.rebuilt + held.rebuilt,
            other=self.other + held.other,
            gradients=self.gradients,
        )
        if not self.fullest.where or found.num_bytes > self.fullest.num_bytes:
            self.fullest = found

    def gather(self, unit: FsdpUnit, *, copies_out: bool = True) -> None:
        """Gathers a unit of FSDP2 into a buffer.

        copies_out: whether the weights are copied out of the buffer at once. The buffer of the unit
            before is freed then.
        """
        if unit is NOTHING:
            return
        copy = self.sizes.gloo_copy(unit.gathered)
        if unit.gathered:
            self.look(Moment("gather of weights", other=unit.cast + unit.gathered + copy))
        self.other += unit.gathered
        if copies_out:
            self.other += unit.gathered - self.buffer
            self.buffer = unit.gathered

    def reduce(self, unit: FsdpUnit) -> None:
        """Copies the gradients into a buffer, frees them and sums the buffer over the ranks.

        The buffer of the reduction before is freed first.
        """
        if unit is NOTHING:
            return
        where, copy = "reduction of gradients", self.sizes.gloo_copy(unit.buffer)
        self.other += unit.buffer - self.reduced
        self.reduced = unit.buffer
        self.look(Moment(where, other=unit.padded))
        self.other -= unit.gradients
        self.look(Moment(where, other=unit.rows + copy))
        # The first micro-batch's rows stay as `.grad`. Later rows are added to them and freed.
        self.gradients += 0 if self.sizes.accumulates else unit.rows
