"""The description of a transformer layer (model/layer.py) as rows. Standard library only."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain

from megatron_lite.config.parallel import exchange_of
from megatron_lite.config.regions import MLP_REGION, MOE

from .linears import column_linear, dense_mlp, row_linear
from .norms import ATTENTION_DROPOUT, MLP_DROPOUT, add_branch, norm_after, norm_before
from .operations import LINEAR_PROJ, ROUTER, KeptTensor, LayerDescription, Moved, Operation
from .self_attention import attention_operations, attention_output
from .sizes import Sizes, alike_layers

LINEAR_FC1, LINEAR_FC2 = "linear_fc1", "linear_fc2"


def describe_layers(sizes: Sizes, tiles: Sequence[int]) -> tuple[LayerDescription, ...]:
    """Returns the descriptions of the layers that begin with layer `sizes.first_layer`.

    Layers that are alike share one description.
    tiles: those of the MLP of each layer (`RecomputePlan.tiles`).
    """
    numbers = first_numbers(sizes, len(tiles))
    return tuple(describe_layer(sizes, *one) for one in zip(numbers, tiles, strict=True))


def first_numbers(sizes: Sizes, num_layers: int) -> Sequence[int]:
    """Returns the layers of the model of which `describe_layer` gives these layers.

    A layer stands for all that are like it.
    """
    layers = slice(sizes.first_layer, sizes.first_layer + num_layers)
    if sizes.expert_rows:  # each layer has its own
        return range(sizes.model.num_layers)[layers]
    return alike_layers(sizes.model, sizes.seq_length, sizes.cp_comm_type)[layers]


def describe_kinds(sizes: Sizes, num_layers: int) -> list[tuple[LayerDescription, int]]:
    """Returns each kind of layer among `num_layers` with how many there are, for sums over them."""
    counts = Counter(first_numbers(sizes, num_layers)).items()
    return [(describe_layer(sizes, number), count) for number, count in counts]


@lru_cache(1024)
def describe_layer(sizes: Sizes, layer: int = 0, tiles: int = 1) -> LayerDescription:
    """Returns the description of a layer: its operations in the order of the forward.

    layer: the number of the layer in the whole model, counted from 0.
    tiles: how many tiles of the sequence a dense MLP runs in (recompute/checkpoint.py).
    """
    of = replace(sizes, cp_comm_type=exchange_of(sizes.cp_comm_type, layer))
    model = of.model
    layer_input, mlp_residual = (
        KeptTensor(name, of.residual) for name in ("layer input", "mlp residual")
    )
    if model.parallel_residual:
        mlp_residual = layer_input
    # Under sequence parallelism linear_qkv and linear_fc1 keep only this rank's 1/t of their input
    # and gather it again in backward (2205.05198, section 4.2.2). Their inputs are `of.hidden`.
    normed, normed_mlp = (
        KeptTensor(f"normed {name}", of.hidden) for name in ("layer input", "mlp residual")
    )
    if not model.norms_before:
        normed, normed_mlp = layer_input, mlp_residual
    if model.shared_norm:
        normed_mlp = normed
    before, after = model.norms_before, model.norms_after
    has_experts = model.layer_has_experts(layer)
    region = MOE if has_experts else MLP_REGION
    kept_choices: tuple[KeptTensor, ...] = ()
    if has_experts:
        # late: a dense model does not need it
        from .experts import choices, expert_operations

        tiles, kept_choices = 1, choices(of)
        mlp = expert_operations(of, normed_mlp, layer)
    tile = replace(of, seq_length=of.seq_length // tiles)
    if not has_experts:
        mlp = dense_mlp(
            tile, normed_mlp, ffn_size=model.ffn_size, regions=(region,), output_is_read=after
        )
    if after:
        mlp = chain(mlp, (norm_after(tile, "post_mlp_layernorm", LINEAR_FC2, (region,)),))
    if tiles > 1:
        mlp = in_tiles(of, tuple(mlp), tiles)
    if model.multi_latent_attention:
        # late: few models have it
        from .latent_attention import latent_operations

        before_projection = latent_operations(of, normed, layer)
    else:
        before_projection = chain((_query_key_value(of, normed),), attention_operations(of, layer))
    rows = (
        before and norm_before(of, "input_layernorm", layer_input, normed.name, "input norm"),
        *before_projection,
        row_linear(
            of,
            LINEAR_PROJ,
            "self_attention.linear_proj",
            "projection",
            width=model.num_attention_heads * model.value_dim // of.tp_size,
            keeps=(attention_output(of),),
            own_gradient=model.parallel_residual,  # the MLP's branch begins beside attention
            bias=model.has_proj_bias,
        ),
        after and norm_after(of, "post_self_attn_layernorm", LINEAR_PROJ),
        add_branch(of, ATTENTION_DROPOUT),
        before
        and not model.shared_norm
        and norm_before(of, "pre_mlp_layernorm", mlp_residual, normed_mlp.name, "mlp norm"),
        *mlp,
        add_branch(of, MLP_DROPOUT),
    )
    return LayerDescription(
        tuple(row for row in rows if row),
        _absorbs(of, has_experts),
        _peculiarity(of, layer),
        kept_choices,
    )


def _query_key_value(of: Sizes, keeps: KeptTensor) -> Operation:
    """Returns the linear layer before attention, and the split of its output into heads.

    With query groups, query and value become contiguous (model/attention.py), unless a compiled
    kernel reads them next. Backward joins the three gradients.
    """
    model, twice = of.model, 2 * (of.query + 2 * of.kv)
    next_reads = of.compiled and (model.qk_layernorm or model.rotates)
    grouped = model.query_groups < model.num_attention_heads and not next_reads
    return column_linear(
        of,
        "linear_qkv",
        "self_attention.linear_qkv",
        "qkv",
        "query, key and value",
        width=(model.num_attention_heads + 2 * model.query_groups) * model.head_dim // of.tp_size,
        bias=model.add_bias_linear or model.add_qkv_bias,
        keeps=(keeps,),
        moved=Moved(twice * grouped, twice),
    )


def _absorbs(of: Sizes, has_experts: bool) -> str:
    """Returns the operation whose backward takes in the gradient of the layer's output.

    It adds the gradient of the MLP's input to it. With a parallel residual the two are added where
    attention's branch ends, and the gradient of the output is freed once that branch has read it.
    """
    model = of.model
    if model.parallel_residual:
        return ATTENTION_DROPOUT if model.hidden_dropout or of.widened else LINEAR_PROJ
    first = ROUTER if has_experts else LINEAR_FC1
    return "pre_mlp_layernorm" if model.norms_before else first


def _peculiarity(sizes: Sizes, layer: int) -> str:
    """Returns a text that tells how the layer differs from others of the model, or ""."""
    model = sizes.model
    reach = model.layer_reach(layer, sizes.seq_length)
    words = [f"a window of {reach + 1} tokens"] if reach is not None else []
    if model.layer_has_experts(layer) and model.moe_layer_freq != 1:
        words.append(f"{model.num_experts} experts")
    if model.rotates and not model.layer_rotates(layer):
        words.append("no rotary embedding")
    return ", ".join(words)


def in_tiles(of: Sizes, tile: Sequence[Operation], tiles: int) -> Iterator[Operation]:
    """Yields the operations of an MLP that runs in tiles. tile: those of one.

    Beside a tile there are the gradient of the whole input, and the sums of gradients that autograd
    gets, with those of the operations that the tile's backward has left.
    """
    by_hand = of.sums_gradients and of.adds_by_itself
    gradients = [
        0 if by_hand else of.element_bytes * sum(each.num_elements for each in one.parameters)
        for one in tile
    ]
    for number, one in enumerate(tile):
        left = sum(gradients[number + 1 :]) * of.sums_gradients
        yield one._replace(
            calls=one.calls * tiles,
            backward=one.backward * tiles,
            moved=Moved(*(tiles * moved for moved in one.moved)),
            temporary=one.temporary + of.hidden + sum(gradients) + left,
        )
