"""The model, the vocabulary and the progress that the `args` of a Megatron checkpoint describe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from megatron_lite.checkpointing.metadata import MOST_SAMPLES, Progress
from megatron_lite.checkpointing.shards import MOST_ELEMENTS
from megatron_lite.checkpointing.step_files import MOST_ITERATIONS
from megatron_lite.config.checks import InputError
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.plain import MOST_LAYERS, quoted
from megatron_lite.convert.megatron.pickles import PickledObject

MODEL_FIELDS = {field.name: field for field in fields(ModelConfig)}
# They change how a layer is computed, not what: the converted model has this project's defaults.
NOT_TAKEN = frozenset(("attention_backend", "norm_impl"))
# Fields that Megatron-LM has no argument for, with the only value that its models have.
ONLY_HERE = {"parallel_residual": False, "norm_position": "before", "qk_layernorm_scope": "head"}
# Spellings of older releases. The newer one is read first.
OLDER_NAMES = {"norm_epsilon": "layernorm_epsilon", "max_position_embeddings": "seq_length"}


SCALARS = (bool, int, float, str)
OFF = (False, 0)
# Arguments that must be OFF, and why. One that ModelConfig has as a field is read as that field,
# and has no effect here.
REASONS = {
    "num_experts": "mixture-of-experts layers are not built",
    "multi_latent_attention": "multi-latent attention is not built",
    "mtp_num_layers": "multi-token prediction is not built",
    "hybrid_layer_pattern": "state-space layers are not built",
    "hybrid_override_pattern": "state-space layers are not built",
    "heterogeneous_layers_config_path": "all layers have the same sizes",
    "heterogeneous_layers_config_encoded_json": "all layers have the same sizes",
    "apply_layernorm_1p": "its norms multiply by 1 + weight",
    "layernorm_zero_centered_gamma": "its norms multiply by 1 + weight",
    "apply_residual_connection_post_layernorm": "the residual stream goes around the norm",
    "rotary_interleaved": "rotation pairs the two halves of a head",
    "rotary_scaling_factor": "it belongs to multi-latent attention",
    "quick_geglu": "the activation is not built",
    "glu_linear_offset": "the activation is not built",
    "activation_func_clamp_value": "the activation is not built",
    "attention_output_gate": "gated attention is not built",
    "experimental_attention_variant": "the attention is not built",
    "qk_l2_norm": "queries and keys have no L2 norm",
    "softmax_type": "the softmax has no sink",
    "retro_add_retriever": "retrieval is not built",
    "onnx_safe": "its GELU is another one",
}
# Further values with which the model is the one of this project.
ALSO_NEUTRAL = {"num_experts": (1,), "rotary_scaling_factor": (1, 40), "softmax_type": ("vanilla",)}


def arguments_of(value: Any, where: str) -> dict[str, Any]:
    """Returns the `args` of a checkpoint's common values. Raises InputError if there are none."""
    found = value.get("args") if isinstance(value, dict) else None
    if isinstance(found, PickledObject) and found.fields:
        found = found.fields
    if not isinstance(found, dict) or not found:
        raise InputError(
            f"{where}: holds no `args`, so the shape of its model is not known. Checkpoints of "
            "Megatron-LM have them; save the checkpoint again with Megatron-LM"
        )
    return found


def model_of(args: Mapping[str, Any], where: str) -> ModelConfig:
    """Returns the model that a checkpoint's `args` describe.

    Raises InputError if this project has no such model; it names the argument.
    """
    for name, reason in REASONS.items():
        value = args.get(name)
        neutral = type(value) in SCALARS and value in (*OFF, *ALSO_NEUTRAL.get(name, ()))
        if name not in MODEL_FIELDS and not (value is None or neutral):
            raise InputError(
                f"{where}: was trained with {name} = {_text(value)}, which cannot be converted: "
                f"{reason}"
            )
    values: dict[str, Any] = {}
    for name, field in MODEL_FIELDS.items():
        if name in NOT_TAKEN or name in ONLY_HERE:
            continue
        value = args.get(name)
        if value is None and name in OLDER_NAMES:
            value = args.get(OLDER_NAMES[name])
        if value is not None:
            values[name] = _plain(name, value, where)
        elif field.default is MISSING:
            raise InputError(f"{where}: its args have no {name}, which the model needs")
    _use_older_switches(args, values)
    # Megatron does not read the number of groups without this switch.
    if not values.get("group_query_attention"):
        values.pop("num_query_groups", None)
    if args.get("openai_gelu"):
        values["bias_gelu_fusion"] = True  # both are the tanh approximation
    try:
        return ModelConfig(**values)
    except (ValueError, TypeError) as error:
        raise InputError(f"{where}: its args describe no model of this project: {error}") from error


def vocabulary_of(args: Mapping[str, Any], padded: int) -> tuple[int, tuple[str, ...]]:
    """Returns V, and notes.

    padded: the number of rows that the embedding has in the checkpoint.
    """
    notes: tuple[str, ...] = ()
    tokenizer = args.get("tokenizer_type")
    if type(tokenizer) is str and tokenizer != "NullTokenizer":
        notes = (
            f"the checkpoint does not hold its tokenizer ({quoted(tokenizer)}, "
            f"{_text(args.get('tokenizer_model') or args.get('vocab_file'))}): name it with "
            "--tokenizer-type and its files",
        )
    size = args.get("vocab_size")
    if type(size) is int and size > 0:
        size += args.get("tokenizer_type") == "NullTokenizer"  # its end-of-document id
        if size <= padded:
            return size, notes
    return padded, (
        *notes,
        (
            f"the checkpoint does not say how many of its {padded} rows of the vocabulary are "
            "padding: all of them are kept"
        ),
    )


def progress_of(value: Mapping[str, Any], args: Mapping[str, Any], where: str) -> Progress:
    """Returns how far the run had come; zero where the checkpoint does not say.

    Raises InputError for numbers that no run reaches.
    """
    found = {"iteration": (value, MOST_ITERATIONS), "consumed_train_samples": (args, MOST_SAMPLES)}
    numbers = []
    for name, (values, most) in found.items():
        number = 0 if values.get(name) is None else values[name]
        if type(number) is not int or not 0 <= number <= most:
            raise InputError(
                f"{where}: its {name} must be a whole number from 0 to {most} (got {_text(number)})"
            )
        numbers.append(number)
    return Progress(iteration=numbers[0], consumed_samples=numbers[1])


def size_of(args: Mapping[str, Any], *names: str) -> int | None:
    """Returns the first of the named arguments that is a positive number, or None."""
    found = (args.get(name) for name in names)
    return next((one for one in found if type(one) is int and 0 < one < 2**20), None)


def _use_older_switches(args: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Adds values from arguments of older releases, which have other names and forms today."""
    if "add_bias_linear" not in values and "disable_bias_linear" in args:
        values["add_bias_linear"] = not args["disable_bias_linear"]
    if args.get("use_rotary_position_embeddings"):
        values["position_embedding_type"] = "rope"
    elif args.get("add_position_embedding") is False and "position_embedding_type" not in values:
        values["position_embedding_type"] = "none"


def _plain(name: str, value: Any, where: str) -> Any:
    """Returns a value of a type that ModelConfig may have. Lists become tuples."""
    if isinstance(value, (list, tuple)) and len(value) <= MOST_LAYERS:
        value = tuple(value)
        if all(type(one) in (int, bool) for one in value):
            return tuple(int(one) for one in value)
    if name == "rotary_base" and type(value) is float and value.is_integer():
        value = int(value)
    most = MOST_LAYERS if name == "num_layers" else MOST_ELEMENTS
    # NaN and infinity are not at most a size either.
    if type(value) in (bool, str) or (type(value) in (int, float) and abs(value) <= most):
        return value
    raise InputError(f"{where}: {name} of its args has a value of no model ({_text(value)})")


def _text(value: Any) -> str:
    # The repr of a list may be endless: a list may contain itself.
    if type(value) in SCALARS:
        return quoted(value)
    return value.kind if isinstance(value, PickledObject) else f"a {type(value).__name__}"
