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

import argparse
import difflib
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from .checks import InputError, Values, flag, parse_json
from .model import NORM_VECTORS
from .setting import Setting

DATA = parse_json(Path(__file__).with_name("megatron_flags.json").read_text())


def _of_flags(kind: str, fact: str) -> Values:
    """Returns a fact about each flag of a kind that has it."""
    return {
        name.partition("=")[0]: row[fact]
        for row in DATA[kind]
        if fact in row
        for name in row["flags"]
    }


REFUSED = _of_flags("refused", "reason")
# The fork that a refused flag belongs to, if it is not Megatron-LM's own.
WHOSE = _of_flags("refused", "whose")
# The rest of the sentence that begins with "--flag has no effect".
NO_EFFECT = _of_flags("no effect", "reason")
# The fields beside which a flag without effect would have one.
UNLESS = _of_flags("no effect", "unless")
# Flags that allow only this value, which is what the program does anyway. Any other is refused.
ONLY_VALUE = DATA["only value"]
RENAMED = DATA["renamed"]
# What each value of a flag is here. Any other value is refused.
BY_VALUE = DATA["by value"]
# The fields of configurations stored by version 0.1 that have no effect any more.
RETIRED_FIELDS = frozenset(DATA["retired fields"])
# With more ignored flags than this, one line names all of them, without the reasons.
MOST_REASONS = 3
NEGATIONS = {"no", "not", "disable", "without"}  # a flag with another of these means another thing


def add_flags_without_effect(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that are accepted and ignored, and the flags that allow only one value.

    Each is stored under its own spelling with the dashes, which no field has. `take_ignored` finds
    it by this name.
    """
    names = [name for row in DATA["no effect"] for name in row["flags"]]
    for name in [*names, *(f"{only}=" for only in ONLY_VALUE)]:
        name, equals, several = name.partition("=")
        options = dict(nargs=several or None) if equals else dict(action="store_true")
        parser.add_argument(name, dest=name, help=argparse.SUPPRESS, **options)


def renamed_words(argv: Sequence[str], parsed: Iterable[str]) -> tuple[list[str], list[str]]:
    """Returns `argv` with old spellings replaced, and a notice for each flag replaced.

    Of several times that a flag is given which is read by its value, the last one counts.
    parsed: the flags of the parser. Underscores in the name of a flag are replaced by dashes,
    unless it is a known flag as it stands.
    """
    # What each word becomes, by the number of those behind it, or by its flag if its value counts.
    renamed: dict[int | str, list[str]] = {}
    notices: dict[int | str, str] = {}
    known = {*parsed, *RENAMED, *BY_VALUE, *REFUSED}
    words = deque(argv)
    while words:
        name, equals, value = words.popleft().partition("=")
        place = len(words)
        if name.startswith("--") and name not in known and name.replace("_", "-") in known:
            name = name.replace("_", "-")
        if name in BY_VALUE:
            while not equals and words and not words[0].startswith("--"):
                value = f"{value} {words.popleft()}".strip()
            read_as = BY_VALUE[name].get(value)
            renamed.pop(name, None)
            if read_as is None:
                renamed[name] = [f"{name}={value}"]  # no flag of the parser takes it
                continue
            renamed[name] = read_as.split()
            notices[name] = f"{name} {value} is read as {read_as or 'what happens here anyway'}"
            continue
        added = []
        if name in RENAMED:
            notices[place] = f"{name} is an old spelling, read as {RENAMED[name]}"
            # The last word takes the value of the old flag. The words before it are complete.
            *added, name = RENAMED[name].split()
        renamed[place] = [*added, name + equals + value]
    return [word for some in renamed.values() for word in some], [*notices.values()]


def take_ignored(given: Values, stored: Collection[str] = ()) -> list[str]:
    """Removes the flags that allow only one value, which may be 1.0 for 1, and those without
    effect. Returns notices about the latter: a line for each, or one line for many.

    stored: fields that a file sets.
    Raises InputError for another value, and for a flag beside one with which it would have an
    effect.
    """
    for name, only in ONLY_VALUE.items():
        value = given.pop(name, None) or only
        if value not in (only, f"{only}.0"):
            raise InputError(
                f"Megatron's {name} {value} is not supported here, only {only}: {REFUSED[name]}"
            )
    found = [name for name in NO_EFFECT if given.pop(name, None)]
    for name in found:
        for field in {*UNLESS.get(name, ())}.intersection([*given, *stored]):
            raise InputError(
                f"{name} with {flag(field)} is not supported here: it has no effect "
                f"{NO_EFFECT[name]}"
            )
    if len(found) > MOST_REASONS:
        return [
            f"{len(found)} flags have no effect here (--help ignored has the reasons): "
            + ", ".join(found)
        ]
    return [f"{name} has no effect {NO_EFFECT[name]}" for name in found]


def unread_faults(
    unread: Sequence[str], supported: Iterable[str], others: Iterable[str]
) -> list[str]:
    """Returns the faults of the words that no flag of the parser takes.

    Refused flags with one reason share a fault. The values of an unknown flag are no faults.
    supported, others: the flags that may be meant by an unknown one, in this order.
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
            faults.append(f"unknown flag {name}: {advice(name, supported, others)}")
    for (owner, reason), flags in refused.items():
        faults.append(
            f"{owner}'s {', '.join(flags)} {'is' if len(flags) == 1 else 'are'} not supported "
            f"here: {reason}"
        )
    if unread and not names:
        faults = [f"{unread[0]!r} follows no flag that takes it"]
    return faults


def advice(name: str, supported: Iterable[str], others: Iterable[str] = ()) -> str:
    """Returns what to do about an unknown flag: which known one was probably meant, if one is near.

    The order is: the flag of this name in other programs, then `supported`, then `others`.
    """
    supported = list(supported)
    other = DATA["other programs"].get(name.replace("_", "-"))
    if other in supported:
        return f"did you mean {other}?"
    for known in (supported, others):
        for near in difflib.get_close_matches(name, known, n=1, cutoff=0.84):
            if _meaning(near) == _meaning(name):
                return f"did you mean {near}?"
    return "--help lists the flags"


def _meaning(flag: str) -> tuple[str, set[str]]:
    """Returns the digits and the negations of a flag: near spellings may differ in them."""
    return re.sub(r"\D", "", flag), NEGATIONS & {*flag.strip("-").split("-")}


# A flag with a value. Without a kind and a default, a Setting is a switch.
valued = partial(Setting, default=None)

# What Megatron's own FSDP shares out, as the switch that shares it out here.
SHARDING_STRATEGIES = {
    "no_shard": None,
    "optim": "use_distributed_optimizer",
    "optim_grads": "use_distributed_optimizer",
    "optim_grads_params": "use_torch_fsdp2",
}
STRATEGY = valued(
    "what --use-megatron-fsdp shares out (default: no_shard)",
    kind=str,
    choices=SHARDING_STRATEGIES,
    field="data_parallel_sharding_strategy",
)
ZERO_STAGE = valued(
    "ZeRO's stage alone",
    kind=str,
    choices=("0", "1", "2", "3"),
    megatron={"0.0": "0", "1.0": "1"},
    field="zero_stage",
)
# The switches that count the embedding or the loss as a layer.
ACCOUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
# Lengths in tokens, as Megatron-DeepSpeed has them.
TOKENS = {
    f"{name}_tokens": valued(f"{text}, in tokens of whole samples", kind=int)
    for name, text in {
        "train": "length of the run, at most",
        "lr_decay": "length of the decay of the learning rate",
        "lr_warmup": "length of its warmup",
    }.items()
}
# Numbers of MindSpeed's models, which are other numbers here.
SCALES = {
    "input_embeds_norm": Setting("--embedding-multiplier of the root of --hidden-size"),
    "query_pre_attn_scalar": valued("--softmax-scale of 1 / the root of this number", kind=int),
    "scale_depth": valued("--residual-multiplier of this / the root of --num-layers", kind=float),
    "dim_model_base": valued("--logits-scaling of --hidden-size / this", kind=int),
}
OTHER_WAYS = {
    "model": {
        **SCALES,
        "first_k_dense_replace": valued(
            "layers without experts before those of --moe-layer-freq", kind=int
        ),
        "use_rotary_position_embeddings": Setting("the same as --position-embedding-type rope"),
        "no_position_embedding": Setting(
            "--position-embedding-type none, unless rope is chosen: then nothing"
        ),
    },
    "parallel": {
        "num_layer_list": valued("layers of each pipeline stage, with commas between", kind=str),
        **{
            name: Setting(f"one layer less on the {rank} pipeline rank than on the others")
            for name, rank in zip(ACCOUNTED, ("first", "last"), strict=True)
        },
    },
    "data_parallel": {
        "deepspeed_config": valued(
            "DeepSpeed's JSON file: sizes, precision, optimizer, ZeRO's stage", kind=str
        ),
        "zero_stage": ZERO_STAGE,
        "use_megatron_fsdp": Setting(
            "the same as --use-torch-fsdp2 or --use-distributed-optimizer, by the sharding strategy"
        ),
        "data_parallel_sharding_strategy": STRATEGY,
    },
    "training": {"no_bf16": Setting("train a --model in float32"), **TOKENS},
}


def translate_values(
    given: Values, fields: Mapping[str, Setting], *, has_file: bool
) -> Iterator[str]:
    """Replaces Megatron's and its forks' other ways to say a setting in `given`. Yields notices
    about them.

    fields: the facts about each setting of a run.
    has_file: whether a file supplies the values of flags that are not given.
    Raises ValueError for flags that contradict each other.
    """
    if given.get("tokenizer_type") == "TokenizerFromFileWithFIM" and given.get("fim_rate"):
        names = ("prefix", "middle", "suffix", "pad")
        tokens = {f"fim_{name}_token": f"<fim-{name}>" for name in names}
        given.update({"fim_data": True, **tokens, **given})
        yield "--tokenizer-type TokenizerFromFileWithFIM with --fim-rate is read as --fim-data"
    # Forks write the names of norms in any case.
    norms = {known.lower(): known for known in NORM_VECTORS}
    for field, one in fields.items():
        value = str(given.get(field))
        is_norm = field == "normalization"
        read_as = norms.get(value.lower()) if is_norm else one.megatron.get(value)
        if read_as not in (None, value):
            yield f"{flag(field)} {value} is read as {read_as}"
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
    of_others = {"cp_comm_type", "context_parallel_size"}.union(*OTHER_WAYS.values())
    if not given.keys().isdisjoint(of_others):
        # Imported late: few runs have such a setting.
        from .other_ways import translate_others

        yield from translate_others(given, has_file=has_file)
