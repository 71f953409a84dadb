"""The description of a transformer layer (model/layer.py) as rows. Standard library only."""

from __future__ import annotations

from collections import Counter

from megatron_lite.config.model import ACTIVATIONS, ModelConfig
from megatron_lite.config.regions import ACTIVATION, MLP_REGION
from megatron_lite.description.linears import column_linear, row_linear
from megatron_lite.description.norms import (
    ATTENTION_DROPOUT,
    MLP_DROPOUT,
    add_branch,
    norm_after,
    norm_before,
)
from megatron_lite.description.operations import (
    LINEAR_PROJ,
    KeptTensor,
    LayerDescription,
    Moved,
    Operation,
    RegionEntry,
)
from megatron_lite.description.self_attention import attention_operations, attention_output
from megatron_lite.description.shape import Shape
from megatron_lite.description.sizes import Sizes

LINEAR_FC1, LINEAR_FC2 = "linear_fc1", "linear_fc2"


def describe_layers(
    model: ModelConfig, sizes: Sizes, num_layers: int
) -> tuple[LayerDescription, ...]:
    """Returns the descriptions of `num_layers` layers that begin with layer `sizes.first_layer`.

    Layers that are alike share one description.
    """
    alike: dict[tuple[int | None, bool], LayerDescription] = {}
    layers = []
    for layer in range(sizes.first_layer, sizes.first_layer + num_layers):
        kind = (model.layer_reach(layer, sizes.seq_length), model.layer_rotates(layer))
        if kind not in alike:
            alike[kind] = describe_layer(model, sizes, layer)
        layers.append(alike[kind])
    return tuple(layers)


def describe_kinds(
    model: ModelConfig, sizes: Sizes, num_layers: int
) -> list[tuple[LayerDescription, int]]:
    """Returns each kind of layer among `num_layers` with how many there are, for sums over them.

    A model whose layers are all alike is described once, however many layers it has.
    """
    if model.window_size is None and model.no_rope_freq is None:
        return [(describe_layer(model, sizes, sizes.first_layer), num_layers)]
    layers = describe_layers(model, sizes, num_layers)
    counts = Counter(map(id, layers))
    return [
        (layer, counts[number]) for number, layer in {id(layer): layer for layer in layers}.items()
    ]


def describe_layer(model: ModelConfig, sizes: Sizes, layer: int = 0) -> LayerDescription:
    """Returns the description of a layer: its operations in the order of the forward.

    layer: the number of the layer in the whole model, counted from 0.
    """
    of = Shape(model, sizes)
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
    if model.norms_after:
        normed, normed_mlp = layer_input, mlp_residual
    fc2_width = model.ffn_size // of.tp_size
    fc1_width = model.fc1_blocks * model.ffn_size // of.tp_size
    intermediate = KeptTensor("fc1 output", sizes.tokens * fc1_width * of.element)
    activated = KeptTensor("activation output", sizes.tokens * fc2_width * of.element)
    bias = model.add_bias_linear
    before, after = not model.norms_after, model.norms_after
    rows = (
        before and norm_before(of, "input_layernorm", layer_input, normed.name, "input norm"),
        _query_key_value(of, normed),
        *attention_operations(of, layer),
        row_linear(
            of,
            LINEAR_PROJ,
            "self_attention.linear_proj",
            "projection",
            width=model.num_attention_heads * model.head_dim // of.tp_size,
            keeps=(attention_output(of),),
            # With a norm in between, or if the MLP's branch begins beside attention, the gradient
            # of the residual stream is another tensor.
            own_gradient=after or model.parallel_residual,
        ),
        after and norm_after(of, "post_self_attn_layernorm", LINEAR_PROJ),
        add_branch(of, ATTENTION_DROPOUT),
        before and norm_before(of, "pre_mlp_layernorm", mlp_residual, normed_mlp.name, "mlp norm"),
        column_linear(
            of,
            LINEAR_FC1,
            "mlp.linear_fc1",
            "fc1",
            intermediate.name,
            width=fc1_width,
            bias=bias,
            skips_bias=sizes.compiled,
            keeps=(normed_mlp,),
            regions=(MLP_REGION,),
            enters=(RegionEntry(MLP_REGION, (normed_mlp,)),),
        ),
        _activation(of, intermediate, activated),
        row_linear(
            of,
            LINEAR_FC2,
            "mlp.linear_fc2",
            "fc2",
            width=fc2_width,
            keeps=(activated,),
            regions=(MLP_REGION,),
            own_gradient=after,
            output_is_read=after,
        ),
        after and norm_after(of, "post_mlp_layernorm", LINEAR_FC2, (MLP_REGION,)),
        add_branch(of, MLP_DROPOUT),
    )
    return LayerDescription(
        tuple(row for row in rows if row), _absorbs(of), _peculiarity(model, sizes, layer)
    )


def _query_key_value(of: Shape, keeps: KeptTensor) -> Operation:
    """Returns the linear layer before attention, and the split of its output into heads.

    With query groups, query and value become contiguous (model/attention.py). Backward joins the
    three gradients.
    """
    model, twice = of.model, 2 * (of.query + 2 * of.kv)
    grouped = model.query_groups < model.num_attention_heads
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


def _activation(of: Shape, intermediate: KeptTensor, activated: KeptTensor) -> Operation:
    """Returns the MLP's activation. intermediate: its input. activated: its result."""
    model, inside, output = of.model, intermediate.num_bytes, activated.num_bytes
    if of.sizes.compiled:
        pass  # one kernel, which has no tensor inside
    elif model.activation == "gelu" and model.bias_gelu_fusion and of.sizes.device == "cpu":
        # The forward computes in float32: a 16-bit input and the result are cast.
        inside = max(inside, 2 * of.wide(output) * of.sizes.is_rounded)
    elif model.activation == "swiglu":
        inside += 2 * output  # backward holds silu(gate) and two gradients of that size
    facts = ACTIVATIONS[model.activation]
    forward, backward = facts.fused if of.sizes.compiled else facts.moved
    return Operation(
        "activation",
        "mlp",
        (intermediate,),
        (MLP_REGION, ACTIVATION),
        (RegionEntry(ACTIVATION, (intermediate,), (activated.name,)),),
        moved=Moved(forward * output, backward * output),
        temporary=inside + output,
    )


def _absorbs(of: Shape) -> str:
    """Returns the operation whose backward takes in the gradient of the layer's output.

    It adds the gradient of the MLP's input to it. With a parallel residual the two are added where
    attention's branch ends, and the gradient of the output is freed once that branch has read it.
    """
    model = of.model
    if model.parallel_residual:
        return ATTENTION_DROPOUT if model.hidden_dropout or of.widened else LINEAR_PROJ
    return LINEAR_FC1 if model.norms_after else "pre_mlp_layernorm"


def _peculiarity(model: ModelConfig, sizes: Sizes, layer: int) -> str:
    """Returns a text that tells how the layer differs from others of the model, or ""."""
    reach = model.layer_reach(layer, sizes.seq_length)
    words = [f"a window of {reach + 1} tokens"] if reach is not None else []
    if model.positions.rotated and not model.layer_rotates(layer):
        words.append("no rotary embedding")
    return ", ".join(words)
