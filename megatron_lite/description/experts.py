"""The description of a mixture-of-experts layer's MLP (model/experts.py) as rows.

No token is dropped, so every tensor has n = k T rows however the tokens are spread: all figures are
exact. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lite.config.model import ACTIVATIONS
from megatron_lite.config.regions import MOE, MOE_ACTIVATION, SHARED_EXPERTS
from megatron_lite.description.linears import dense_mlp
from megatron_lite.description.operations import (
    ALL_GATHER,
    ALL_REDUCE,
    NOTHING_MOVED,
    OPERATORS,
    Collective,
    KeptTensor,
    Matmul,
    Moved,
    Operation,
    OperatorCall,
    Parameter,
    RegionEntry,
)
from megatron_lite.description.shape import Shape

GROUPED = "aten._grouped_mm.default"
INDEX_BYTES, COUNT_BYTES, END_BYTES = 8, 4, 4
ROUTER_BYTES = {"fp32": 4, "fp64": 8}
ROUTER, EXPERTS_FC1, EXPERTS_FC2 = "router", "experts_fc1", "experts_fc2"


class ExpertShape(Shape):
    """The bytes of a layer with experts, on one TP rank.

    rows: n. scores: the bytes of an element of the router's logits and weights.
    permuted, intermediate, activated: the inputs of fc1, of the activation and of fc2.
    """

    def __init__(self, of: Shape) -> None:
        super().__init__(of.model, of.sizes)
        model, sizes = self.model, self.sizes
        self.topk = model.moe_router_topk
        self.rows = self.topk * sizes.tokens
        self.width = model.expert_size // self.tp_size
        self.scores = ROUTER_BYTES.get(model.moe_router_dtype or "", self.element)
        self.permuted = self.rows * model.hidden_size * self.element
        self.activated = self.rows * self.width * self.element
        self.intermediate = model.fc1_blocks * self.activated


def choices(of: Shape) -> tuple[KeptTensor, ...]:
    """Returns what a replay may not choose again: every policy keeps it, on the device."""
    model, sizes = of.model, of.sizes
    num_bytes = sizes.local_tokens * model.moe_router_topk * INDEX_BYTES
    experts = KeptTensor("chosen experts", num_bytes, stays=True)
    if not model.balances_experts:
        return (experts,)
    assert model.num_experts is not None
    one_each = model.moe_router_load_balancing_type == "seq_aux_loss"
    columns = sizes.micro_batch_size if one_each else 1
    num_bytes = columns * model.num_experts * COUNT_BYTES
    return experts, KeptTensor("tokens per expert", num_bytes, stays=True)


def expert_operations(of: Shape, normed: KeptTensor) -> Iterator[Operation]:
    """Yields the router, the experts, and what stands between them.

    normed: the input of the layer's MLP.
    """
    shape = ExpertShape(of)
    model, sizes = shape.model, shape.sizes
    experts = model.num_experts
    assert experts is not None
    logits = KeptTensor("router logits", sizes.local_tokens * experts * shape.scores)
    row_weights = KeptTensor("row weights", shape.rows * shape.scores)
    rows = KeptTensor("rows of the experts", shape.permuted)
    order = KeptTensor("order of the rows", shape.rows * INDEX_BYTES)
    ends = KeptTensor("ends of the experts", experts * END_BYTES)
    intermediate = KeptTensor("experts' fc1 output", shape.intermediate)
    activated = KeptTensor("experts' activation output", shape.activated)
    chosen = choices(of)
    yield Operation(
        ROUTER,
        "mlp.router",
        (normed, logits, *(one._replace(stays=False) for one in chosen)),
        (MOE,),
        (RegionEntry(MOE, (normed, *chosen)),),
        (
            OperatorCall(
                "aten.mm.default",
                (logits,),
                (Matmul("router", sizes.local_tokens, experts, model.hidden_size),),
            ),
            *_counting(shape, chosen[1:]),
        ),
        parameters=(Parameter("weight", (experts, model.hidden_size), sizes.sequence_parallel),),
        moved=Moved(2 * logits.num_bytes, 4 * logits.num_bytes),
        temporary=shape.hidden + logits.num_bytes * 4,
    )
    if model.moe_shared_expert_intermediate_size is not None:
        yield from _shared_expert(of, normed)
    yield Operation("dispatch", "mlp", (), (MOE,), calls=_entering(shape), backward=_leaving(shape))
    moved = Moved(2 * shape.permuted, 2 * shape.permuted)
    yield Operation("permute", "mlp.experts", (order,), (MOE,), moved=moved)
    yield _grouped(
        shape,
        EXPERTS_FC1,
        "linear_fc1",
        Matmul("experts' fc1", shape.rows, model.fc1_blocks * shape.width, model.hidden_size),
        intermediate,
        (rows, ends),
        moved=NOTHING_MOVED,
    )
    forward, backward = ACTIVATIONS[model.activation].moved
    yield Operation(
        "experts_activation",
        "mlp.experts",
        (intermediate, row_weights),
        (MOE, MOE_ACTIVATION),
        (RegionEntry(MOE_ACTIVATION, (intermediate, row_weights), (activated.name,)),),
        moved=Moved((forward + 2) * shape.activated, (backward + 4) * shape.activated),
        temporary=shape.intermediate + 4 * shape.activated,
    )
    yield _grouped(
        shape,
        EXPERTS_FC2,
        "linear_fc2",
        Matmul("experts' fc2", shape.rows, model.hidden_size, shape.width),
        KeptTensor("experts' fc2 output", shape.permuted),
        (activated, ends),
        moved=Moved(2 * shape.permuted, 2 * shape.permuted),
        output_only=not model.norms_after,
    )
    yield Operation(
        "combine",
        "mlp",
        (),
        (MOE,),
        calls=tuple(
            OperatorCall(
                OPERATORS[one.kind],
                (KeptTensor("summed experts", of.hidden),),
                (),
                (one,),
                output_only=not model.norms_after,
            )
            for one in of.reduces
        ),
        backward=of.gathers,
    )


def _counting(shape: ExpertShape, counts: tuple[KeptTensor, ...]) -> Iterator[OperatorCall]:
    """Yields the sums of the tokens per expert over the ranks that split the tokens."""
    sizes = shape.sizes
    for size in (sizes.tp_size if sizes.sequence_parallel else 1, sizes.cp_size):
        if size > 1:
            yield from (
                OperatorCall("", (), (), (Collective(ALL_REDUCE, one.num_bytes),)) for one in counts
            )


def _shared_expert(of: Shape, normed: KeptTensor) -> Iterator[Operation]:
    """Yields the MLP that reads every token, and its gate."""
    model, sizes = of.model, of.sizes
    width = model.moe_shared_expert_intermediate_size
    assert width is not None
    gated, regions = model.moe_shared_expert_gate, (MOE, SHARED_EXPERTS)
    enters = (RegionEntry(SHARED_EXPERTS, (normed,)),)
    if gated:
        gate = KeptTensor("gate of the shared expert", sizes.local_tokens * of.element)
        logits = KeptTensor("gate's logits", gate.num_bytes)
        product = Matmul("shared gate", sizes.local_tokens, 1, model.hidden_size)
        yield Operation(
            "shared_gate",
            "mlp.shared_experts",
            (normed, gate),
            regions,
            enters,
            (OperatorCall("aten.mm.default", (logits,), (product,)),),
            parameters=(Parameter("gate_weight", (1, model.hidden_size), sizes.sequence_parallel),),
        )
    yield from dense_mlp(
        of,
        normed,
        name="shared",
        module="mlp.shared_experts",
        ffn_size=width,
        regions=regions,
        enters=() if gated else enters,
        activation=MOE_ACTIVATION,
        output_is_read=True,
    )
    if gated:
        output = KeptTensor("shared expert's output", of.hidden)
        moved = Moved(2 * of.hidden, 4 * of.hidden)
        yield Operation("shared_product", "mlp.shared_experts", (output,), regions, moved=moved)


def _entering(shape: ExpertShape) -> tuple[OperatorCall, ...]:
    """Returns the gathers of tokens, weights and choice under sequence parallelism."""
    if not shape.gathers:
        return ()
    element, tokens = shape.scores, shape.sizes.tokens * shape.topk
    gathered = (
        ("tokens", shape.whole),
        ("weights", tokens * element),
        ("choice", tokens * INDEX_BYTES),
    )
    return tuple(
        OperatorCall(
            OPERATORS[ALL_GATHER],
            (KeptTensor(f"gathered {name}", num_bytes),),
            (),
            (Collective(ALL_GATHER, num_bytes),),
        )
        for name, num_bytes in gathered
    )


def _leaving(shape: ExpertShape) -> tuple[Collective, ...]:
    """Returns the sums of the gradients of tokens and weights."""
    weights = shape.rows * shape.scores
    return tuple(one for each in shape.reduces for one in (each, Collective(each.kind, weights)))


def _grouped(
    shape: ExpertShape,
    name: str,
    module: str,
    matmul: Matmul,
    output: KeptTensor,
    keeps: tuple[KeptTensor, ...],
    *,
    moved: Moved,
    output_only: bool = False,
) -> Operation:
    """Returns a linear layer of all experts, and the exchange of rows beside it."""
    experts = shape.model.num_experts
    assert experts is not None
    weight = Parameter("weight", (experts, matmul.n, matmul.k))
    gradient = weight.num_elements * shape.element
    inputs = matmul.m * matmul.k * shape.element
    return Operation(
        name,
        f"mlp.experts.{module}",
        keeps,
        (MOE,),
        calls=(
            OperatorCall(
                GROUPED, (output,), (matmul._replace(groups=experts),), output_only=output_only
            ),
        ),
        parameters=(weight,),
        moved=moved,
        temporary=output.num_bytes + inputs + gradient,
    )
