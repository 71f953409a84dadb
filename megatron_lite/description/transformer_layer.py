"""The description of a transformer layer (model/layer.py) as operations. Standard library only."""

from __future__ import annotations

from collections import Counter
from typing import Any

from megatron_lite.config.model import ACTIVATIONS, ModelConfig
from megatron_lite.config.regions import ACTIVATION, MLP_REGION
from megatron_lite.description import temporaries
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
from megatron_lite.description.sizes import Sizes, is_widened, residual_bytes

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
    """Returns the description of a layer. The variables have the notation of config/model.py.

    layer: the number of the layer in the whole model, counted from 0.
    """
    element, tp_size, h, d = sizes.element_bytes, sizes.tp_size, model.hidden_size, model.head_dim
    hidden = sizes.local_tokens * h * element  # [s', b, h], s' = s/(c t) or s/c
    qkv_width = (model.num_attention_heads + 2 * model.query_groups) * d // tp_size
    fc1_width, fc2_width = model.fc1_blocks * model.ffn_size // tp_size, model.ffn_size // tp_size
    activated = KeptTensor("activation output", sizes.tokens * fc2_width * element)
    intermediate = KeptTensor("fc1 output", sizes.tokens * fc1_width * element)
    shape: dict[str, Any] = dict(model=model, sizes=sizes)
    layer_input, mlp_residual = (
        KeptTensor(name, residual_bytes(model, sizes)) for name in ("layer input", "mlp residual")
    )
    if model.parallel_residual:
        mlp_residual = layer_input
    before_attention: tuple[Operation, ...] = ()
    before_mlp, after_attention, after_mlp = before_attention, before_attention, before_attention
    if model.norms_after:
        normed, normed_mlp = layer_input, mlp_residual
        after_attention = (norm_after("post_self_attn_layernorm", LINEAR_PROJ, **shape),)
        after_mlp = (norm_after("post_mlp_layernorm", LINEAR_FC2, regions=(MLP_REGION,), **shape),)
    else:
        normed, normed_mlp = (
            KeptTensor(f"normed {name}", hidden) for name in ("layer input", "mlp residual")
        )
        before_attention = (
            norm_before("input_layernorm", layer_input, normed.name, "input norm", **shape),
        )
        before_mlp = (
            norm_before("pre_mlp_layernorm", mlp_residual, normed_mlp.name, "mlp norm", **shape),
        )
    # Under sequence parallelism linear_qkv and linear_fc1 keep only this rank's 1/t of their input
    # and gather it again in backward (2205.05198, section 4.2.2). Their inputs are `hidden` bytes.
    qkv = column_linear(
        "linear_qkv",
        "self_attention.linear_qkv",
        "qkv",
        "query, key and value",
        width=qkv_width,
        bias=model.add_bias_linear or model.add_qkv_bias,
        keeps=(normed,),
        moved=_split_heads(qkv_width * sizes.tokens * element, model),
        **shape,
    )
    projection = row_linear(
        LINEAR_PROJ,
        "self_attention.linear_proj",
        "projection",
        width=model.num_attention_heads * d // tp_size,
        bias=model.add_bias_linear,
        keeps=(attention_output(model, sizes),),
        # With a norm in between, or if the MLP's branch begins beside attention, the gradient of
        # the residual stream is another tensor.
        own_gradient=model.norms_after or model.parallel_residual,
        **shape,
    )
    fc1 = column_linear(
        LINEAR_FC1,
        "mlp.linear_fc1",
        "fc1",
        intermediate.name,
        width=fc1_width,
        bias=model.add_bias_linear,
        keeps=(normed_mlp,),
        regions=(MLP_REGION,),
        enters=(RegionEntry(MLP_REGION, (normed_mlp,)),),
        **shape,
    )
    activation = Operation(
        "activation",
        "mlp",
        (intermediate,),
        (MLP_REGION, ACTIVATION),
        (RegionEntry(ACTIVATION, (intermediate,), (activated.name,)),),
        moved=_activation(model, activated.num_bytes),
        temporary=temporaries.activation(model, sizes, intermediate.num_bytes, activated.num_bytes),
    )
    fc2 = row_linear(
        LINEAR_FC2,
        "mlp.linear_fc2",
        "fc2",
        width=fc2_width,
        bias=model.add_bias_linear,
        keeps=(activated,),
        regions=(MLP_REGION,),
        own_gradient=model.norms_after,
        output_is_read=model.norms_after,
        **shape,
    )
    return LayerDescription(
        (
            *before_attention,
            qkv,
            *attention_operations(model, sizes, layer),
            projection,
            *after_attention,
            add_branch(ATTENTION_DROPOUT, **shape),
            *before_mlp,
            fc1,
            activation,
            fc2,
            *after_mlp,
            add_branch(MLP_DROPOUT, **shape),
        ),
        _absorbs(model, sizes),
        _peculiarity(model, sizes, layer),
    )


def _absorbs(model: ModelConfig, sizes: Sizes) -> str:
    """Returns the operation whose backward takes in the gradient of the layer's output.

    It adds the gradient of the MLP's input to it. With a parallel residual the two are added where
    attention's branch ends, and the gradient of the output is freed once that branch has read it.
    """
    if model.parallel_residual:
        own_gradient = model.hidden_dropout or is_widened(model, sizes)
        return ATTENTION_DROPOUT if own_gradient else LINEAR_PROJ
    return LINEAR_FC1 if model.norms_after else "pre_mlp_layernorm"


def _peculiarity(model: ModelConfig, sizes: Sizes, layer: int) -> str:
    """Returns a text that tells how the layer differs from others of the model, or ""."""
    reach = model.layer_reach(layer, sizes.seq_length)
    words = [f"a window of {reach + 1} tokens"] if reach is not None else []
    if model.positions.rotated and not model.layer_rotates(layer):
        words.append("no rotary embedding")
    return ", ".join(words)


def _split_heads(qkv_bytes: int, model: ModelConfig) -> Moved:
    """Returns the bytes that splitting the output of linear_qkv moves (model/attention.py).

    With query groups, query and value become contiguous. Backward joins the three gradients.
    """
    grouped = model.query_groups < model.num_attention_heads
    return Moved(2 * qkv_bytes if grouped else 0, 2 * qkv_bytes)


def _activation(model: ModelConfig, output_bytes: int) -> Moved:
    forward, backward = ACTIVATIONS[model.activation].moved
    return Moved(forward * output_bytes, backward * output_bytes)
