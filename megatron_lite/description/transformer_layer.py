"""The description of a transformer layer (model/layer.py) as operations. Standard library only."""

from __future__ import annotations

from collections import Counter
from typing import Any

from megatron_lite.config.model import ACTIVATIONS, ModelConfig
from megatron_lite.config.regions import ACTIVATION, DROPOUT, LAYERNORM, MLP_REGION
from megatron_lite.description.activations import activation_workspace
from megatron_lite.description.dropout import drawn_mask, dropout_forward, masked
from megatron_lite.description.linears import RowFrees, column_linear, row_linear
from megatron_lite.description.norm_statistics import (
    norm_backward,
    norm_forward,
    norm_parameters,
    norm_statistics,
)
from megatron_lite.description.operations import (
    LINEAR_PROJ,
    KeptTensor,
    LayerDescription,
    Moved,
    Operation,
    RegionEntry,
    Workspace,
    course,
    rng_state,
)
from megatron_lite.description.self_attention import (
    attention_operations,
    attention_output,
    projection_frees,
)
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.weight_gradients import added_up


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
    activated = KeptTensor("activation output", sizes.tokens * fc2_width * element, True)
    intermediate = KeptTensor("fc1 output", sizes.tokens * fc1_width * element, True)
    normed_mlp = KeptTensor("normed mlp residual", hidden, True)
    shape: dict[str, Any] = dict(model=model, sizes=sizes)
    # Under sequence parallelism linear_qkv and linear_fc1 keep only this rank's 1/t of their input
    # and gather it again in backward (2205.05198, section 4.2.2). Their inputs are `hidden` bytes.
    return LayerDescription(
        (
            _norm(
                "input_layernorm",
                KeptTensor("layer input", hidden, True),
                "normed layer input",
                "input norm",
                **shape,
            ),
            column_linear(
                "linear_qkv",
                "self_attention.linear_qkv",
                "qkv",
                "query, key and value",
                width=qkv_width,
                bias=model.add_bias_linear or model.add_qkv_bias,
                keeps=(KeptTensor("normed layer input", hidden, True),),
                moved=_split_heads(qkv_width * sizes.tokens * element, model),
                **shape,
            ),
            *attention_operations(model, sizes, layer),
            row_linear(
                LINEAR_PROJ,
                "self_attention.linear_proj",
                "projection",
                width=model.num_attention_heads * d // tp_size,
                bias=model.add_bias_linear,
                keeps=(attention_output(model, sizes),),
                frees=projection_frees(model, sizes),
                **shape,
            ),
            _dropout("attention", **shape),
            _norm(
                "pre_mlp_layernorm",
                KeptTensor("mlp residual", hidden, True),
                normed_mlp.name,
                "mlp norm",
                **shape,
            ),
            column_linear(
                "linear_fc1",
                "mlp.linear_fc1",
                "fc1",
                intermediate.name,
                width=fc1_width,
                bias=model.add_bias_linear,
                keeps=(normed_mlp,),
                regions=(MLP_REGION,),
                enters=(RegionEntry(MLP_REGION, (normed_mlp,)),),
                **shape,
            ),
            Operation(
                "activation",
                "mlp",
                (intermediate,),
                (MLP_REGION, ACTIVATION),
                (RegionEntry(ACTIVATION, (intermediate,), (activated.name,)),),
                moved=_activation(model, activated.num_bytes),
                workspace=activation_workspace(
                    model, sizes, intermediate=intermediate.num_bytes, output=activated.num_bytes
                ),
            ),
            row_linear(
                "linear_fc2",
                "mlp.linear_fc2",
                "fc2",
                width=fc2_width,
                bias=model.add_bias_linear,
                keeps=(activated,),
                regions=(MLP_REGION,),
                frees=RowFrees(forward=0, backward=activated.num_bytes),
                **shape,
            ),
            _dropout("mlp", **shape),
        ),
        _peculiarity(model, sizes, layer),
    )


def _peculiarity(model: ModelConfig, sizes: Sizes, layer: int) -> str:
    """Returns a text that tells how the layer differs from others of the model, or ""."""
    reach = model.layer_reach(layer, sizes.seq_length)
    words = [f"a window of {reach + 1} tokens"] if reach is not None else []
    if model.positions.rotated and not model.layer_rotates(layer):
        words.append("no rotary embedding")
    return ", ".join(words)


def _norm(
    name: str,
    residual: KeptTensor,
    output: str,
    statistics: str,
    *,
    model: ModelConfig,
    sizes: Sizes,
) -> Operation:
    shape = model, sizes, sizes.local_tokens, model.hidden_size
    vectors = norm_parameters(model, model.hidden_size, partial=sizes.sequence_parallel)
    backward = course(norm_backward(*shape), added_up(vectors, sizes))
    return Operation(
        name,
        name,
        (residual, norm_statistics(statistics, model, sizes, sizes.local_tokens)),
        (LAYERNORM,),
        (RegionEntry(LAYERNORM, (residual,), (output,)),),
        parameters=vectors,
        # Backward reads dy and x, writes dx, and adds dx to the gradient of the residual.
        moved=Moved(2 * residual.num_bytes, 6 * residual.num_bytes),
        # Autograd adds the gradient of the norm's input to that of the residual stream, in place.
        workspace=Workspace(norm_forward(*shape), course(backward, -2 * residual.num_bytes)),
        # The caller of a replay holds the gradient of the residual stream, so the sum is a tensor
        # of its own.
        replayed=Workspace(
            norm_forward(*shape), course(backward, +residual.num_bytes, -2 * residual.num_bytes)
        ),
    )


def _split_heads(qkv_bytes: int, model: ModelConfig) -> Moved:
    """Returns the bytes that splitting the output of linear_qkv moves (model/attention.py).

    With query groups, query and value become contiguous. Backward spreads each of the three
    gradients over a tensor of zeros and adds the three.
    """
    grouped = model.query_groups < model.num_attention_heads
    return Moved(2 * qkv_bytes if grouped else 0, 10 * qkv_bytes)


def _activation(model: ModelConfig, output_bytes: int) -> Moved:
    forward, backward = ACTIVATIONS[model.activation].moved
    return Moved(forward * output_bytes, backward * output_bytes)


def _dropout(branch: str, *, model: ModelConfig, sizes: Sizes) -> Operation:
    """Returns the dropout of a branch before the branch is added to the residual.

    It keeps a mask of one byte per element, unless the probability is 0. The branch is freed. The
    residual is kept by the norm before the branch.
    """
    added = sizes.local_tokens * model.hidden_size * sizes.element_bytes
    if not model.hidden_dropout:
        # The gradient of the sum is the gradient of both terms.
        workspace = Workspace(course(+added, -added))
        return Operation(
            f"{branch} dropout",
            "",
            regions=(DROPOUT,),
            moved=Moved(3 * added),
            workspace=workspace,
            replayed=Workspace(),
        )
    mask = KeptTensor(f"{branch} dropout mask", sizes.local_tokens * model.hidden_size, True)
    state = rng_state(f"RNG state of the {mask.name}", sizes.stream_state_bytes)
    workspace = Workspace(
        course(dropout_forward(mask.num_bytes, added, sizes), -added),
        course(masked(added, sizes), -mask.num_bytes),
    )
    return Operation(
        f"{branch} dropout",
        "",
        (mask,),
        (DROPOUT,),
        (RegionEntry(DROPOUT, (state,)),),
        moved=Moved(5 * added + mask.num_bytes, 2 * added + mask.num_bytes),
        workspace=workspace,
        replayed=Workspace(drawn_mask(mask.num_bytes, sizes), workspace.backward),
    )
