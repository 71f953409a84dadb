"""The types of the description: kept tensors, operator calls, collectives and operations.

A layer is a tuple of operations in the order of the forward. memory/ computes kept bytes,
operators, FLOPs, collectives and parameter counts as sums over this tuple. Standard library only.
"""

from __future__ import annotations

import math
from typing import NamedTuple

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"
SHIFT, ALL_TO_ALL = "ring shift", "all-to-all"
OPERATORS = {
    ALL_REDUCE: "_c10d_functional.all_reduce.default",
    ALL_GATHER: "_c10d_functional.all_gather_into_tensor.default",
    REDUCE_SCATTER: "_c10d_functional.reduce_scatter_tensor.default",
    ALL_TO_ALL: "_c10d_functional.all_to_all_single.default",
}
ID_BYTES = 8  # of a token id, or of a place in the sequence
QK_LAYERNORM, LINEAR_PROJ, ROUTER = "qk_layernorm", "linear_proj", "router"
# (an operation, the one before which the model registers it)
REGISTERED_BEFORE = (
    (LINEAR_PROJ, QK_LAYERNORM),
    ("linear_q_proj", "linear_kv_down_proj"),
    ("linear_q_up_proj", "linear_kv_down_proj"),
)


class KeptTensor(NamedTuple):
    """A storage that lives from forward to backward.

    All views of a storage are one KeptTensor. Its bytes count once, however many operations save
    it.

    name: a name that is unique in its layer.
    stays: whether no policy moves it to host memory. It is true for tables that all layers share,
        and for the states of generators, which lie in host memory already.
    shared: whether all layers save the same storage, such as the rotary tables.
    given: whether it is a part of the micro-batch, which exists before the forward begins.
    """

    name: str
    num_bytes: int
    stays: bool = False
    shared: bool = False
    given: bool = False


class Matmul(NamedTuple):
    """A matrix product of the forward on one rank: `batch` times [m, k] x [k, n] -> [m, n].

    causal: whether the kernel may skip the half of the products that a causal mask hides. `flops`
        counts them all the same.
    fused: whether it is a part of a flash attention kernel, so that its result stays on the chip.
    groups: the experts over whose matrices the m rows are spread. k_groups: the same for k, in the
        gradient of the weights. Their time is that of equal groups.
    """

    name: str
    m: int
    n: int
    k: int
    batch: int = 1
    causal: bool = False
    fused: bool = False
    groups: int = 1
    k_groups: int = 1

    @property
    def flops(self) -> int:
        """Its FLOPs on one rank, 2 per multiply-add."""
        return 2 * self.batch * self.m * self.n * self.k


class Moved(NamedTuple):
    """The bytes of device memory that kernels read and write, on one rank.

    Matmuls and collectives are not included. A kernel that keeps its intermediate results on the
    chip counts its inputs and its outputs only.
    """

    forward: int = 0
    backward: int = 0

    def __add__(self, other: tuple[int, ...]) -> Moved:  # type: ignore[override]
        forward, backward = other
        return Moved(self.forward + forward, self.backward + backward)


NOTHING_MOVED = Moved()


class Collective(NamedTuple):
    """One collective of a group of n ranks.

    num_bytes: the bytes of the whole tensor. A rank receives (n-1)/n of them in an all-gather or a
        reduce-scatter, twice as many in an all-reduce, and all of them in a ring shift. In an
        all-to-all they are those that the rank receives, from itself too.
    over_experts: whether the group is that of expert-parallel ranks.
    """

    kind: str
    num_bytes: int
    over_experts: bool = False

    def call(
        self, name: str, num_bytes: int | None = None, *, output_only: bool = False
    ) -> OperatorCall:
        """Returns its operator call. name, num_bytes: its result; None: all bytes of the tensor."""
        result = KeptTensor(name, self.num_bytes if num_bytes is None else num_bytes)
        return OperatorCall(OPERATORS[self.kind], (result,), (), (self,), output_only)


class OperatorCall(NamedTuple):
    """One call of a torch operator that `ops(...)` of a policy can name.

    operator: torch's name of the operator, or "" if no policy may keep its result.
    returns: its results. A storage that an operation also saves has the same name here.
    matmuls, collectives: the matrix products and the collectives of the call.
    output_only: whether only the operation's output depends on the call. If backward does not read
        that output, a replay can leave the call out.
    once: whether no replay repeats it.
    """

    operator: str = ""
    returns: tuple[KeptTensor, ...] = ()
    matmuls: tuple[Matmul, ...] = ()
    collectives: tuple[Collective, ...] = ()
    output_only: bool = False
    once: bool = False


class Parameter(NamedTuple):
    """A parameter of an operation's module.

    shape: its shape on one TP rank.
    partial: whether each TP rank computes only a part of its gradient, so that they must be added.
    tied: whether the first and the last pipeline stage both hold it, and add their gradients.
    of_experts: whether it is one of experts, which may have groups of ranks of their own.
    is_matrix: whether Muon updates it, as it updates every weight of a linear layer in a layer.
    """

    name: str
    shape: tuple[int, ...]
    partial: bool = False
    tied: bool = False
    of_experts: bool = False
    is_matrix: bool = False

    @property
    def num_elements(self) -> int:
        """The number of elements on one TP rank."""
        return math.prod(self.shape)


class Operation(NamedTuple):
    """One operation of the model.

    name: a name that is unique in its layer.
    module: the name, within the layer, of the module that runs it; "" is the layer itself. For the
        embedding and the head it is the name within the model.
    keeps: the tensors that are kept for its backward if nothing is recomputed.
    regions: the regions in which it lies, outermost first.
    enters: if the innermost of them begins with it, the tensors that are kept if that region is
        recomputed, besides the random-number states of a region that draws; else ().
    discards: the names of that region's outputs that are freed then. Backward rebuilds them for the
        operations that saved them.
    calls: its operator calls in order.
    backward: the collectives of its backward.
    runs_beside: whether these run at the same time as the matmuls of the gradients: gathers beside
        that of the input, and sums beside that of the weight.
    rebuilds: matmuls that its backward runs in addition to two for each matmul of the forward.
    gradients_in_forward: whether its forward computes both gradients of its matmuls too. Its
        backward then computes none.
    parameters: the parameters of its module.
    moved: the bytes that its kernels move besides matmuls and collectives. The sum of a residual's
        two gradients counts in the norm where the residual branches.
    temporary: the bytes of its largest temporary (sizes.py). in_forward: those of its forward, if
        they can be more than any backward holds.
    """

    name: str
    module: str
    keeps: tuple[KeptTensor, ...] = ()
    regions: tuple[str, ...] = ()
    enters: tuple[KeptTensor, ...] = ()
    discards: tuple[str, ...] = ()
    calls: tuple[OperatorCall, ...] = ()
    backward: tuple[Collective, ...] = ()
    rebuilds: tuple[Matmul, ...] = ()
    gradients_in_forward: bool = False
    parameters: tuple[Parameter, ...] = ()
    moved: Moved = NOTHING_MOVED
    runs_beside: bool = False
    temporary: int = 0
    in_forward: int = 0

    @property
    def entered(self) -> str:
        """The region that begins with it, or ""."""
        return self.regions[-1] if self.enters else ""

    @property
    def forward(self) -> tuple[Collective, ...]:
        """The collectives of its forward."""
        return tuple(collective for call in self.calls for collective in call.collectives)

    @property
    def flops(self) -> int:
        """The FLOPs of its forward on one rank."""
        return sum(matmul.flops for call in self.calls for matmul in call.matmuls)


class LayerDescription(NamedTuple):
    """The operations of one layer, in the order of the forward.

    absorbs: the name of the operation whose backward frees the gradient of the layer's output, or
        adds to it in place.
    peculiarity: a text that tells how the layer differs from other layers of the model, or "".
    choices: what a replay of the layer may not choose again, so that every policy keeps it.
    """

    operations: tuple[Operation, ...]
    absorbs: str
    peculiarity: str = ""
    choices: tuple[KeptTensor, ...] = ()

    @property
    def input(self) -> KeptTensor:
        """The layer's input, which a recomputed unit keeps."""
        return self.operations[0].keeps[0]

    def registered(self) -> list[Operation]:
        """Returns the operations in the order of the model's `named_parameters`.

        Attention registers its linear layers before the norms of query and key. Latent attention
        registers all of the query before the latent of key and value.
        """
        found = {one.name: one for one in self.operations}
        order = list(found)
        for name, behind in REGISTERED_BEFORE:
            if {name, behind} <= found.keys():
                order.remove(name)
                order.insert(order.index(behind), name)
        return [found[name] for name in order]

    def tail(self, region: str | None = None) -> frozenset[tuple[str, int]]:
        """Returns the calls that a replay can leave out if its output is not read.

        They are the `output_only` calls of the last operation that has calls, and of those right
        before it that have no others. Each is (name of the operation, number of the call).

        region: the region that is replayed, or None for the whole layer.
        """
        calls = []
        for one in reversed(self.operations):
            if region is not None and region not in one.regions:
                continue
            found = [number for number, call in enumerate(one.calls) if call.output_only]
            calls += [(one.name, number) for number in found]
            if len(found) < len(one.calls):
                break
        return frozenset(calls)
