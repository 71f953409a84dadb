"""The description of a mixture-of-experts layer's MLP (model/experts.py) as rows.

If no token is dropped, every tensor has n = k T rows however the tokens are spread: all figures are
exact. They are exact with padded experts too. With expert-parallel ranks, and where tokens are
dropped, they are exact given the rows that this rank's experts compute (`Sizes.expert_rows`), else
those of a balanced choice. Standard library only.
"""

from collections.abc import Iterator

from megatron_lite.config.model import ACTIVATIONS
from megatron_lite.config.regions import MOE, MOE_ACTIVATION, SHARED_EXPERTS

from .linears import dense_mlp, eager_activation
from .operations import (
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
from .sizes import Sizes

GROUPED = "megatron_lite.grouped_product.default"
INDEX_BYTES, COUNT_BYTES, END_BYTES = 8, 4, 4
ROW_BYTES = 16  # of a grouped product (tensor_parallel/grouped_linear.py)
ROUTER_BYTES = {"fp32": 4, "fp64": 8}
RECEIVED = "rows received for each expert"
EXPERTS_FC1, EXPERTS_FC2 = "experts_fc1", "experts_fc2"


def choices(of: Sizes) -> tuple[KeptTensor, ...]:
    """Returns what a replay may not choose again: every policy keeps it, on the device."""
    model, experts = of.model, of.model.num_experts or 0
    num_bytes = of.local_tokens * model.moe_router_topk * INDEX_BYTES
    kept = [KeptTensor("chosen experts", num_bytes, stays=True)]
    for kind, _ in model.balance_losses:
        columns = of.micro_batch_size if kind == "seq_aux_loss" else 1
        num_bytes = columns * experts * COUNT_BYTES
        kept.append(KeptTensor(f"tokens per expert for {kind}", num_bytes, stays=True))
    if of.ep_size > 1 and not (of.gathers_tokens or model.moe_pad_expert_input_to_capacity):
        kept.append(KeptTensor(RECEIVED, experts * INDEX_BYTES, stays=True))
    return tuple(kept)


def expert_operations(of: Sizes, normed: KeptTensor, layer: int) -> Iterator[Operation]:
    """Yields the router, the experts, and what stands between them.

    normed: the input of the layer's MLP. layer: its number in the whole model.
    """
    model, last = of.model, not of.model.norms_after
    # what the ranks hold together that share each expert
    shares_all = of.expert_tp_size in (0, of.tp_size)
    shared = of if shares_all else of.shared_by(of.expert_tp_size)
    tokens, whole = shared.tokens, shared.whole
    # the rows that the experts of this rank compute; those that no expert drops, and padding
    rows, sent = (
        model.chosen_rows(of.local_tokens, imbalance) * (tokens // of.local_tokens)
        for imbalance in (of.expert_imbalance, 1.0)
    )
    if of.expert_rows:
        rows, sent = of.expert_rows[layer - of.first_layer]
    slots, own = model.moe_router_topk * tokens, (model.num_experts or 0) // of.ep_size
    score = ROUTER_BYTES.get(model.moe_router_dtype or "", of.element_bytes)
    sizes_of_row = {"rows": model.hidden_size * of.element_bytes, "weights": score}
    permuted = rows * sizes_of_row["rows"]
    width = model.expert_size // shared.tp_size
    activated = KeptTensor("experts' activation output", rows * width * of.element_bytes)
    intermediate = KeptTensor("experts' fc1 output", model.fc1_blocks * activated.num_bytes)
    row_weights = KeptTensor("row weights", rows * score)
    ends = KeptTensor("ends of the experts", own * END_BYTES)
    spreads = of.ep_size > 1
    moves, gathers = spreads and not of.gathers_tokens, spreads and of.gathers_tokens

    def over_experts(kind: str, num_bytes: int) -> tuple[Collective, ...]:
        """Returns the collective of a tensor of each expert-parallel rank that gathers tokens."""
        return (Collective(kind, of.ep_size * num_bytes, over_experts=True),) * gathers

    yield _router(of, normed, score, len(shared.gathers))
    if model.moe_shared_expert_intermediate_size is not None:
        yield from _shared_expert(of, normed)
    # Tokens, weights and choice are gathered under sequence parallelism, and over expert-parallel
    # ranks. In backward the gradients of tokens and weights are summed, as the results are.
    entering = dict(tokens=whole, weights=slots * score, choice=slots * INDEX_BYTES)
    within = (
        Collective(ALL_GATHER, size).call(f"gathered {name}")
        for name, size in entering.items()
        if shared.gathers
    )
    across = (
        one.call(f"{name} of other ranks")
        for name in ("choice", "tokens", "weights")
        for one in over_experts(ALL_GATHER, entering[name])
    )
    sums = over_experts(REDUCE_SCATTER, whole) + shared.reduces
    yield Operation(
        "dispatch",
        "mlp",
        regions=(MOE,),
        calls=(*within, *across),
        backward=tuple(
            one._replace(num_bytes=one.num_bytes // whole * num_bytes)
            for one in sums
            for num_bytes in (whole, entering["weights"])
        ),
    )
    ordered = sent if model.moe_pad_expert_input_to_capacity else slots
    order = KeptTensor("order of the rows", (rows if gathers else ordered) * INDEX_BYTES)
    places = KeptTensor("order of the received rows", rows * INDEX_BYTES)
    moved = Moved(2 * permuted, 2 * permuted)
    temporary = (2 * rows + sent) * sizes_of_row["rows"] * moves
    # The rows, a copy of them with a place for each choice of all tokens here, and its sums.
    copies = of.ep_size if gathers else 1
    at_hand = (sent if moves else rows) + copies * slots
    placed = at_hand * sizes_of_row["rows"] + copies * whole
    yield Operation(
        "permute",
        "mlp.experts",
        (order, places) if moves else (order,),
        (MOE,),
        calls=tuple(
            _exchange(rows * size).call(f"received {name}")
            for name, size in sizes_of_row.items()
            if moves
        ),
        backward=tuple(_exchange(sent * size) for size in sizes_of_row.values() if moves),
        moved=moved,
        temporary=max(temporary, placed),
    )
    yield _grouped(
        of,
        own,
        EXPERTS_FC1,
        "linear_fc1",
        Matmul("experts' fc1", rows, model.fc1_blocks * width, model.hidden_size),
        intermediate,
        (KeptTensor("rows of the experts", permuted), ends),
    )
    forward, backward = ACTIVATIONS[model.activation].moved
    yield Operation(
        "experts_activation",
        "mlp.experts",
        (intermediate, row_weights),
        (MOE, MOE_ACTIVATION),
        (intermediate, row_weights),
        (activated.name,),
        moved=Moved((forward + 2) * activated.num_bytes, (backward + 4) * activated.num_bytes),
        temporary=_activation_temporary(of, intermediate.num_bytes, activated.num_bytes, score),
    )
    yield _grouped(
        of,
        own,
        EXPERTS_FC2,
        "linear_fc2",
        Matmul("experts' fc2", rows, model.hidden_size, width),
        KeptTensor("experts' fc2 output", permuted),
        (activated, ends, *[row_weights] * model.add_bias_linear),
        moved=moved,
        output_only=last,
    )
    if moves:
        back = _exchange(sent * sizes_of_row["rows"])
        yield Operation(
            "return",
            "mlp.experts",
            regions=(MOE,),
            calls=(back.call("returned rows", output_only=last),),
            backward=(_exchange(permuted),),
            moved=moved,
            temporary=temporary,
        )
    # the sum of each token's rows, over all ranks that hold its experts
    yield Operation(
        "combine",
        "mlp",
        regions=(MOE,),
        calls=tuple(
            one.call(
                f"sum {number} of experts",
                whole if one.over_experts else of.hidden,
                output_only=last,
            )
            for number, one in enumerate(sums)
        ),
        backward=(*shared.gathers, *over_experts(ALL_GATHER, whole)),
        in_forward=placed + copies * whole * bool(gathers or shared.gathers),
    )


def _router(of: Sizes, normed: KeptTensor, score: int, gathers: int) -> Operation:
    """Returns the choice of experts for each token, which every policy keeps.

    score: the bytes of a logit. gathers: whether the ranks that share an expert gather tokens.
    """
    model, experts = of.model, of.model.num_experts or 0
    logits = KeptTensor("router logits", of.local_tokens * experts * score)
    noise = [KeptTensor("router noise", of.hidden)] * (model.moe_input_jitter_eps is not None)
    bias = [Parameter("bias", (experts,), of.sequence_parallel)] * model.add_bias_linear
    chosen = choices(of)
    read = tuple(one._replace(stays=False) for one in chosen if one.name != RECEIVED)
    # The sums of the tokens per expert over the ranks that split the tokens, and the exchange of
    # the counts of rows between expert-parallel ranks. No replay repeats them.
    splits, counting = len(of.gathers) + (of.cp_size > 1), list[Collective]()
    for one in chosen[1:]:
        received = one.name == RECEIVED
        counting += [Collective(ALL_REDUCE, one.num_bytes)] * (gathers if received else splits)
        counting += [_exchange(one.num_bytes)] * received
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
                (Matmul("router", of.local_tokens, experts, model.hidden_size),),
            ),
            OperatorCall(collectives=tuple(counting), once=True),
        ),
        parameters=(Parameter("weight", (experts, model.hidden_size), of.sequence_parallel), *bias),
        moved=Moved(2 * logits.num_bytes, 4 * logits.num_bytes),
        temporary=of.hidden * (1 + len(noise)) + logits.num_bytes * 4,
    )


def _exchange(num_bytes: int) -> Collective:
    """Returns an all-to-all, of which this rank receives so many bytes."""
    return Collective(ALL_TO_ALL, num_bytes, over_experts=True)


def _shared_expert(of: Sizes, normed: KeptTensor) -> Iterator[Operation]:
    """Yields the MLP that reads every token, and its gate."""
    model = of.model
    gated, regions = model.moe_shared_expert_gate, (MOE, SHARED_EXPERTS)
    if gated:
        gate = KeptTensor("gate of the shared expert", of.local_tokens * of.element_bytes)
        logits = KeptTensor("gate's logits", gate.num_bytes)
        product = Matmul("shared gate", of.local_tokens, 1, model.hidden_size)
        yield Operation(
            "shared_gate",
            "mlp.shared_experts",
            (normed, gate),
            regions,
            (normed,),
            calls=(OperatorCall("aten.mm.default", (logits,), (product,)),),
            parameters=(Parameter("gate_weight", (1, model.hidden_size), of.sequence_parallel),),
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


def _activation_temporary(of: Sizes, inside: int, output: int, score: int) -> int:
    """Returns the number of the experts' activation, which is not compiled. inside, output: the
    bytes of its input and output. score: those of the weight of a row."""
    # Backward holds the gradient, its product with the weights of the rows, and a cast: of the
    # product, or for it on a CPU.
    product = output // of.element_bytes * max(score, of.element_bytes)
    cast = product if of.device == "cpu" else output
    return output + max(eager_activation(of, inside, output), product + cast)


def _grouped(
    of: Sizes,
    own: int,
    name: str,
    module: str,
    matmul: Matmul,
    output: KeptTensor,
    keeps: tuple[KeptTensor, ...],
    *,
    moved: Moved = NOTHING_MOVED,
    output_only: bool = False,
) -> Operation:
    """Returns a linear layer of all experts, of which the rank has so many of its own."""
    weight = Parameter("weight", (own, matmul.n, matmul.k), of_experts=True)
    gradient = weight.num_elements * of.element_bytes
    # Autograd gets the gradient, and casts it when the backward of the product has ended.
    cast = weight.num_elements * of.accumulate_bytes * (of.sums_gradients and of.casts_gradients)
    inputs = matmul.m * matmul.k * of.element_bytes
    bias, product = [], output
    rebuilds: tuple[Matmul, ...] = ()
    if of.model.add_bias_linear:
        bias = [Parameter("bias", (own, matmul.n), of_experts=True)]
        product = output._replace(name=f"{output.name} without bias")
        columns = ROW_BYTES // of.element_bytes
        rebuilds = (Matmul("experts' bias", matmul.n, columns, matmul.m, k_groups=own),)
    return Operation(
        name,
        f"mlp.experts.{module}",
        keeps,
        (MOE,),
        calls=(
            OperatorCall(
                GROUPED, (product,), (matmul._replace(groups=own),), output_only=output_only
            ),
        ),
        rebuilds=rebuilds,
        parameters=(weight, *bias),
        moved=moved,
        # The gradient of a factor on the bias takes the rows, their biases and the product.
        temporary=max(
            output.num_bytes * (1 + len(bias) * (1 + (name == EXPERTS_FC2))),
            max(output.num_bytes, cast) + inputs + gradient,
        ),
    )
