"""The flags of Megatron-LM, of all its releases, that set no field here, and what becomes of each.

megatron_flags.json has them by the reason: those that are refused, since they would change numbers
or promise something that the user would miss; those that have no effect, also without the feature
that they belong to; those that have one legal value; and old spellings. A name there that ends with
"=" takes a value, and one that ends with "=*" takes several. Rows with "whose" are of forks of
Megatron-LM and of launchers; "by value" has the flags of forks that are other flags here, by their
value. This module is the only reader of the file.

Other ways to say a setting are replaced by the fields of the configuration. The command line is
parsed into {field: value} first. OTHER_WAYS has the flags without a field, by topic; a field's own
other values are in its `megatron` (setting.py). Each function here replaces what has no field, and
returns notices for the user.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lite.config.checks import InputError, flag
from megatron_lite.config.data_settings import TokenizerConfig
from megatron_lite.config.model import NORM_VECTORS, ModelConfig
from megatron_lite.config.parallel import ParallelConfig, no_flash_across_ranks
from megatron_lite.config.plain import parse_json, parse_whole_number
from megatron_lite.config.setting import Setting, settings_of
from megatron_lite.config.training import TrainingConfig

DATA = parse_json(Path(__file__).with_name("megatron_flags.json").read_text())
REFUSED: Mapping[str, str] = {
    flag: row["reason"] for row in DATA["refused"] for flag in row["flags"]
}
# The rest of the sentence that begins with "--flag has no effect".
NO_EFFECT: Mapping[str, str] = {
    name.partition("=")[0]: row["reason"] for row in DATA["no effect"] for name in row["flags"]
}
# Flags that allow only this value, which is what the program does anyway. Any other is refused.
ONLY_VALUE: Mapping[str, str] = DATA["only value"]
RENAMED: Mapping[str, str] = DATA["renamed"]
# What each value of a flag is here. Any other value is refused.
BY_VALUE: Mapping[str, Mapping[str, str]] = DATA["by value"]
# The fork that a flag belongs to, if it is not Megatron-LM's own.
WHOSE: Mapping[str, str] = {
    name.partition("=")[0]: row["whose"]
    for row in (*DATA["refused"], *DATA["no effect"])
    if "whose" in row
    for name in row["flags"]
}
# The fields of configurations stored by version 0.1 that have no effect any more.
RETIRED_FIELDS = frozenset(DATA["retired fields"])
# With more ignored flags than this, one line names all of them, without the reasons.
MOST_REASONS = 3
NEGATIONS = {"no", "not", "disable", "without"}  # a flag with another of these means another thing


def add_flags_without_effect(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that are accepted and ignored, and the flags that allow only one value.

    Each is stored under its own spelling with the dashes, which no field has. `take_ignored` and
    `check_only_values` find it by this name.
    """
    names = [name for row in DATA["no effect"] for name in row["flags"]]
    for name in [*names, *(f"{only}=" for only in ONLY_VALUE)]:
        name, equals, several = name.partition("=")
        options: Any = dict(nargs=several or None) if equals else dict(action="store_true")
        parser.add_argument(name, dest=name, help=argparse.SUPPRESS, **options)


def renamed_words(argv: Sequence[str], parsed: Iterable[str]) -> tuple[list[str], list[str]]:
    """Returns `argv` with old spellings replaced, and a notice for each flag replaced.

    parsed: the flags of the parser. Underscores in the name of a flag are replaced by dashes,
    unless it is a known flag as it stands.
    """
    renamed, notices = [], []
    known = {*parsed, *RENAMED, *BY_VALUE, *REFUSED}
    words = deque(argv)
    while words:
        name, equals, value = words.popleft().partition("=")
        if name.startswith("--") and name not in known and name.replace("_", "-") in known:
            name = name.replace("_", "-")
        if name in BY_VALUE:
            while not equals and words and not words[0].startswith("--"):
                value = f"{value} {words.popleft()}".strip()
            read_as = BY_VALUE[name].get(value)
            if read_as is None:
                renamed.append(f"{name}={value}")  # no flag of the parser takes it
                continue
            renamed += read_as.split()
            notices.append(f"{name} {value} is read as {read_as or 'what happens here anyway'}")
            continue
        if name in RENAMED:
            notices.append(f"{name} is an old spelling, read as {RENAMED[name]}")
            # The last word takes the value of the old flag. The words before it are complete.
            *added, name = RENAMED[name].split()
            renamed += added
        renamed.append(name + equals + value)
    return renamed, notices


def check_only_values(given: dict[str, Any]) -> None:
    """Removes the flags that allow only one value. Raises InputError for another; 1.0 is 1."""
    for name, only in ONLY_VALUE.items():
        value = given.pop(name, None) or only
        if value not in (only, f"{only}.0"):
            raise InputError(
                f"Megatron's {name} {value} is not supported here, only {only}: {REFUSED[name]}"
            )


def take_ignored(given: dict[str, Any]) -> list[str]:
    """Removes the flags without effect, and returns notices about them: a line for each, or one
    line for many."""
    found = [flag for flag in NO_EFFECT if given.pop(flag, None)]
    if len(found) > MOST_REASONS:
        return [
            f"{len(found)} flags have no effect here (--help ignored has the reasons): "
            + ", ".join(found)
        ]
    return [f"{flag} has no effect {NO_EFFECT[flag]}" for flag in found]


def unread_faults(unread: Sequence[str], supported: Sequence[str]) -> list[str]:
    """Returns the faults of the words that no flag of the parser takes.

    Refused flags with one reason share a fault. The values of an unknown flag are no faults.
    """
    names = {word.partition("=")[0]: word for word in unread if word.startswith("--")}
    refused: dict[tuple[str, str], list[str]] = {}
    faults = []
    for name, word in names.items():
        if name in REFUSED:
            owner = WHOSE.get(name, "Megatron")
            refused.setdefault((owner, REFUSED[name]), []).append(name)
        elif name in BY_VALUE:
            faults.append(
                f"{word.replace('=', ' ', 1)} is not supported here, only "
                + " or ".join(BY_VALUE[name])
            )
        else:
            faults.append(f"unknown flag {name}: {advice(name, supported)}")
    for (owner, reason), flags in refused.items():
        are = "is" if len(flags) == 1 else "are"
        faults.append(f"{owner}'s {', '.join(flags)} {are} not supported here: {reason}")
    if unread and not names:
        faults = [f"{unread[0]!r} follows no flag that takes it"]
    return faults


def advice(name: str, supported: Iterable[str]) -> str:
    """Returns what to do about an unknown flag."""
    closest = closest_flag(name, supported, NO_EFFECT)
    return f"did you mean {closest}?" if closest else "--help lists the flags"


def listed(kind: str) -> list[tuple[str, list[str]]]:
    """Returns the reasons of the flags that are "refused" or "ignored", each with its flags."""
    key, said = ("no effect", "no effect ") if kind == "ignored" else (kind, "")
    found = [
        (said + row["reason"], [name.partition("=")[0] for name in row["flags"]])
        for row in DATA[key]
    ]
    only = [f"{flag} {value}" for flag, value in ONLY_VALUE.items()]
    return found + [("accepted with this value:", only)] * (kind == "refused")


def fate_of(word: str, value: str = "") -> str | None:
    """Returns one line on a flag of Megatron that this program renames, refuses or ignores.

    word: the flag in lower case, with or without its two dashes. value: its value, if it is known.
    Returns None for any other word, and for a flag whose one legal value this is.
    """
    flag = word if word.startswith("--") else f"--{word}"
    if flag in RENAMED:
        return f"{flag} is an old spelling of {RENAMED[flag]}"
    if flag in BY_VALUE:
        known = ", ".join(f"{value}: {read or 'as here'}" for value, read in BY_VALUE[flag].items())
        if value and value not in BY_VALUE[flag]:
            return f"{flag} {value} is refused: it is read by its value ({known})"
        return f"{flag} is read by its value ({known})"
    if value and ONLY_VALUE.get(flag) == value:
        return None
    if flag in NO_EFFECT:
        return f"{flag} is accepted and has no effect {NO_EFFECT[flag]}"
    return f"{flag} is refused: {REFUSED[flag]}" if flag in REFUSED else None


def closest_flag(name: str, supported: Iterable[str], others: Iterable[str] = ()) -> str | None:
    """Returns the known flag that `name` was probably meant to be, or None if none is near.

    The order is: the flag of this name in other programs, then `supported`, then `others`.
    """
    supported = list(supported)
    other = DATA["other programs"].get(name.replace("_", "-"))
    if other in supported:
        return str(other)
    for known in (supported, others):
        for near in difflib.get_close_matches(name, known, n=1, cutoff=0.84):
            if _meaning(near) == _meaning(name):
                return near
    return None


def _meaning(flag: str) -> tuple[str, set[str]]:
    """Returns the digits and the negations of a flag: near spellings may differ in them."""
    return re.sub(r"\D", "", flag), NEGATIONS & {*flag.strip("-").split("-")}


Given = dict[str, Any]

# What Megatron's own FSDP shares out, as the switch that shares it out here.
SHARDING_STRATEGIES = {
    "no_shard": None,
    "optim": "use_distributed_optimizer",
    "optim_grads": "use_distributed_optimizer",
    "optim_grads_params": "use_torch_fsdp2",
}
STRATEGY = Setting(
    "what --use-megatron-fsdp shares out (default: no_shard)", choices=tuple(SHARDING_STRATEGIES)
)
# The switches that count the embedding or the loss as a layer, with the field of each.
ACCOUNTED = {
    "account_for_embedding_in_pipeline_split": "decoder_first_pipeline_num_layers",
    "account_for_loss_in_pipeline_split": "decoder_last_pipeline_num_layers",
}
# Lengths in tokens, as Megatron-DeepSpeed has them.
TOKENS = {
    f"{name}_tokens": Setting(f"{text}, in tokens of whole samples", parse=parse_whole_number)
    for name, text in {
        "train": "length of the run, at most",
        "lr_decay": "length of the decay of the learning rate",
        "lr_warmup": "length of its warmup",
    }.items()
}
# Numbers of MindSpeed's models, which are other numbers here.
SCALES = {
    "input_embeds_norm": Setting("--embedding-multiplier of the root of --hidden-size"),
    "query_pre_attn_scalar": Setting(
        "--softmax-scale of 1 / the root of this number", parse=parse_whole_number
    ),
    "scale_depth": Setting("--residual-multiplier of this / the root of --num-layers", parse=float),
    "dim_model_base": Setting("--logits-scaling of --hidden-size / this", parse=parse_whole_number),
}
OTHER_WAYS = {
    "model": {
        **SCALES,
        "first_k_dense_replace": Setting(
            "layers without experts before those of --moe-layer-freq", parse=parse_whole_number
        ),
        "use_rotary_position_embeddings": Setting("the same as --position-embedding-type rope"),
        "no_position_embedding": Setting(
            "--position-embedding-type none, unless rope is chosen: then nothing"
        ),
    },
    "parallel": {
        "num_layer_list": Setting("layers of each pipeline stage, with commas between", parse=str),
        **{
            name: Setting(f"one layer less on the {rank} pipeline rank than on the others")
            for name, rank in zip(ACCOUNTED, ("first", "last"), strict=True)
        },
    },
    "data_parallel": {
        "deepspeed_config": Setting(
            "a JSON file of DeepSpeed: batch sizes, precision, clipping and ZeRO's stage", parse=str
        ),
        "use_megatron_fsdp": Setting(
            "the same as --use-torch-fsdp2 or --use-distributed-optimizer, by the sharding strategy"
        ),
        "data_parallel_sharding_strategy": STRATEGY,
    },
    "training": {"no_bf16": Setting("train a --model in float32"), **TOKENS},
}


def translate_values(given: Given, *, has_file: bool) -> list[str]:
    """Replaces Megatron's other ways to say a setting in `given`. Returns notices about them.

    has_file: whether a file supplies the values of flags that are not given.
    Raises ValueError for flags that contradict each other.
    """
    steps = (_other_values, _position_embedding, _no_bf16, _megatron_fsdp)
    notices = [*_of_forks(given), *_cp_comm_type(given, has_file=has_file)]
    notices += (notice for step in steps for notice in step(given))
    notices += _accounted_layers(given, has_file=has_file)
    return notices + ([] if has_file else _context_parallel_attention(given))


def _of_forks(given: Given) -> list[str]:
    """Replaces what forks of Megatron-LM have, which is rarely given, so that it loads late."""
    names = ("deepspeed_config", "first_k_dense_replace", "num_layer_list", *TOKENS, *SCALES)
    if given.keys().isdisjoint(names):
        return []
    from megatron_lite.config.fork_values import translate_forks

    return translate_forks(given, TOKENS)


def _other_values(given: Given) -> Iterator[str]:
    """Replaces values of Megatron and of its forks, which write the names of norms in any case."""
    if given.get("tokenizer_type") == "TokenizerFromFileWithFIM" and given.get("fim_rate"):
        names = ("prefix", "middle", "suffix", "pad")
        tokens = {f"fim_{name}_token": f"<fim-{name}>" for name in names}
        given.update({"fim_data": True, **tokens, **given})
        yield "--tokenizer-type TokenizerFromFileWithFIM with --fim-rate is read as --fim-data"
    norms = {known.lower(): known for known in NORM_VECTORS}
    of_megatron = {
        field: settings_of(topic)[field].megatron
        for topic, field in (
            (ModelConfig, "attention_backend"),
            (TrainingConfig, "cuda_graph_impl"),
            (TokenizerConfig, "tokenizer_type"),
            (ParallelConfig, "moe_token_dispatcher_type"),
        )
    }
    for field, read_as in (
        *((field, values.get(str(given.get(field)))) for field, values in of_megatron.items()),
        ("normalization", norms.get(str(given.get("normalization")).lower())),
    ):
        if read_as not in (None, given.get(field)):
            yield f"{flag(field)} {given[field]} is read as {read_as}"
            given[field] = read_as
    if (iters := given.get("eval_iters", 0)) < 0:
        given["eval_iters"] = 0
        yield f"--eval-iters {iters} is read as 0: nothing is evaluated"
    is_sigmoid = given.get("moe_router_score_function") == "sigmoid"
    if is_sigmoid and given.pop("moe_router_pre_softmax", False):
        yield "--moe-router-pre-softmax has no effect with --moe-router-score-function sigmoid"
    if given.get("loss_scale") == 0:
        del given["loss_scale"]
        yield "--loss-scale 0 is read as a dynamic scale"


def _cp_comm_type(given: Given, *, has_file: bool) -> Iterator[str]:
    kinds = given.pop("cp_comm_type", [])
    others = settings_of(ParallelConfig)["cp_comm_type"].megatron
    alone = given.get("context_parallel_size", 1 + has_file) == 1  # no ranks exchange anything
    parts = given.get("tensor_model_parallel_size", 1) * given.get("context_parallel_size", 1)
    groups = given.get("num_query_groups") or given.get("num_attention_heads", 0)
    # MindSpeed repeats keys and values where there are too few for the ranks
    others = {**others, "ulysses": "p2p" if parts and groups % parts else "a2a"}
    read = [others.get(kind, kind) for kind in kinds]
    if alone:
        read = ["p2p" if kind == "a2a" else kind for kind in read]
    if kinds:
        given["cp_comm_type"] = read[0] if len({*read}) == 1 else tuple(read)
    for kind, read_as in sorted({*zip(kinds, read, strict=True)}):
        if ("a2a" in kind or kind == "ulysses") and read_as == "p2p":
            yield (
                f"--cp-comm-type {kind} is read as {read_as}: each rank keeps its heads here, "
                "which changes the result by rounding at most"
            )


def _position_embedding(given: Given) -> Iterator[str]:
    """Replaces the two switches for a position embedding by the field.

    Raises ValueError if they contradict --position-embedding-type.
    """
    for switch, kinds in (
        ("use_rotary_position_embeddings", ("rope",)),
        ("no_position_embedding", ("none", "rope")),
    ):
        if given.pop(switch, False):
            kind = given.setdefault("position_embedding_type", kinds[0])
            if kind not in kinds:
                raise InputError(
                    f"{flag(switch)} contradicts --position-embedding-type {kind}: leave one out"
                )
            if switch == "no_position_embedding":
                yield f"{flag(switch)} is an old flag, read as --position-embedding-type {kind}"


def _no_bf16(given: Given) -> tuple[str, ...]:
    """Replaces --no-bf16 by the field, which a known model would turn on."""
    if given.pop("no_bf16", False) and given.setdefault("bf16", False):
        raise InputError("--no-bf16 contradicts --bf16: leave one out")
    return ()


def _megatron_fsdp(given: Given) -> Iterator[str]:
    """Replaces Megatron's own FSDP by the switch that shares out the same here."""
    is_used = given.pop("use_megatron_fsdp", False)
    strategy = given.pop("data_parallel_sharding_strategy", None)
    if not is_used:
        if strategy is not None:
            yield "--data-parallel-sharding-strategy has no effect without --use-megatron-fsdp"
        return
    strategy = strategy or "no_shard"
    said = f"--use-megatron-fsdp with {strategy}"
    fault = STRATEGY.fault(flag("data_parallel_sharding_strategy"), strategy)
    if fault is not None:
        raise InputError(fault)
    field = SHARDING_STRATEGIES[strategy]
    if field is None:
        yield f"{said} has no effect: it shares out nothing"
        return
    if field == "use_torch_fsdp2":
        given.pop("use_distributed_optimizer", None)
        given.pop("overlap_param_gather", None)
    given[field] = True
    yield f"{said} is read as {flag(field)}, which gives the same results"


def _accounted_layers(given: Given, *, has_file: bool) -> Iterator[str]:
    """Replaces the switches that count the embedding or the loss as a layer of the pipeline.

    The first, or the last, pipeline rank then has one layer less than the others. The command line
    must have both numbers that this needs: a file is read later.
    """
    counted = [name for name in ACCOUNTED if given.pop(name, False)]
    size, layers = given.get("pipeline_model_parallel_size", 1), given.get("num_layers")
    said = " and ".join(map(flag, counted))
    if counted and has_file and not {"num_layers", "pipeline_model_parallel_size"} <= given.keys():
        raise InputError(
            f"{said} needs --num-layers and --pipeline-model-parallel-size on the command line, "
            "not in a file: give both, or --decoder-first-pipeline-num-layers and "
            "--decoder-last-pipeline-num-layers instead"
        )
    if not counted or layers is None:
        return  # a missing --num-layers is an error of its own
    if size == 1:
        yield f"{said}: no effect at --pipeline-model-parallel-size 1"
        return
    if (layers + len(counted)) % size:
        raise InputError(
            f"{said}: --num-layers {layers} and {len(counted)} more are not divisible by "
            f"--pipeline-model-parallel-size {size}"
        )
    virtual = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    if any((given.get(name) or 1) > 1 for name in virtual):
        per_stage, per_rank = (given.pop(name, None) for name in virtual)
        layout = _accounted_layout(counted, layers, size, per_stage, per_rank)
        given["pipeline_model_parallel_layout"] = layout
        yield f"{said}: --pipeline-model-parallel-layout '{layout}'"
        return
    number = (layers + len(counted)) // size - 1
    for name in counted:
        field = ACCOUNTED[name]
        given[field] = number
        yield f"{flag(name)}: {flag(field)} {number}"


def _accounted_layout(
    counted: list[str], layers: int, size: int, per_stage: int | None, per_rank: int | None
) -> str:
    """Returns the layout of virtual stages, the first or last of which has one layer less."""
    whole = layers + len(counted)
    number = per_stage or whole // (size * (per_rank or 1))
    if number < 1 or whole % (number * size) or (per_rank and whole != number * size * per_rank):
        raise InputError(
            f"{' and '.join(map(flag, counted))}: --num-layers {layers} and {len(counted)} more do "
            f"not divide into equal virtual stages on {size} ranks: give other numbers"
        )
    stages = ["t" * number] * (whole // number)
    first, last = (name in counted for name in ACCOUNTED)
    stages[0] = f"E{stages[0][first:]}"
    stages[-1] = f"{stages[-1][last:]}L"
    return "|".join(stages)


def _context_parallel_attention(given: Given) -> list[str]:
    """Chooses unfused attention where context parallelism has no other for the run."""
    reason = no_flash_across_ranks(
        given.get("attention_dropout", ModelConfig.attention_dropout),
        bool(given.get("reset_attention_mask")),
    )
    is_free = given.get("attention_backend", "auto") == "auto"
    size, is_a2a = given.get("context_parallel_size", 1), given.get("cp_comm_type") == "a2a"
    if size == 1 or is_a2a or not is_free or reason is None:
        return []
    given["attention_backend"] = "unfused"
    return [
        f"--attention-backend auto is unfused: context-parallel ranks have no flash attention with "
        f"{reason}, and unfused attention builds the scores"
    ]
