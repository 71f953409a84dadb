"""Maps a Hugging Face config.json to the fields of ModelConfig, and back.

`hf_families.py` holds the families as data. A value that has no counterpart raises ValueError with
the reason. Keys that change no size become notes. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lite.config.checks import InputError, flag
from megatron_lite.config.hf_families import FAMILIES, REASONS
from megatron_lite.config.hf_rules import REQUIRED, value_of
from megatron_lite.config.input_file import read_input_text
from megatron_lite.config.model import SWITCHED_ACTIVATIONS, ModelConfig
from megatron_lite.config.plain import LARGEST_TEXT, as_whole, parse_json, shown


class HfModel(NamedTuple):
    """A mapped model.

    family: its model_type. fields: those of ModelConfig. vocab_size: V, the rows of its embedding.
    inexact: what is left out although it changes results, in words. The sizes are right.
    notes: `inexact`, and what was not read.
    token_ids: the keys TOKEN_IDS that the config has.
    """

    family: str
    fields: dict[str, Any]
    vocab_size: int
    inexact: tuple[str, ...]
    notes: tuple[str, ...]
    token_ids: Mapping[str, Any]


TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
MOST_ID = 2**31 - 1
MOST_IDS = 64  # of one key: some models have several ends of a text
# Keys that say nothing about the model, besides those that begin with _.
NEUTRAL = frozenset(
    (
        *("architectures", "model_type", "torch_dtype", "dtype", "transformers_version"),
        *("use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"),
        *("initializer_range", "output_attentions", "output_hidden_states", "return_dict"),
        *("pretraining_tp", "auto_map", "id2label", "label2id", "task_specific_params"),
        *("summary_activation", "summary_first_dropout", "summary_proj_to_labels"),
        *("summary_type", "summary_use_proj", "n_ctx", "num_labels", "gradient_checkpointing"),
        *("keys_to_ignore_at_inference", "name_or_path", "attn_implementation", "is_decoder"),
        *("vocab_size", "problem_type", "chunk_size_feed_forward", "is_encoder_decoder"),
        *("original_max_position_embeddings", "classifier_dropout", "transformers.js_config"),
        *("max_window_layers", "is_llama_config"),
    )
)
# Fields that say how a run trains or computes, not what the weights mean.
FREE = frozenset(
    (
        *("hidden_dropout", "attention_dropout", "attention_backend", "norm_impl"),
        *("attention_softmax_in_fp32", "fp32_residual_connection", "init_method_std"),
    )
)
# Fields that have several values for the same model: their meaning is compared instead.
BY_MEANING = frozenset(
    (
        *("no_rope_freq", "window_size", "window_attn_skip_freq", "rope_scaling_factor"),
        *("group_query_attention", "num_query_groups", "rotary_base", "rotary_percent"),
        *("use_rope_scaling", "rotary_seq_len_interpolation_factor"),
        *("bias_gelu_fusion", "add_qkv_bias"),
    )
)


def from_hf(config: Any) -> HfModel:
    """Returns the model that a parsed config.json describes.

    Raises ValueError if the model_type is not known, if a key is missing or has the wrong type, or
    if a value has no counterpart.
    """
    if not isinstance(config, Mapping):
        raise ValueError("a config.json is an object")
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        reason = f" ({REASONS[name]})" if isinstance(name, str) and name in REASONS else ""
        raise ValueError(
            f"model_type {shown(repr(name))} has no counterpart here{reason}, only "
            f"{', '.join(FAMILIES)}"
        )
    family = FAMILIES[name]
    fields = dict(family.fields)
    for key, entry in family.keys.items():
        fields[entry.field] = value_of(config, key, entry.kind, entry.default)
    for key, rule in family.only.items():
        if config.get(key) not in rule.values:
            raise ValueError(f"{key} {shown(repr(config[key]))} has no counterpart: {rule.reason}")
    vocab_size = value_of(config, "vocab_size", int, REQUIRED)
    if vocab_size < 1:
        raise ValueError(f"vocab_size must be at least 1 (got {vocab_size})")
    inexact = [note for rule in family.rules for note in rule.read(config, fields)]
    known = {*family.keys, *family.only, *(key for rule in family.rules for key in rule.keys)}
    unread = [
        str(key) for key in config if key not in known | NEUTRAL and not str(key).startswith("_")
    ]
    notes = [f"keys that are not read: {shown(', '.join(unread))}"] if unread else []
    return HfModel(
        name, fields, vocab_size, tuple(inexact), (*inexact, *notes), token_ids_of(config)
    )


def token_ids_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ids of special tokens that a config has: each a number, a list of them or null.

    Raises ValueError for any other value.
    """
    found = {key: config[key] for key in TOKEN_IDS if key in config}
    for key, value in found.items():
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if len(ids) > MOST_IDS:
            raise ValueError(f"{key} must have at most {MOST_IDS} ids (got {len(ids)})")
        for one in ids:
            as_whole(one, key, -1, MOST_ID)  # -1: some configs say "none" so
    return found


def to_hf(model: ModelConfig, vocab_size: int, family: str | None = None) -> dict[str, Any]:
    """Returns the config.json of a family that expresses the model exactly.

    The keys are read back by `from_hf`, and the result must mean the same model.

    family: a model_type; None: the first family that expresses the model.
    Raises ValueError with the reason if the family, or every family, does not.
    """
    if family is not None and family not in FAMILIES:
        raise ValueError(f"--hf-family {family} is not known, only {', '.join(FAMILIES)}")
    differences = {}
    for name in FAMILIES if family is None else (family,):
        config = _written(model, vocab_size, name)
        differences[name] = _differences(model, config)
        if not differences[name]:
            return config
    nearest = min(differences, key=lambda name: len(differences[name]))
    told = ", ".join(differences[nearest])
    if family is not None:
        raise ValueError(f"--hf-family {family} does not express this model: {told}")
    raise ValueError(
        f"no family of Hugging Face that is known here expresses this model; {nearest} comes "
        f"nearest: {told}"
    )


def _written(model: ModelConfig, vocab_size: int, name: str) -> dict[str, Any]:
    family = FAMILIES[name]
    config: dict[str, Any] = {"model_type": name, "architectures": [family.architecture]}
    config |= {key: getattr(model, entry.field) for key, entry in family.keys.items()}
    config |= {
        key: rule.values[-1] for key, rule in family.only.items() if rule.values[-1] is not None
    }
    for rule in family.rules:
        config |= rule.write(model)
    return {**config, "vocab_size": vocab_size, "initializer_range": model.init_method_std}


def _differences(model: ModelConfig, config: Mapping[str, Any]) -> list[str]:
    """Returns in words where the config of a family differs from the model."""
    try:
        mapped = from_hf(config)
        theirs = meaning_of(ModelConfig(**mapped.fields))
    except ValueError as error:
        return [str(error)]
    ours = meaning_of(model)
    return [
        *mapped.inexact,
        *(
            f"{name} is {shown(str(ours[name]))} here and {shown(str(theirs[name]))} there"
            for name in ours
            if ours[name] != theirs[name]
        ),
    ]


def meaning_of(model: ModelConfig) -> dict[str, Any]:
    """Returns what the model computes, by names for messages. Equal models have equal meanings.

    Fields that only say how a run trains are left out. What can be said in several ways, such as
    which layers have a window, is said layer by layer.
    """
    layers = range(model.num_layers)
    rotates = model.positions.rotated
    has_gelu = not any(getattr(model, name) for name in SWITCHED_ACTIVATIONS)
    return {
        **{name: value for name, value in asdict(model).items() if name not in FREE | BY_MEANING},
        "query groups": model.query_groups,
        "tanh formula of GELU": model.bias_gelu_fusion if has_gelu else None,
        "bias of queries, keys and values": model.add_bias_linear or model.add_qkv_bias,
        "window of each layer": [model.layer_window(layer) for layer in layers],
        "rotation of each layer": [model.layer_rotates(layer) for layer in layers],
        "rotary base": model.rotary_base if rotates else None,
        "rotated channels": model.rotary_dim if rotates else None,
        "scaling of the rotary embedding": model.rotary_scaling if rotates else None,
    }


CONFIG = "config.json"


def read_hf_file(path: Path) -> HfModel:
    """Returns the model that a config.json, or the one in a folder, describes.

    Raises InputError, which names the file, if it cannot be read or does not map.
    """
    file = path / CONFIG if path.is_dir() else path
    try:
        return from_hf(parse_json(read_input_text(file, LARGEST_TEXT)))
    except InputError as error:
        advice = "" if path.exists() else _download_advice(path)
        raise InputError(f"{error}{advice}") from error
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise InputError(f"{file}: {error}") from error


def _download_advice(path: Path) -> str:
    """Returns what to do about a path that does not exist and may name a model of the Hub."""
    advice = (
        ". Give a config.json on this machine, or the folder that has it; nothing is downloaded"
    )
    if path.is_absolute() or len(path.parts) != 2:
        return advice
    return f"{advice}. From the Hub it comes with: hf download {path} {CONFIG} --local-dir {path}"


def exact_fields(mapped: HfModel, path: Path) -> dict[str, Any]:
    """Returns the fields of a mapped model. Raises InputError if it does not map exactly."""
    if mapped.inexact:
        raise InputError(f"{path} does not map exactly: {'; '.join(mapped.inexact)}")
    return dict(mapped.fields)


def tokenizer_fields(vocab_size: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the field `vocab_size` that gives the model its V.

    The model keeps all rows of its embedding, of which a tokenizer may use fewer. NullTokenizer, of
    a command line without a tokenizer, adds one id to its size.
    """
    names = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
    kind = given.get("tokenizer_type", "NullTokenizer")
    is_null = kind == "NullTokenizer" and not any(name in given for name in names[1:])
    return {"vocab_size": vocab_size - 1 if is_null else vocab_size}


def override_notices(stored: Mapping[str, Any], given: Mapping[str, Any], source: str) -> list[str]:
    """Returns a line for each given flag that differs from `source`, a flag and its value."""
    return [
        f"{flag(name)} {given[name]} replaces {value} of {source}"
        for name, value in stored.items()
        if name in given and given[name] != value
    ]
