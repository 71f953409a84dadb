"""The `args` of a Megatron checkpoint: the model, the vocabulary and the progress, both ways."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

from megatron_lite.checkpointing.metadata import MOST_SAMPLES, Progress
from megatron_lite.checkpointing.shards import MOST_ELEMENTS
from megatron_lite.checkpointing.step_files import MOST_ITERATIONS
from megatron_lite.config.checks import InputError
from megatron_lite.config.model import SWITCHED_ACTIVATIONS, ModelConfig
from megatron_lite.config.plain import MOST_LAYERS, quoted
from megatron_lite.convert.megatron.pickles import PickledObject
from megatron_lite.convert.weights import Described

MODEL_FIELDS = {field.name: field for field in fields(ModelConfig)}
# They change how a layer is computed, not what: the converted model has this project's defaults.
NOT_TAKEN = frozenset(("attention_backend", "norm_impl"))
# Fields that Megatron-LM has no argument for, with the only value that its models have.
ONLY_HERE = {"parallel_residual": False, "norm_position": "before", "qk_layernorm_scope": "head"}
SHARED = [name for name in MODEL_FIELDS if name not in NOT_TAKEN and name not in ONLY_HERE]
# Spellings of older releases. The newer one is read first.
OLDER_NAMES = {"norm_epsilon": "layernorm_epsilon", "max_position_embeddings": "seq_length"}
# Arguments that must be off, by the reason. One that ModelConfig has as a field is read as that
# field, and has no effect here.
REASONS = {
    "mixture-of-experts layers are not built": ("num_experts",),
    "multi-latent attention is not built": ("multi_latent_attention", "rotary_scaling_factor"),
    "multi-token prediction is not built": ("mtp_num_layers",),
    "state-space layers are not built": ("hybrid_layer_pattern", "hybrid_override_pattern"),
    "all layers have the same sizes": (
        "heterogeneous_layers_config_path",
        "heterogeneous_layers_config_encoded_json",
    ),
    "its norms multiply by 1 + weight": ("apply_layernorm_1p", "layernorm_zero_centered_gamma"),
    "the residual stream goes around the norm": ("apply_residual_connection_post_layernorm",),
    "rotation pairs the two halves of a head": ("rotary_interleaved",),
    "the activation is not built": (
        *("quick_geglu", "glu_linear_offset", "activation_func_clamp_value", "onnx_safe"),
    ),
    "the attention is not built": ("attention_output_gate", "experimental_attention_variant"),
    "queries and keys have no L2 norm": ("qk_l2_norm",),
    "the softmax has no sink": ("softmax_type",),
    "retrieval is not built": ("retro_add_retriever",),
}
# Further values with which the model is the one of this project.
NEUTRAL = {"num_experts": (1,), "rotary_scaling_factor": (1, 40), "softmax_type": ("vanilla",)}
VOCAB_MULTIPLE = 128  # --make-vocab-size-divisible-by, its default in Megatron-LM
ADAM, MASTER = ("exp_avg", "exp_avg_sq"), "master"
# Of Megatron's schedule of the learning rate. The run that loads it takes its own values with
# --override-opt_param-scheduler.
SCHEDULE = (
    *("max_lr", "lr_warmup_steps", "lr_decay_style", "lr_decay_steps", "min_lr", "start_wd"),
    *("end_wd", "wd_incr_style", "wd_incr_steps"),
)


def arguments_of(common: Any, where: object) -> dict[str, Any]:
    """Returns the `args` of a checkpoint's common values. Raises InputError if there are none."""
    found = common.get("args") if isinstance(common, dict) else None
    found = found.fields if isinstance(found, PickledObject) else found
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
    for reason, names in REASONS.items():
        for name in names:
            value = args.get(name)
            is_off = _is_scalar(value) and value in (False, *NEUTRAL.get(name, ()))
            if value is not None and not is_off and name not in MODEL_FIELDS:
                raise InputError(
                    f"{where}: was trained with {name} = {_text(value)}, which cannot be "
                    f"converted: {reason}"
                )
    values: dict[str, Any] = {}
    for name in SHARED:
        value = args.get(name)
        if value is None and name in OLDER_NAMES:
            value = args.get(OLDER_NAMES[name])
        if value is not None:
            values[name] = _plain(name, value, where)
        elif MODEL_FIELDS[name].default is MISSING:
            raise InputError(f"{where}: its args have no {name}, which the model needs")
    # Arguments of older releases have other names and forms.
    if "add_bias_linear" not in values and "disable_bias_linear" in args:
        values["add_bias_linear"] = not args["disable_bias_linear"]
    if args.get("use_rotary_position_embeddings"):
        values["position_embedding_type"] = "rope"
    elif args.get("add_position_embedding") is False:
        values.setdefault("position_embedding_type", "none")
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
    notes = []
    tokenizer, size = args.get("tokenizer_type"), args.get("vocab_size")
    if type(tokenizer) is str and tokenizer != "NullTokenizer":
        notes.append(
            f"the checkpoint does not hold its tokenizer ({quoted(tokenizer)}, "
            f"{_text(args.get('tokenizer_model') or args.get('vocab_file'))}): name it with "
            "--tokenizer-type and its files"
        )
    if type(size) is int and size > 0:
        size += tokenizer == "NullTokenizer"  # its end-of-document id
        if size <= padded:
            return size, tuple(notes)
    notes.append(
        f"the checkpoint does not say how many of its {padded} rows of the vocabulary are "
        "padding: all of them are kept"
    )
    return padded, tuple(notes)


def progress_of(common: Mapping[str, Any], args: Mapping[str, Any], where: str) -> Progress:
    """Returns how far the run had come; zero where the checkpoint does not say.

    Raises InputError for numbers that no run reaches.
    """
    numbers = []
    for name, values, most in (
        ("iteration", common, MOST_ITERATIONS),
        ("consumed_train_samples", args, MOST_SAMPLES),
    ):
        number = values.get(name) or 0
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


def _plain(name: str, value: Any, where: str) -> Any:
    """Returns a value of a type that ModelConfig may have. Lists become tuples."""
    if isinstance(value, (list, tuple)) and all(type(one) in (int, bool) for one in value):
        return tuple(map(int, value))
    if name == "rotary_base" and type(value) is float and value.is_integer():
        value = int(value)
    most = MOST_LAYERS if name == "num_layers" else MOST_ELEMENTS
    # NaN and infinity are not at most a size either.
    if _is_scalar(value) and (type(value) is str or abs(value) <= most):
        return value
    raise InputError(f"{where}: {name} of its args has a value of no model ({_text(value)})")


def _is_scalar(value: Any) -> bool:
    return type(value) in (bool, int, float, str)


def _text(value: Any) -> str:
    # The repr of a list may be endless: a list may contain itself.
    if _is_scalar(value):
        return quoted(value)
    return value.kind if isinstance(value, PickledObject) else f"a {type(value).__name__}"


# --- writing ---


def padded_vocab_size(described: Described, tp_size: int) -> int:
    """Returns the number of rows of the vocabulary that a run of Megatron-LM has by default."""
    multiple = VOCAB_MULTIPLE * tp_size
    return -(-described.true_vocab_size // multiple) * multiple


def newest(described: Described) -> tuple[str, str]:
    """Returns what the pointer names, and its folder: the iteration, or "release" for weights
    alone."""
    if not described.state_keys:
        return "release", "release"
    iteration = described.progress.iteration
    return str(iteration), f"iter_{iteration:07d}"


def common_values(described: Described, *, tp_size: int, pp_size: int) -> dict[str, Any]:
    """Returns the values that are no tensors and belong to no optimizer.

    Without optimizer states the progress is zero, since training starts anew.
    """
    model, states = described.model, described.state_keys
    progress = described.progress if states else Progress()
    values = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(model).items()
        if name in SHARED
    }
    if not model.group_query_attention:
        values["num_query_groups"] = model.num_attention_heads
    args = argparse.Namespace(
        **values,
        seq_length=model.max_position_embeddings,
        tensor_model_parallel_size=tp_size,
        pipeline_model_parallel_size=pp_size,
        virtual_pipeline_model_parallel_size=None,
        num_experts=None,
        tokenizer_type="NullTokenizer",
        vocab_size=described.true_vocab_size - 1,
        padded_vocab_size=padded_vocab_size(described, tp_size),
        make_vocab_size_divisible_by=VOCAB_MULTIPLE,
        consumed_train_samples=progress.consumed_samples,
        consumed_valid_samples=0,
    )
    schedule = {**dict.fromkeys(SCHEDULE), "num_steps": progress.consumed_samples}
    return {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": progress.iteration,
        "num_floating_point_operations_so_far": 0,
        **({"opt_param_scheduler": schedule} if states else {}),
    }


def groups(described: Described) -> list[dict[str, Any]]:
    """Returns the optimizer's groups with and without weight decay, without `params`."""
    return [
        {
            "wd_mult": decay,
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
            "default_config": True,
            "max_lr": None,
            "min_lr": None,
            "step": described.num_updates,
        }
        for decay in (1.0, 0.0)
    ]


def check_exact(described: Described, target: str) -> None:
    """Raises InputError unless Megatron-LM has such a model, and reads the optimizer states."""
    model = described.model
    for name, only in ONLY_HERE.items():
        if getattr(model, name) != only:
            raise InputError(
                f"--to {target}: the model has {name} = {getattr(model, name)}, and every model of "
                f"Megatron-LM has {only}: convert with --to hf"
            )
    has_gelu = not any(getattr(model, name) for name in SWITCHED_ACTIVATIONS)
    if has_gelu and model.bias_gelu_fusion and not model.add_bias_linear:
        # Megatron-LM turns its fused GELU off without a bias, and the unfused one has no tanh.
        raise InputError(
            f"--to {target}: the model has bias_gelu_fusion = True, the tanh formula of GELU, "
            "without biases, and Megatron-LM computes the exact GELU there: train with "
            "--no-bias-gelu-fusion"
        )
    if described.state_keys and set(described.state_keys) - {MASTER} != set(ADAM):
        raise InputError(
            f"--to {target}: the checkpoint holds the optimizer states "
            f"{', '.join(described.state_keys)}, and only those of Adam can be converted. "
            "Export the weights alone with --to hf, or train with --optimizer adam"
        )
