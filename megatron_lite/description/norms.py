"""The norms of a layer, and the dropout and addition of its branches, as operations.

They are the norms of the residual stream (model/layer.py), those of queries and keys, and those
over all heads (`all_heads` of Norm), which have collectives. The gradient of the residual
stream is held while a branch runs backward. It grows by the gradient of the branch's input when the
branch ends. Standard library only.
"""

from megatron_lite.config.regions import DROPOUT, LAYERNORM

from .operations import (
    ALL_REDUCE,
    LINEAR_PROJ,
    QK_LAYERNORM,
    Collective,
    KeptTensor,
    Moved,
    Operation,
    OperatorCall,
    Parameter,
)
from .sizes import Sizes

ATTENTION_DROPOUT, MLP_DROPOUT = "attention dropout", "mlp dropout"
# the numbers that a norm keeps for each row
STATISTICS = {"LayerNorm": 2, "RMSNorm": 1, "BiaslessLayerNorm": 2}


def norm_before(
    of: Sizes, name: str, residual: KeptTensor, output: str, statistics: str
) -> Operation:
    """Returns the norm at the beginning of a branch."""
    adds = of.compiled and not (of.widened or of.model.parallel_residual)
    return Operation(
        name,
        name,
        (residual, *norm_keeps(of, statistics)),
        (LAYERNORM,),
        (residual,),
        (output,),
        parameters=norm_parameters(of),
        # Backward reads dy and x, writes dx, and adds dx to the gradient of the residual, which a
        # compiled kernel for the same dtype does at once.
        moved=Moved(2 * of.residual, (4 if adds else 6) * of.residual),
        temporary=norm_temporary(of, of.hidden),
    )


def norm_after(of: Sizes, name: str, linear: str, regions: tuple[str, ...] = ()) -> Operation:
    """Returns the norm at the end of a branch. It keeps the output of the branch's last matmul.

    linear: the name of that row-parallel linear layer.
    """
    # Several ranks add the bias to the sum, which gives a tensor of its own.
    is_proj = linear == LINEAR_PROJ
    biased = (of.model.has_proj_bias if is_proj else of.model.add_bias_linear) and of.tp_size > 1
    branch = KeptTensor(f"{linear} output{' with its bias' * biased}", of.hidden)
    return Operation(
        name,
        name,
        (branch, *norm_keeps(of, name)),
        regions,
        parameters=norm_parameters(of),
        moved=Moved(2 * of.hidden, 3 * of.hidden),
        temporary=norm_temporary(of, of.hidden),
    )


def norm_temporary(of: Sizes, output: int) -> int:
    """Returns the number of a norm, from the bytes of its output. RMSNorm on a CPU casts the
    gradient to float32, and has three more tensors of its size."""
    composed = of.model.normalization == "RMSNorm" and of.device == "cpu" and not of.compiled
    return (output + of.wide(output) * (3 + of.is_rounded)) * composed


def add_branch(of: Sizes, name: str) -> Operation:
    """Returns the dropout of a branch and its addition to the residual.

    It keeps a mask of one byte per element, unless the probability is 0.
    """
    added = of.residual
    scales = Moved(*(2 * of.hidden * (of.model.residual_multiplier != 1.0),) * 2)
    if not of.model.hidden_dropout:
        # The gradient of the sum is the gradient of both terms. A 16-bit branch gets a cast of it.
        moved = Moved(2 * added + of.hidden, (added + of.hidden) * of.widened)
        return Operation(name, "", regions=(DROPOUT,), moved=moved + scales)
    mask = KeptTensor(f"{name} mask", of.hidden // of.element_bytes)
    state = KeptTensor(f"RNG state of the {mask.name}", of.stream_state_bytes, stays=True)
    return Operation(
        name,
        "",
        (mask,),
        (DROPOUT,),
        (state,),
        moved=scales + (5 * added + mask.num_bytes, 2 * added + mask.num_bytes),
    )


def query_key_norms(of: Sizes, raw: tuple[KeptTensor, ...]) -> Operation:
    """Returns the norms of query and key.

    raw: the tensors that they keep of their inputs.
    """
    model, both, names = of.model, of.query + of.kv, ("query", "key")
    calls: tuple[OperatorCall, ...] = ()
    if model.norms_all_heads:
        # One scale for each token and norm, and the weights of this rank's heads.
        rows, moved = 2 * of.tokens, Moved(3 * both, 5 * both)
        heads = model.num_attention_heads // of.tp_size, model.query_groups // of.tp_size
        if of.tp_size > 1:
            total = Collective(ALL_REDUCE, of.row)
            calls = tuple(total.call(f"sum of squares of the {name}") for name in names)
    else:
        rows, moved = both // of.element_bytes // model.head_dim, Moved(2 * both, 3 * both)
        heads = 1, 1
    widths = [number * model.head_dim for number in heads]
    shifted = (
        one
        for name, width in zip(names, widths, strict=True)
        for one in shifted_weight(of, f"{name} norm", width)
    )
    return Operation(
        QK_LAYERNORM,
        "self_attention",
        (*raw, norm_statistics(of, "qk norm", rows), *shifted),
        calls=calls,
        backward=tuple(one for call in calls for one in call.collectives),
        parameters=tuple(
            one
            for name, width in zip("qk", widths, strict=True)
            for one in norm_parameters(
                of, width, f"{name}_layernorm.", partial=not model.norms_all_heads
            )
        ),
        moved=moved,
        temporary=norm_temporary(of, of.query) + 2 * of.kv,
    )


def norm_statistics(of: Sizes, name: str, rows: int, *, wide: bool = False) -> KeptTensor:
    """Returns the statistics that a norm of `rows` rows keeps for backward.

    LayerNorm keeps the mean and the reciprocal deviation of each row, RMSNorm the reciprocal root
    mean square. torch's CPU kernel of LayerNorm keeps them in the dtype of the rows. All other
    kernels, also compiled ones, keep at least float32.

    wide: whether the rows are in float32.
    """
    model = of.model
    in_rows_dtype = (
        model.normalization != "RMSNorm" and of.device == "cpu" and not (of.compiled or wide)
    )
    numbers = rows * STATISTICS[model.normalization]
    num_bytes = numbers * (of.element_bytes if in_rows_dtype else of.accumulate_bytes)
    return KeptTensor(f"{name} statistics", num_bytes)


def norm_keeps(of: Sizes, name: str) -> tuple[KeptTensor, ...]:
    """Returns the tensors that a norm of [s', b, h] keeps besides its input."""
    statistics = norm_statistics(of, name, of.local_tokens, wide=of.widened)
    if not of.widened:
        return statistics, *shifted_weight(of, name, of.model.hidden_size)
    # A norm of a wider residual stream keeps a cast of its weight.
    vector = of.model.hidden_size * of.accumulate_bytes
    return statistics, KeptTensor(f"{name} weight in float32", vector)


def shifted_weight(of: Sizes, name: str, width: int) -> tuple[KeptTensor, ...]:
    """Returns 1 + weight, which a norm keeps under --apply-layernorm-1p, or nothing."""
    if not of.model.apply_layernorm_1p:
        return ()
    return (KeptTensor(f"{name} weight plus 1", width * of.element_bytes),)


def norm_parameters(
    of: Sizes, width: int | None = None, prefix: str = "", *, partial: bool | None = None
) -> tuple[Parameter, ...]:
    """Returns the weight of a norm and, for LayerNorm, the bias.

    width: the elements of each; None: those of the hidden states.
    partial: whether each TP rank normalizes other tokens or other heads; None: other tokens under
        sequence parallelism.
    """
    width = of.model.hidden_size if width is None else width
    partial = of.sequence_parallel if partial is None else partial
    return tuple(
        Parameter(f"{prefix}{name}", (width,), partial)
        for name in ("weight", "bias")[: of.model.norm_vectors]
    )
