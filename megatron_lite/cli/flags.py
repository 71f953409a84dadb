"""Parses the command line of `megatron-lite train` into one frozen RunConfig.

Flags have Megatron-LM's names, types and defaults; config/run_flags.py makes them. A flag that is
not given leaves no entry, so that a file can supply its value: one of --dump-config, a config.json
of Hugging Face, or a known model. The module does not import torch.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron_lite.config import megatron_flags
from megatron_lite.config.checks import Values, flag, printable
from megatron_lite.config.data_settings import TokenizerConfig
from megatron_lite.config.dry_run_settings import DryRunConfig
from megatron_lite.config.invocation import SCRIPT
from megatron_lite.config.known_models import PRESETS, model_of, stored_values
from megatron_lite.config.megatron_flags import translate_values
from megatron_lite.config.notices import notices as notices_of
from megatron_lite.config.run import RunConfig
from megatron_lite.config.run_flags import (
    Parser,
    add_run_flags,
    add_settings,
    build_run,
    flag_of,
    run_fields,
    taken,
)
from megatron_lite.config.setting import (
    ContradictionError,
    Settings,
    check_relations,
    setting,
    settings_of,
    switch,
)

SOURCES = ("config_json", "hf_config", "model")
REQUIRED = {name for name, field in run_fields().items() if field.is_required} | {"vocab_size"}
CONTRADICTIONS = {
    "--accumulate-allreduce-grads-in-fp32": ("grad_reduce_in_bf16", True),
    "--ddp-reduce-scatter-with-fp32-accumulation": ("grad_reduce_in_bf16", True),
    "--fsdp-reshard-after-forward": ("torch_fsdp2_reshard_after_forward", False),
}
PRINTING = ("dump_config", "explain_recompute", "dry_run_memory")
EACH_PRINTS, EACH_DESCRIBES = "each prints something else and stops", "each describes the model"


class General(Settings):
    """The flags that are no part of a run: what to print instead of training, and what supplies the
    values of flags that are not given."""

    dump_config: bool = switch("print the run as JSON and stop")
    explain_recompute: bool = switch(
        "print, layer by layer, what is kept for backward, rebuilt and sent, and what other "
        "recompute flags would do, and stop",
        excludes="dump_config",
        why=EACH_PRINTS,
    )
    dry_run_memory: bool = switch(
        "run one step of some ranks without their machines, on tensors without values; print the "
        "memory that each rank needs, and stop",
        excludes="dump_config explain_recompute",
        why=EACH_PRINTS,
    )
    check_line: str | None = setting(
        "print what becomes of each flag in a launch script, with the reason, and stop",
        metavar="FILE",
    )
    config_json: str | None = setting(
        "take the run from what --dump-config printed; flags override it, and alternatives of a "
        "flag that is given",
        metavar="FILE",
    )
    hf_config: str | None = setting(
        "take the model's shape and vocabulary from a config.json of Hugging Face, or its folder; "
        "flags override it. The weights are random: megatron_lite.tools.convert brings trained "
        "ones",
        metavar="FILE",
        excludes="config_json",
        why=EACH_DESCRIBES,
    )
    model: str | None = setting(
        "take the shape and vocabulary of a known model, with random weights; flags override "
        f"them: {', '.join(PRESETS)}",
        metavar="NAME",
        alias="--preset",
        excludes="config_json hf_config",
        why=EACH_DESCRIBES,
    )
    local_rank: int | None = setting(
        "number of this process on its node, as DeepSpeed's launcher and old ones of torch pass "
        "it; LOCAL_RANK of the environment must be the same",
        alias="--local_rank",
    )


class ParsedArguments(NamedTuple):
    """The result of parsing a command line.

    config: the configuration of the run.
    prints: what to print instead of training, one of PRINTING; "": the run trains.
    dry_run: the ranks whose memory to measure for dry_run_memory.
    notices: lines for the user about flags with no effect, or less effect than their names promise.
    local_rank: the number of this process on its node, if a launcher passes it as a flag. It is no
        part of the configuration, since each process has its own.
    """

    config: RunConfig
    prints: str
    dry_run: DryRunConfig
    notices: tuple[str, ...]
    local_rank: int | None = None


def build_parser(program: str = SCRIPT) -> Parser:
    """Returns the parser of the whole command line.

    program: the name with which its messages begin.
    """
    parser = Parser(
        "general", prog=program, exit_on_error=False, argument_default=argparse.SUPPRESS
    )
    add_settings(parser, General, DryRunConfig)
    add_run_flags(parser)
    megatron_flags.add_flags_without_effect(parser)
    return parser


def parse_args(argv: Sequence[str], program: str = SCRIPT) -> ParsedArguments:
    """Parses a command line, given without the name of the program.

    program: its name in messages, and in the text of --help, which is printed if the words ask for
        it.

    Faults in the command line are printed on stderr, all of them at once, and the program exits
    with status 2. After each fault the flags that it names are taken out and the rest is parsed
    again. A fault that names one of them may follow from that, and is not told.
    """
    parser = build_parser(program)
    checks = any(word.partition("=")[0] == "--check-line" for word in argv)
    if checks or not {"-h", "--help"}.isdisjoint(argv):
        from .help import print_fates, print_help

        print_help(parser, argv, program)
        print_fates(parser, argv)
    fields = {name: action.dest for name, action in parser._option_string_actions.items()}
    words, notices = megatron_flags.renamed_words(argv, fields)
    given = {fields.get(word.partition("=")[0], "") for word in words}
    faults = []
    lost: set[str] = set()
    unknown, parsed = None, None
    while parsed is None:
        if not lost.isdisjoint(SOURCES):
            lost |= run_fields().keys() - given  # which the file may have
        try:
            namespace, unread = parser.parse_known_args(_without(words, lost, fields))
            if unknown is None:
                unknown = parser.faults_of(unread)
                faults += unknown
                lost |= {fields[name] for name in re.findall(r"mean (\S+)\?", " ".join(unknown))}
                continue
            parsed = _parsed(namespace, [*notices])
        except (ValueError, argparse.ArgumentError) as error:
            text = str(error)
            # Behind a colon is the reason or the advice.
            culprits, named = (
                {fields.get(name, name) for name in re.findall(r"--[\w-]+", part)}
                for part in (text.partition(": ")[0], text)
            )
            if not named & lost:
                faults.append(text)
            # A file's fault names no flag.
            culprits = culprits & {*given, *REQUIRED} or given.intersection(SOURCES)
            if culprits <= lost:
                break
            lost |= culprits
    if parsed is None or faults:
        count = f"{len(faults)} faults in the command line:\n  - " if len(faults) > 1 else ""
        parser.error(count + "\n  - ".join(faults))
    return parsed


def _without(words: Sequence[str], lost: set[str], fields: Mapping[str, str]) -> list[str]:
    """Returns the words without the flags of the lost fields; a required one is 1."""
    left, is_kept = [], True
    for word in words:
        if re.match(r"-\D", word):
            is_kept = fields.get(word.partition("=")[0]) not in lost
        left += [word] * is_kept
    return left + [f"{flag_of(name)}=1" for name in REQUIRED & lost]


def _parsed(namespace: argparse.Namespace, notices: list[str]) -> ParsedArguments:
    """Returns the result of parsing a command line. Raises ValueError for its first fault."""
    general, dry_run = taken(General, namespace), taken(DryRunConfig, namespace)
    check_relations([general, dry_run])
    given = vars(namespace)
    sources = {name: source for name in SOURCES if (source := getattr(general, name)) is not None}
    notices += translate_values(given, run_fields(), has_file=bool(sources))
    stored, said = Values(), ""
    for name, source in sources.items():
        said = f"{flag(name)} {source}"
        stored = _values_of(flag(name), source, given, notices)
    for name, (field, value) in CONTRADICTIONS.items():
        if name not in given or {**stored, **given}.get(field) is not value:
            continue
        if field in given:
            raise ValueError(f"{name} contradicts {flag_of(field)}: leave one of them out")
        del stored[field]
        notices.append(f"{said} gives {flag_of(field)}, which {name} replaces")
    notices += megatron_flags.take_ignored(given, [one for one, value in stored.items() if value])
    # The given fields, and those of a stored run or model for all others.
    fields, values, config = run_fields(), {**stored, **given}, None
    missing = [flag(name) for name, one in fields.items() if one.is_required and name not in values]
    if missing:
        raise ValueError(
            f"missing {', '.join(missing)}: give {'it' if len(missing) == 1 else 'them'} as "
            "flags, or a whole run with --config-json FILE"
        )
    while config is None:
        try:
            config = build_run(values)
        except ContradictionError as error:
            # If a rule refuses a stored choice beside the flags, such as a stored
            # --recompute-granularity beside a given --recompute-policy, the choice is left out.
            stored_ones = [
                name
                for name in error.fields
                if name not in given
                and values.get(name, fields[name].default) != fields[name].default
            ]
            if not stored_ones:
                raise
            del values[stored_ones[0]]
            notices.append(f"{said} gives {flag_of(stored_ones[0])}, which the flags replace")
    # A flag that turns its field off stores False. The notices ask only for fields that are set.
    set_fields = [name for name, value in given.items() if value is not False]
    notices += notices_of(config, "settings", given=set_fields)
    prints = "".join(name for name in PRINTING if getattr(general, name))
    return ParsedArguments(
        config, prints, dry_run, tuple(map(printable, notices)), general.local_rank
    )


def _values_of(name: str, source: str, given: Mapping[str, Any], notices: list[str]) -> Values:
    """Returns the values of a file or of a known model.

    Adds a notice for each value that is not read, and for each flag that says otherwise.
    """
    if name == "--config-json":
        values = stored_values(source)
        chosen = given.get("tokenizer_type", given.get("vocab_file") and "GPT2BPETokenizer")
        if chosen not in (None, values["tokenizer_type"]):
            for field in settings_of(TokenizerConfig):
                del values[field]  # another tokenizer has another vocabulary
        return values
    said, (values, model) = f"{name} {source}", model_of(name, source)
    model.exact_fields(source)
    notices += [f"{said}: {note}" for note in model.notes]
    # The vocabulary is the model's, whichever tokenizer is chosen: a tokenizer may use fewer rows
    # of the embedding.
    files = {"tokenizer_type", "tokenizer_model", "vocab_file", "merge_file"}
    if given.get("tokenizer_type") != "NullTokenizer" and given.keys() & files:
        values["vocab_size"] = model.vocab_size
    notices += [
        f"{flag(field)} {given[field]} replaces {value} of {said}"
        for field, value in values.items()
        if field in given and given[field] != value
    ]
    if name == "--model" and not {"bf16", "fp16"} & given.keys():
        values["bf16"] = True
        notices.append("--bf16 is assumed for this model (--no-bf16 trains in float32)")
    return values
