"""Parses the command line of `megatron-lite train` into one frozen RunConfig.

Flags have Megatron-LM's names, types and defaults; config/run_flags.py makes them. A flag that is
not given leaves no entry, so that a file can supply its value: one of --dump-config, a config.json
of Hugging Face, or a known model. The module does not import torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lite.cli.help import print_help
from megatron_lite.config import hf_config, megatron_flags
from megatron_lite.config.alternatives import replaced_fields, replaced_notices
from megatron_lite.config.checks import InputError, flag
from megatron_lite.config.dry_run_settings import DryRunConfig, take_dry_run
from megatron_lite.config.input_file import read_input_text
from megatron_lite.config.invocation import SCRIPT
from megatron_lite.config.known_models import PRESETS, preset
from megatron_lite.config.megatron_values import translate_values
from megatron_lite.config.notices import setting_notices
from megatron_lite.config.parser import Faults, Parser
from megatron_lite.config.plain import LARGEST_TEXT
from megatron_lite.config.run import RunConfig
from megatron_lite.config.run_flags import (
    add_flag,
    add_run_flags,
    fields_of,
    flag_of,
    run_fields,
    topics,
)

Values = dict[str, dict[str, Any]]  # by topic and field

# A file of --dump-config holds these derived values. A flag may change the values from which they
# are derived, and they must be derived again.
DERIVED_FIELDS = (("model", "kv_channels"), ("model", "ffn_hidden_size"))
STAND_IN = 1  # for a required value that is missing or wrong
CONTRADICTIONS = {
    "--accumulate-allreduce-grads-in-fp32": ("grad_reduce_in_bf16", True),
    "--ddp-reduce-scatter-with-fp32-accumulation": ("grad_reduce_in_bf16", True),
    "--fsdp-reshard-after-forward": ("torch_fsdp2_reshard_after_forward", False),
}
PRINTING = ("dump_config", "explain_recompute", "dry_run_memory")


@dataclass(frozen=True)
class ParsedArguments:
    """The result of parsing a command line.

    config: the configuration of the run.
    dump_config: whether to print the configuration and stop.
    explain_recompute: whether to print the effect of recomputation and stop.
    dry_run: the ranks whose memory to measure without training, and stop; None: no dry run.
    notices: lines for the user about flags with no effect, or less effect than their names promise.
    local_rank: the number of this process on its node, if a launcher passes it as a flag. It is no
        part of the configuration, since each process has its own.
    """

    config: RunConfig
    dump_config: bool
    explain_recompute: bool
    dry_run: DryRunConfig | None
    notices: tuple[str, ...]
    local_rank: int | None = None


def build_parser(program: str = SCRIPT) -> Parser:
    """Returns the parser of the whole command line.

    program: the name with which its messages begin.

    Abbreviated flags are refused: a new flag must not change the meaning of an old command.
    """
    parser = Parser(
        prog=program, allow_abbrev=False, exit_on_error=False, argument_default=argparse.SUPPRESS
    )
    add = parser.add_argument
    add("--dump-config", action="store_true", help="print the run as JSON and stop")
    add(
        "--explain-recompute",
        action="store_true",
        help="print, layer by layer, what is kept for "
        "backward, rebuilt and sent, and what other recompute flags would do, and stop",
    )
    add(
        "--dry-run-memory",
        action="store_true",
        help="run one step of some ranks without their machines, on tensors without values; print "
        "the memory that each rank needs, and stop",
    )
    for field in fields_of(DryRunConfig):
        add_flag(parser, field)
    add(
        "--config-json",
        metavar="FILE",
        help="take the run from what --dump-config printed; flags override it, "
        "and alternatives of a flag that is given",
    )
    add(
        "--hf-config",
        metavar="FILE",
        help="take the model's shape and vocabulary from a config.json of Hugging Face, or its "
        "folder; flags override it. The weights are random: megatron_lite.tools.convert brings "
        "trained ones",
    )
    add(
        "--model",
        "--preset",
        metavar="NAME",
        help="take the shape and vocabulary of a known model, with random weights; flags override "
        f"them: {', '.join(PRESETS)}",
    )
    add(
        "--local-rank",
        "--local_rank",
        type=int,
        metavar="N",
        help="number of this process on its node, as "
        "DeepSpeed's launcher and old ones of torch pass it; LOCAL_RANK of the environment "
        "must be the same",
    )
    add_run_flags(parser)
    megatron_flags.add_flags_without_effect(parser)
    return parser


def supported_flags(parser: Parser) -> list[str]:
    """Returns all flags that set a field or ask for help, with their aliases."""
    return [
        name
        for action in parser.actions
        if not action.dest.startswith("--")
        for name in action.option_strings
    ]


def parse_args(argv: Sequence[str], program: str = SCRIPT) -> ParsedArguments:
    """Parses a command line, given without the name of the program.

    program: its name in messages, and in the text of --help, which is printed if the words ask for
        it.

    Faults in the command line are printed on stderr, all of them at once, and the program exits
    with status 2.
    """
    parser = build_parser(program)
    print_help(parser, argv, program)
    argv, notices = megatron_flags.renamed_words(argv, parser._option_string_actions)
    read = parser.read(argv)
    unknown, meant = megatron_flags.unread_faults(read.unread, supported_flags(parser))
    fields = {name.removeprefix("--").replace("-", "_") for name in meant}
    faults = Faults([*read.faults, *unknown], {*read.failed, *fields})
    given = vars(read.namespace)
    stopping = [flag(name) for name in PRINTING if name in given]
    if len(stopping) > 1:
        faults.texts.append(
            f"{stopping[0]} and {stopping[1]} each print something else and stop: leave one of "
            "them out"
        )
    dump_config, explain = given.pop("dump_config", False), given.pop("explain_recompute", False)
    local_rank = given.pop("local_rank", None)
    sources = {
        name: given.pop(field)
        for name in ("--config-json", "--hf-config", "--model")
        if (field := name[2:].replace("-", "_")) in given
    }
    dry_run = None
    with faults.of():
        dry_run = take_dry_run(given)
    for name, (field, value) in CONTRADICTIONS.items():
        if name in given and given.get(field) is value:
            faults.texts.append(f"{name} contradicts {flag_of(field)}: leave one of them out")
    faults.texts += megatron_flags.only_value_faults(given)
    notices += megatron_flags.take_ignored(given)
    notices += translate_values(given, faults, has_file=bool(sources))
    config = _build_config(given, sources, notices, faults)
    if faults.texts or config is None:
        parser.stop(faults.texts)
    # A flag that turns its field off stores False. The notices ask only for fields that are set.
    notices += setting_notices(
        config, [name for name, value in given.items() if value is not False]
    )
    return ParsedArguments(config, dump_config, explain, dry_run, tuple(notices), local_rank)


def _build_config(
    given: dict[str, Any], sources: Mapping[str, str], notices: list[str], faults: Faults
) -> RunConfig | None:
    """Returns the RunConfig of the given fields, and of a source for all other fields.

    sources: the file, or the known model, by the flag that names it.

    Adds notices to `notices` and faults to `faults`. After a broken rule the values that it names
    are taken out, so that the other rules are checked too. The result is of no use then.
    """
    fields, values = run_fields(), Values()
    try:
        if len(sources) > 1:
            raise ValueError(f"{' and '.join(sources)} each describe the model: give one")
        for name, source in sources.items():
            values = _values_of(name, source, given, notices)
    except ValueError as error:
        faults.texts.append(str(error))
        faults.fields |= fields.keys() - given.keys()
    values = {topic: values.get(topic, {}) for topic in topics()}
    for name in fields.keys() & given.keys():
        values[fields[name].topic][name] = given[name]
    unset = [
        name for name, one in fields.items() if one.is_required and name not in values[one.topic]
    ]
    # A rule may ask for it: then it is taken out as a wrong value is.
    values["tokenizer"].setdefault("vocab_size", None)
    missing = [flag(name) for name in unset if name not in faults.fields]
    for name in unset:
        values[fields[name].topic][name] = STAND_IN
    faults.fields.update(unset)
    if missing:
        faults.texts.append(
            f"missing {', '.join(missing)}: give {'it' if len(missing) == 1 else 'them'} as "
            "flags, or a whole run with --config-json FILE"
        )
    return _built(values, faults)


def _built(values: Values, faults: Faults) -> RunConfig | None:
    """Returns the run of these values; None if a fault hides the other rules."""
    while True:
        made = {name: _topic(kind, values[name], faults) for name, kind in topics().items()}
        if None in made.values():
            return None
        try:
            return RunConfig(**made)
        except ValueError as error:
            if not _take_out_named(str(error), values, faults):
                return None


def _topic(kind: type, own: dict[str, Any], faults: Faults) -> Any:
    while True:
        try:
            return kind(**own)
        except ValueError as error:
            if not _take_out_named(str(error), {"": own}, faults):
                return None


def _take_out_named(text: str, values: Values, faults: Faults) -> bool:
    """Takes the values that a broken rule names out. Returns whether there was one.

    The rule is a fault unless it names a field that has no usable value because of another one.
    """

    def is_named(field: str) -> bool:
        return re.search(rf"{flag_of(field)}(?![\w-])", text) is not None

    named = [(own, field) for own in values.values() for field in own if is_named(field)]
    if not any(map(is_named, faults.fields)):
        faults.texts.append(text)
    changed = False
    for own, field in named:
        faults.fields.add(field)
        value = own.pop(field)
        if run_fields()[field].is_required or field == "vocab_size":
            own[field] = STAND_IN
        changed |= own.get(field) != value
    return changed


def _values_of(name: str, source: str, given: dict[str, Any], notices: list[str]) -> Values:
    """Returns the values of a file or of a known model, without those that given fields replace.

    Adds a notice for each value that is not read, and for each flag that says otherwise.
    """
    said = f"{name} {source}"
    if name == "--config-json":
        values = _values_of_file(source)
    else:
        if name == "--model":
            fields, vocab_size = preset(source)
        else:
            mapped = hf_config.read_hf_file(Path(source))
            fields, vocab_size = hf_config.exact_fields(mapped, Path(source)), mapped.vocab_size
            notices += [f"{said}: {note}" for note in mapped.notes]
        # The vocabulary is the model's, whichever tokenizer is chosen: a tokenizer may use fewer
        # rows of the embedding. NullTokenizer adds one id to its size.
        names = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
        adds_one = given.get("tokenizer_type") == "NullTokenizer" or not given.keys() & {*names}
        tokenizer = {"vocab_size": vocab_size - adds_one}
        notices += [
            f"{flag(field)} {given[field]} replaces {value} of {said}"
            for field, value in {**fields, **tokenizer}.items()
            if field in given and given[field] != value
        ]
        values = {"model": dict(fields)}
    stored = {field: value for topic in values.values() for field, value in topic.items()}
    replaced = replaced_fields(stored, given)
    for topic in values.values():
        for field in replaced.keys() & topic.keys():
            del topic[field]
    changed = {
        field: by
        for field, by in replaced.items()
        if field in stored and stored[field] != run_fields()[field].default
    }
    notices += replaced_notices(changed, file=said)
    if name == "--config-json":
        return values
    if name == "--model" and not {"bf16", "fp16"} & given.keys():
        values["training"] = {"bf16": True}
        notices.append("--bf16 is assumed for this model (--no-bf16 trains in float32)")
    return {**values, "tokenizer": tokenizer}


def _values_of_file(path: str) -> Values:
    """Returns the values of a --dump-config file.

    A derived value becomes None if it equals the value that would be derived anyway.
    """
    try:
        config = RunConfig.from_json(read_input_text(path, LARGEST_TEXT))
    except InputError as error:  # which names the file
        raise ValueError(f"--config-json {error}") from error
    except OSError as error:
        raise ValueError(f"--config-json {path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"--config-json {path}: {error}") from error
    values = dataclasses.asdict(config)
    for topic, field in DERIVED_FIELDS:
        if dataclasses.replace(getattr(config, topic), **{field: None}) == getattr(config, topic):
            values[topic][field] = None
    return values
