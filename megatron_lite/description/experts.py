"""The description of a mixture-of-experts layer's MLP (model/experts.py) as rows.

If no token is dropped, every tensor has n = k T rows however the tokens are spread: all figures are
exact. They are exact with padded experts too. With expert-parallel ranks, and where tokens are
dropped, they are exact given the rows that this rank's experts compute (`Sizes.expert_rows`), else
those of a balanced choice. Standard library only.
"""

from collections.abc import Iterator

from megatron_lite.config.model import ACTIVATIONS
from megatron_lite.config.regions import MOE, MOE_ACTIVATION, SHARED_EXPERTS
from megatron_lite.description.linears import dense_mlp
from megatron_lite.description.operations import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    NOTHING_MOVED,
    REDUCE_SCATTER,
    ROUTER,
    Collective,
    KeptTensor,
    Matmul,
    Moved,
    Operation,
    OperatorCall,
    Parameter,
)
from megatron_lite.description.sizes import Shape

GROUPED = "aten._grouped_mm.default"
INDEX_BYTES, COUNT_BYTES, END_BYTES = 8, 4, 4
ROW_BYTES = 16  # of a grouped product (tensor_parallel/grouped_linear.py)
ROUTER_BYTES = {"fp32": 4, "fp64": 8}
RECEIVED = "rows received for each expert"
EXPERTS_FC1, EXPERTS_FC2 = "experts_fc1", "experts_fc2"


class ExpertShape(Shape):
    """The bytes of a layer with experts, on one rank.

    tokens: T. slots: k T. sent: the rows that no expert drops, and padding. rows: n, those that the
        experts of this rank compute.
    tp_size: the ranks that share each expert. num_own: the experts of this rank.
    scores: the bytes of an element of the router's logits and weights.
    permuted, intermediate, activated: the inputs of fc1, of the activation and of fc2.
    """

    def __init__(self, of: Shape, layer: int) -> None:
        super().__init__(of.sizes)
        model, sizes = self.model, self.sizes
        self.experts = model.num_experts or 0
        self.num_own = self.experts // sizes.ep_size
        self.tokens = sizes.tokens
        if sizes.expert_tp_size not in (0, self.tp_size):
            self.tp_size = sharing = sizes.expert_tp_size
            self.tokens, self.whole = sharing * sizes.local_tokens, sharing * self.hidden
            self.gathers, self.reduces = (
                (Collective(kind, self.whole),) * (sharing > 1)
                for kind in (ALL_GATHER, REDUCE_SCATTER)
            )
        self.slots = model.moe_router_topk * self.tokens
        self.rows, self.sent = (
            model.chosen_rows(sizes.local_tokens, imbalance) * (self.tokens // sizes.local_tokens)
            for imbalance in (sizes.expert_imbalance, 1.0)
        )
        if sizes.expert_rows:
            self.rows, self.sent = sizes.expert_rows[layer - sizes.first_layer]
        self.width = model.expert_size // self.tp_size
        self.scores = ROUTER_BYTES.get(model.moe_router_dtype or "", self.element)
        self.permuted = self.rows * model.hidden_size * self.element
        self.activated = self.rows * self.width * self.element
        self.intermediate = model.fc1_blocks * self.activated

    def over_experts(self, kind: str, num_bytes: int) -> tuple[Collective, ...]:
        """Returns the collective of a tensor of each expert-parallel rank that gathers tokens."""
        sizes = self.sizes
        gathers = sizes.ep_size > 1 and sizes.gathers_tokens
        return (Collective(kind, sizes.ep_size * num_bytes, over_experts=True),) * gathers


def choices(of: Shape) -> tuple[KeptTensor, ...]:
    """Returns what a replay may not choose again: every policy keeps it, on the device."""
    model, sizes, experts = of.model, of.sizes, of.model.num_experts or 0
    num_bytes = sizes.local_tokens * model.moe_router_topk * INDEX_BYTES
    kept = [KeptTensor("chosen experts", num_bytes, stays=True)]
    for kind, _ in model.balance_losses:
        columns = sizes.micro_batch_size if kind == "seq_aux_loss" else 1
        num_bytes = columns * experts * COUNT_BYTES
        kept.append(KeptTensor(f"tokens per expert for {kind}", num_bytes, stays=True))
    if sizes.ep_size > 1 and not (sizes.gathers_tokens or model.moe_pad_expert_input_to_capacity):
        kept.append(KeptTensor(RECEIVED, experts * INDEX_BYTES, stays=True))
    return tuple(kept)


def expert_operations(of: Shape, normed: KeptTensor, layer: int) -> Iterator[Operation]:
    """Yields the router, the experts, and what stands between them.

    normed: the input of the layer's MLP. layer: its number in the whole model.
    """
    shape = ExpertShape(of, layer)
    model, sizes = shape.model, shape.sizes
    row_weights = KeptTensor("row weights", shape.rows * shape.scores)
    rows = KeptTensor("rows of the experts", shape.permuted)
    moves = sizes.ep_size > 1 and not sizes.gathers_tokens
    ordered = shape.sent if model.moe_pad_expert_input_to_capacity else shape.slots
    if sizes.ep_size > 1 and sizes.gathers_tokens:
        ordered = shape.rows
    order = KeptTensor("order of the rows", ordered * INDEX_BYTES)
    places = KeptTensor("order of the received rows", shape.rows * INDEX_BYTES)
    ends = KeptTensor("ends of the experts", shape.num_own * END_BYTES)
    intermediate = KeptTensor("experts' fc1 output", shape.intermediate)
    activated = KeptTensor("experts' activation output", shape.activated)
    yield _router(shape, normed)
    if model.moe_shared_expert_intermediate_size is not None:
        yield from _shared_expert(of, normed)
    yield Operation("dispatch", "mlp", (), (MOE,), calls=_entering(shape), backward=_leaving(shape))
    moved = Moved(2 * shape.permuted, 2 * shape.permuted)
    sizes_of_row = {"rows": model.hidden_size * of.element, "weights": shape.scores}
    temporary = (2 * shape.rows + shape.sent) * sizes_of_row["rows"] * moves
    yield Operation(
        "permute",
        "mlp.experts",
        (order, places) if moves else (order,),
        (MOE,),
        calls=tuple(
            _exchange(shape.rows * size).call(f"received {name}")
            for name, size in sizes_of_row.items()
            if moves
        ),
        backward=tuple(_exchange(shape.sent * size) for size in sizes_of_row.values() if moves),
        moved=moved,
        temporary=temporary,
    )
    yield _grouped(
        shape,
        EXPERTS_FC1,
        "linear_fc1",
        Matmul("experts' fc1", shape.rows, model.fc1_blocks * shape.width, model.hidden_size),
        intermediate,
        (rows, ends),
    )
    forward, backward = ACTIVATIONS[model.activation].moved
    yield Operation(
        "experts_activation",
        "mlp.experts",
        (intermediate, row_weights),
        (MOE, MOE_ACTIVATION),
        (intermediate, row_weights),
        (activated.name,),
        moved=Moved((forward + 2) * shape.activated, (backward + 4) * shape.activated),
        temporary=shape.intermediate + 4 * shape.activated,
    )
    yield _grouped(
        shape,
        EXPERTS_FC2,
        "linear_fc2",
        Matmul("experts' fc2", shape.rows, model.hidden_size, shape.width),
        KeptTensor("experts' fc2 output", shape.permuted),
        (activated, ends, *[row_weights] * model.add_bias_linear),
        moved=moved,
        output_only=not model.norms_after,
    )
    if moves:
        back = _exchange(shape.sent * sizes_of_row["rows"])
        yield Operation(
            "return",
            "mlp.experts",
            (),
            (MOE,),
            calls=(back.call("returned rows", output_only=not model.norms_after),),
            backward=(_exchange(shape.permuted),),
            moved=moved,
            temporary=temporary,
        )
    yield _combined(shape)


def _router(shape: ExpertShape, normed: KeptTensor) -> Operation:
    """Returns the choice of experts for each token, which every policy keeps."""
    model, sizes, experts = shape.model, shape.sizes, shape.experts
    logits = KeptTensor("router logits", sizes.local_tokens * experts * shape.scores)
    noise = [KeptTensor("router noise", shape.hidden)] * (model.moe_input_jitter_eps is not None)
    bias = [Parameter("bias", (experts,), sizes.sequence_parallel)] * model.add_bias_linear
    chosen = choices(shape)
    read = tuple(one._replace(stays=False) for one in chosen if one.name != RECEIVED)
    return Operation(
        ROUTER,
        "mlp.router",
        (normed, *noise, logits, *read),
        (MOE,),
        (normed, *chosen),
        calls=(
            OperatorCall(
                "aten.addmm.default" if bias else "aten.mm.default",
                (logits,),
                (Matmul("router", sizes.local_tokens, experts, model.hidden_size),),
            ),
            *_counting(shape, chosen[1:]),
        ),
        parameters=(
            Parameter("weight", (experts, model.hidden_size), sizes.sequence_parallel),
            *bias,
        ),
        moved=Moved(2 * logits.num_bytes, 4 * logits.num_bytes),
        temporary=shape.hidden * (1 + len(noise)) + logits.num_bytes * 4,
    )


def _combined(shape: ExpertShape) -> Operation:
    """Returns the sum of each token's rows, over all ranks that hold its experts."""
    scatters = shape.over_experts(REDUCE_SCATTER, shape.whole)
    sums = [(one, shape.whole) for one in scatters] + [(one, shape.hidden) for one in shape.reduces]
    return Operation(
        "combine",
        "mlp",
        (),
        (MOE,),
        calls=tuple(
            one.call(f"sum {number} of experts", num_bytes, output_only=not shape.model.norms_after)
            for number, (one, num_bytes) in enumerate(sums)
        ),
        backward=(*shape.gathers, *shape.over_experts(ALL_GATHER, shape.whole)),
    )


def _counting(shape: ExpertShape, counts: tuple[KeptTensor, ...]) -> Iterator[OperatorCall]:
    """Yields what a choice communicates, which no replay repeats.

    They are the sums of the tokens per expert over the ranks that split the tokens, and the counts
    of rows that expert-parallel ranks exchange.
    """
    sizes = shape.sizes
    for one in counts:
        over = [sizes.tp_size if sizes.sequence_parallel else 1, sizes.cp_size]
        sent = [Collective(ALL_REDUCE, one.num_bytes) for size in over if size > 1]
        if one.name == RECEIVED:
            sums = [Collective(ALL_REDUCE, one.num_bytes)] * bool(shape.gathers)
            sent = [*sums, _exchange(one.num_bytes)]
        yield from (OperatorCall(collectives=(collective,), once=True) for collective in sent)


def _exchange(num_bytes: int) -> Collective:
    """Returns an all-to-all, of which this rank receives so many bytes."""
    return Collective(ALL_TO_ALL, num_bytes, over_experts=True)


def _shared_expert(of: Shape, normed: KeptTensor) -> Iterator[Operation]:
    """Yields the MLP that reads every token, and its gate."""
    model, sizes = of.model, of.sizes
    gated, regions = model.moe_shared_expert_gate, (MOE, SHARED_EXPERTS)
    if gated:
        gate = KeptTensor("gate of the shared expert", sizes.local_tokens * of.element)
        logits = KeptTensor("gate's logits", gate.num_bytes)
        product = Matmul("shared gate", sizes.local_tokens, 1, model.hidden_size)
        yield Operation(
            "shared_gate",
            "mlp.shared_experts",
            (normed, gate),
            regions,
            (normed,),
            calls=(OperatorCall("aten.mm.default", (logits,), (product,)),),
            parameters=(Parameter("gate_weight", (1, model.hidden_size), sizes.sequence_parallel),),
        )
    yield from dense_mlp(
        of,
        normed,
        name="shared",
        module="mlp.shared_experts",
        ffn_size=model.moe_shared_expert_intermediate_size or 0,
        regions=regions,
        enters=not gated,
        activation=MOE_ACTIVATION,
        output_is_read=True,
    )
    if gated:
        output = KeptTensor("shared expert's output", of.hidden)
        moved = Moved(2 * of.hidden, 4 * of.hidden)
        yield Operation("shared_product", "mlp.shared_experts", (output,), regions, moved=moved)


def _entering(shape: ExpertShape) -> tuple[OperatorCall, ...]:
    """Returns the gathers of tokens, weights and choice under sequence parallelism, and over
    expert-parallel ranks."""
    sizes = dict(
        tokens=shape.whole, weights=shape.slots * shape.scores, choice=shape.slots * INDEX_BYTES
    )
    within = (
        Collective(ALL_GATHER, size).call(f"gathered {name}")
        for name, size in sizes.items()
        if shape.gathers
    )
    across = (
        one.call(f"{name} of other ranks")
        for name in ("choice", "tokens", "weights")
        for one in shape.over_experts(ALL_GATHER, sizes[name])
    )
    return (*within, *across)


def _leaving(shape: ExpertShape) -> tuple[Collective, ...]:
    """Returns the sums of the gradients of tokens and weights."""
    weights = shape.slots * shape.scores
    return tuple(
        one
        for each in (*shape.over_experts(REDUCE_SCATTER, shape.whole), *shape.reduces)
        for one in (each, each._replace(num_bytes=each.num_bytes // shape.whole * weights))
    )


def _grouped(
    shape: ExpertShape,
    name: str,
    module: str,
    matmul: Matmul,
    output: KeptTensor,
    keeps: tuple[KeptTensor, ...],
    *,
    moved: Moved = NOTHING_MOVED,
    output_only: bool = False,
) -> Operation:
    """Returns a linear layer of all experts, and the exchange of rows beside it."""
    weight = Parameter("weight", (shape.num_own, matmul.n, matmul.k), of_experts=True)
    gradient = weight.num_elements * shape.element
    inputs = matmul.m * matmul.k * shape.element
    bias, product = [], output
    rebuilds: tuple[Matmul, ...] = ()
    if shape.model.add_bias_linear:
        bias = [Parameter("bias", (shape.num_own, matmul.n), of_experts=True)]
        product = output._replace(name=f"{output.name} without bias")
        columns = ROW_BYTES // shape.element
        rebuilds = (Matmul("experts' bias", matmul.n, columns, matmul.m, k_groups=shape.num_own),)
    return Operation(
        name,
        f"mlp.experts.{module}",
        keeps,
        (MOE,),
        calls=(
            OperatorCall(
                GROUPED,
                (product,),
                (matmul._replace(groups=shape.num_own),),
                output_only=output_only,
            ),
        ),
        rebuilds=rebuilds,
        parameters=(weight, *bias),
        moved=moved,
        temporary=output.num_bytes * (1 + len(bias)) + inputs + gradient,
    )
