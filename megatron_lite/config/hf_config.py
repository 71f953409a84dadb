"""Maps a Hugging Face config.json to the fields of ModelConfig, and back.

A value that has no counterpart raises ValueError with the reason. Keys that change no size become
notes.

families.json has the families that map exactly as data, and those that cannot, with the reason.
Each family has the `keys` that become fields, the keys of which `only` some values can be mapped
(an exported config has the last one), the `fields` that all members have in common, the `rules` for
facts that are not one key (classes of hf_rules.py and hf_rotary.py, each with its arguments), and
the names of its weights, each by the name of the module here:

    base     the prefix of all tensors but those of the head; files of a model that was saved
             without its head lack it
    head     the module of the untied output weight
    outer    the modules outside of a layer, without the base
    layers   the place of a layer below the base
    layer    its modules; {"theirs": [..], "layout": ..} for several modules, or for a layout of
             convert/hf.py. A * stands for the number of an expert. A parameter that is not the
             weight or bias of a module stands with its whole name

A key has the field, its type, the default that transformers takes if it is missing (none: it must
be there) and, if it differs, for null. `inverted`: the field is the opposite of the key. `values`:
the field's value for each of the key's. `power`: the field is that power of the key. `written`: the
property of the model that is written for the field. Keys of one field must have one value. A family
that is `like` another one names what differs; null takes an entry out. `also` has values without
which transformers does not open an export, and which say nothing about the model. The heads of a
`square` family have hidden_size channels in all, as where no key has those of a head.
"""

from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from . import hf_rotary, hf_rules
from .checks import (
    InputError,
    Values,
    as_object,
    as_whole,
    flag,
    input_faults,
    parse_json,
    quoted,
    shown,
)
from .hf_rotary import LENGTH, OF_RULE
from .hf_rules import MOST_SIZE, REQUIRED, Config
from .input_file import read_json
from .known_models import KnownModel
from .model import SWITCHED_ACTIVATIONS, ModelConfig

DATA = parse_json(Path(__file__).with_name("families.json").read_text())


def _family(row: Values) -> Values:
    base = _family(DATA["families"][row["like"]]) if "like" in row else {}
    whole = {**base, **row}
    for name, part in row.items():
        if isinstance(part, dict):
            merged = {**base.get(name, {}), **part}
            whole[name] = {key: value for key, value in merged.items() if value is not None}
    return whole


FAMILIES = {name: _family(row) for name, row in DATA["families"].items()}
REASONS = {name: reason for reason, names in DATA["refused"].items() for name in names.split()}
CONFIG = "config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
LEAST = 1e-9  # of a number that is raised to a power
MOST_IDS = 64  # of one key: some models have several ends of a text
# Keys that say nothing about the model, besides those that begin with _.
NEUTRAL = frozenset(DATA["neutral"])
# Fields that say how a run trains or computes, and fields that have several values for the same
# model: the meaning of these is compared instead.
NOT_COMPARED = frozenset(DATA["not compared"])
TYPES = {"int": int, "float": float, "bool": bool, "str": str}
RULES = vars(hf_rules) | vars(hf_rotary)


def read_hf_file(path: Path) -> KnownModel:
    """Returns the model that a config.json, or the one in a folder, describes.

    Raises InputError, which names the file, if it cannot be read or does not map.
    """
    file = path / CONFIG if path.is_dir() else path
    if not path.exists():
        raise InputError(
            f"{path}: cannot be read (No such file or directory). Give a config.json on this "
            "machine, or the folder that has it; nothing is downloaded (from the Hub: hf download "
            f"NAME {CONFIG} --local-dir FOLDER)"
        )
    try:
        with input_faults(f"{file}: "):
            return from_hf(read_json(file, strict=False))
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from error


def from_hf(config: Any) -> KnownModel:
    """Returns the model that a parsed config.json describes.

    Raises ValueError if the model_type is not known, if a key is missing or has the wrong type, or
    if a value has no counterpart.
    """
    name = as_object(config, "a config.json").get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        reason = REASONS.get(str(name))
        near = get_close_matches(str(name), FAMILIES, 1) if not reason else ()
        raise ValueError(
            f"model_type {quoted(name)} has no counterpart here{f' ({reason})' if reason else ''}, "
            f"only {', '.join(FAMILIES)}{f'; the nearest is {near[0]}' if near else ''}"
        )
    family, reader = FAMILIES[name], Config(config)
    fields, given = dict(family["fields"]), dict[str, tuple[str, Any]]()
    for key, row in family["keys"].items():
        fields[row["field"]] = value = _field_of(reader, key, row)
        first, other = given.setdefault(row["field"], (key, value))
        if other != value:
            raise ValueError(f"{first} {other} with {key} {value}: both are {flag(row['field'])}")
    for key, only in family["only"].items():
        value = reader.get(key)
        # transformers reads null as false, and a missing key as its default
        is_false = value is None and key in config and True in only["values"]
        if is_false or value not in only["values"]:
            raise ValueError(f"{key} {quoted(value)} has no counterpart: {only['reason']}")
    vocab_size = as_whole(reader.get("vocab_size"), "vocab_size", 1, MOST_SIZE)
    hidden = as_whole(fields["hidden_size"], "hidden_size", 1, MOST_SIZE)
    size = fields.get("kv_channels", reader.value("head_dim", int, None))
    heads = fields["num_attention_heads"]
    is_square = family.get("square", {"kv_channels", "kv_lora_rank"}.isdisjoint(fields))
    if is_square and size is not None and size * heads != hidden:
        raise ValueError(
            f"head_dim {size} has no counterpart: a head of this family has {hidden} / {heads} "
            "channels"
        )
    for rule in _rules(family):
        rule.read(reader, fields)
    if fields.get("moe_router_score_function") == "sigmoid" and fields["moe_router_topk"] == 1:
        raise ValueError(
            "num_experts_per_tok 1 has no counterpart: transformers divides the score of one "
            "expert by itself, and a router here keeps it"
        )
    if all(fields.get("no_rope_freq", (0,))):
        raise ValueError(
            "no layer has a rotary embedding, by no_rope_layers, or by layer_types without "
            "sliding_attention under a sliding_window: correct them, or set sliding_window to null "
            "where the family may have none"
        )
    unread = [
        str(key) for key in config if key not in reader.seen | NEUTRAL and str(key)[:1] != "_"
    ]
    notes = [f"keys that are not read: {shown(', '.join(unread))}"] if unread else []
    token_ids = token_ids_of(config)
    notes += [
        f"{key} {quoted(value)} lies beyond the vocabulary of {vocab_size} ids"
        for key, value in token_ids.items()
        if any(one >= vocab_size for one in _ids(value))
    ]
    inexact = tuple(reader.inexact)
    return KnownModel(fields, vocab_size, name, inexact, (*inexact, *notes), token_ids)


def _field_of(reader: Config, key: str, row: Values) -> Any:
    """Returns the value of the field that a key gives."""
    null = {"null": row["null"]} if "null" in row else {}
    value = reader.value(key, TYPES[row["type"]], row.get("default", REQUIRED), **null)
    if "power" in row:
        if value < LEAST:
            raise ValueError(f"{key} must be at least {LEAST} (got {value})")
        return value ** row["power"]
    if "values" not in row:
        return not value if row.get("inverted") else value
    if value not in row["values"]:
        raise ValueError(
            f"{key} {quoted(value)} has no counterpart: only {', '.join(row['values'])}"
        )
    return row["values"][value]


def _rules(family: Values) -> list[Any]:
    return [RULES[name](**facts) for name, facts in family["rules"]]


def _ids(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def token_ids_of(config: Values) -> Values:
    """Returns the ids of special tokens that a config has: each a number, a list of them or null.

    Raises ValueError for any other value.
    """
    found = {key: config[key] for key in TOKEN_IDS if key in config}
    for key, value in found.items():
        ids = _ids(value)
        if len(ids) > MOST_IDS:
            raise ValueError(f"{key} must have at most {MOST_IDS} ids (got {len(ids)})")
        for one in ids:
            as_whole(one, key, -1, 2**31 - 1)  # -1: some configs say "none" so
    return found


def to_hf(model: ModelConfig, vocab_size: int, family: str | None = None) -> Values:
    """Returns the config.json of a family that expresses the model exactly.

    The keys are read back by `from_hf`, and the result must mean the same model.

    family: a model_type; None: the first family that expresses the model.
    Raises ValueError with the reason if the family, or every family, does not.
    """
    if family is not None and family not in FAMILIES:
        raise ValueError(f"--hf-family {family} is not known, only {', '.join(FAMILIES)}")
    for name in FAMILIES if family is None else (family,):
        config = _written(model, vocab_size, name)
        differences = _differences(model, config)
        if not differences:
            return config
    if family is not None:
        raise ValueError(f"--hf-family {family} does not express this model: {differences}")
    raise ValueError(
        "no family of Hugging Face that is known here expresses this model exactly: --hf-family "
        f"NAME tells what differs in one of {', '.join(FAMILIES)}"
    )


def _written(model: ModelConfig, vocab_size: int, name: str) -> Values:
    family = FAMILIES[name]
    config: Values = {"model_type": name, "architectures": [family["architecture"]]}
    config |= family.get("also", {})
    for key, row in family["keys"].items():
        value = getattr(model, row.get("written", row["field"]))
        if "power" in row:
            value = value ** (1 / row["power"])
            value = round(value) if row["type"] == "int" else value
        if "values" in row:
            value = next(theirs for theirs, ours in row["values"].items() if ours == value)
        config[key] = not value if row.get("inverted") else value
    only = ((key, row["values"][-1]) for key, row in family["only"].items())
    config |= {key: value for key, value in only if value is not None}
    for rule in _rules(family):
        config |= rule.write(model)
    return {**config, "vocab_size": vocab_size, "initializer_range": model.init_method_std}


def _differences(model: ModelConfig, config: Values) -> str:
    """Returns where the config of a family differs from a model, in words."""
    try:
        mapped = from_hf(config)
        ours, theirs = meaning_of(model), meaning_of(ModelConfig(**mapped.fields))
    except ValueError as error:
        return str(error)
    differing = [
        f"{name} is {shown(str(ours[name]))} here and {shown(str(theirs[name]))} there"
        for name in ours
        if ours[name] != theirs[name]
    ]
    return ", ".join([*mapped.inexact, *differing])


def meaning_of(model: ModelConfig) -> Values:
    """Returns what the model computes, by names for messages. Equal models have equal meanings.

    What can be said in several ways, such as which layers have a window, is said layer by layer.
    """
    layers = range(model.num_layers)
    have_experts = [model.layer_has_experts(layer) for layer in layers]
    rotates, of_rule = model.rotates, list[str]()
    if model.rope_type != "rope":
        of_rule = ["rotary_scaling_factor", LENGTH, *OF_RULE[model.rope_type or ""]]
    has_gelu = not any(getattr(model, name) for name in SWITCHED_ACTIVATIONS)
    return {
        **{name: value for name, value in asdict(model).items() if name not in NOT_COMPARED},
        "ffn_hidden_size": not all(have_experts) and model.ffn_size,
        "moe_ffn_hidden_size": any(have_experts) and model.expert_size,
        "experts of each layer": have_experts,
        "choice by Sinkhorn": any(have_experts) and model.chooses_by_sinkhorn,
        "query groups": model.query_groups,
        "scale of the scores": model.attention_scale,
        "bias of the projection": model.has_proj_bias,
        "tanh formula of GELU": has_gelu and model.bias_gelu_fusion,
        "bias of queries, keys and values": model.add_bias_linear or model.add_qkv_bias,
        "window of each layer": [model.layer_window(layer) for layer in layers],
        "rotation of each layer": [model.layer_rotates(layer) for layer in layers],
        "rotary embedding": rotates
        and (
            model.rotary_base,
            model.rotary_dim,
            model.rotary_seq_len_interpolation_factor,
            model.use_rope_scaling and model.rope_scaling_factor,
            model.rope_type,
            model.rotary_magnitude,
            *(getattr(model, name) for name in of_rule),
        ),
    }
