"""Parses the command line into one frozen RunConfig.

Flags have Megatron-LM's names, types and defaults. The module does not import torch, so
`--dump-config` prints at once. The flags are in the files beside it, one for each topic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lite.cli.arguments.flag_group import field_name
from megatron_lite.cli.arguments.help import print_help
from megatron_lite.cli.arguments.parser import build_parser, supported_flags
from megatron_lite.cli.arguments.run_config import build_config
from megatron_lite.config import flags
from megatron_lite.config.all_faults import Faults
from megatron_lite.config.dry_run_settings import DryRunConfig, take_dry_run
from megatron_lite.config.invocation import SCRIPT
from megatron_lite.config.megatron_values import translate_values
from megatron_lite.config.notices import setting_notices
from megatron_lite.config.run import RunConfig


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


def parse_args(argv: Sequence[str], program: str = SCRIPT) -> ParsedArguments:
    """Parses a command line, given without the name of the program.

    program: its name in messages, and in the text of --help, which is printed if the words ask for
        it.

    Faults in the command line are printed on stderr, all of them at once, and the program exits
    with status 2.
    """
    print_help(argv, program)
    parser = build_parser(program)
    argv, notices = flags.renamed_words(argv, parser._option_string_actions)
    read = parser.read(argv)
    unknown, meant = flags.unread_faults(read.unread, supported_flags(parser))
    faults = Faults([*read.faults, *unknown], {*read.failed, *map(field_name, meant)})
    given = vars(read.namespace)
    dump_config = given.pop("dump_config", False)
    explain_recompute = given.pop("explain_recompute", False)
    config_json, local_rank = given.pop("config_json", None), given.pop("local_rank", None)
    hf_config, model = given.pop("hf_config", None), given.pop("model", None)
    printing = {
        "--dump-config": dump_config,
        "--explain-recompute": explain_recompute,
        "--dry-run-memory": "dry_run_memory" in given,
    }
    first, *others = [name for name, is_given in printing.items() if is_given] or [""]
    if others:
        faults.texts.append(
            f"{first} and {others[0]} each print something else and stop: leave one of them out"
        )
    dry_run = None
    with faults.of():
        dry_run = take_dry_run(given)
    notices += _without_effect(given, faults)
    has_file = any(source is not None for source in (config_json, hf_config, model))
    notices += translate_values(given, faults, has_file=has_file)
    config = build_config(given, config_json, notices, faults, hf_config, model)
    if faults.texts or config is None:
        parser.stop(faults.texts)
    # A flag that turns its field off stores False. The notices ask only for fields that are set.
    notices += setting_notices(
        config, [name for name, value in given.items() if value is not False]
    )
    return ParsedArguments(
        config, dump_config, explain_recompute, dry_run, tuple(notices), local_rank
    )


def _without_effect(given: dict[str, Any], faults: Faults) -> list[str]:
    """Removes the flags without effect from `given` and returns notices about them.

    Adds a fault to `faults` for a flag that contradicts another, and for a flag that allows only
    one value and has another value.
    """
    for flag in (
        "--accumulate-allreduce-grads-in-fp32",
        "--ddp-reduce-scatter-with-fp32-accumulation",
    ):
        if flag in given and given.get("grad_reduce_in_bf16"):
            faults.texts.append(f"{flag} contradicts --grad-reduce-in-bf16: leave one of them out")
    if "--fsdp-reshard-after-forward" in given and not given.get(
        "torch_fsdp2_reshard_after_forward", True
    ):
        faults.texts.append(
            "--fsdp-reshard-after-forward contradicts --torch-fsdp2-no-reshard-after-forward: "
            "leave one of them out"
        )
    faults.texts += flags.only_value_faults(given)
    return flags.take_ignored(given)
