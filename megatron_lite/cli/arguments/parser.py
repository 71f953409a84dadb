"""The parser of the whole command line.

Each config class has one group of flags, and each field has one flag. The config classes hold the
defaults and the rules. A flag that is not given leaves no entry in argparse's result, so that
`--config-json FILE` can supply its value. `megatron_lite/config/flags.py` holds the answers to all
other flags of Megatron.
"""

from __future__ import annotations

import argparse

from megatron_lite.cli.arguments.checkpoint_flags import add_checkpoint_flags
from megatron_lite.cli.arguments.data_flags import add_data_flags, add_tokenizer_flags
from megatron_lite.cli.arguments.dry_run_flags import add_dry_run_flags
from megatron_lite.cli.arguments.flag_group import whole_number
from megatron_lite.cli.arguments.logging_flags import add_logging_flags, add_profiling_flags
from megatron_lite.cli.arguments.model_flags import add_model_flags
from megatron_lite.cli.arguments.optimizer_flags import (
    add_loss_scaling_flags,
    add_lr_schedule_flags,
    add_optimizer_flags,
)
from megatron_lite.cli.arguments.parallel_flags import add_data_parallel_flags, add_parallel_flags
from megatron_lite.cli.arguments.recompute_flags import add_recompute_flags
from megatron_lite.cli.arguments.training_flags import add_training_flags
from megatron_lite.config import flags
from megatron_lite.config.all_faults import Parser
from megatron_lite.config.invocation import SCRIPT
from megatron_lite.config.known_models import PRESETS


def build_parser(program: str = SCRIPT) -> Parser:
    """Returns the parser of the whole command line.

    program: the name with which its messages begin.

    Abbreviated flags are refused: a new flag must not change the meaning of an old command.
    """
    parser = Parser(
        prog=program,
        description="Trains a GPT. Flags have Megatron-LM's names and meaning. --help refused and "
        "--help ignored list the other flags of Megatron, by the reason.",
        allow_abbrev=False,
        exit_on_error=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.register("type", int, whole_number)
    parser.add_argument("--dump-config", action="store_true", help="print the run as JSON and stop")
    parser.add_argument(
        "--explain-recompute",
        action="store_true",
        help="print, layer by layer, what is kept for "
        "backward, rebuilt and sent, and what other recompute flags would do, and stop",
    )
    add_dry_run_flags(parser)
    parser.add_argument(
        "--config-json",
        metavar="FILE",
        help="take the run from what --dump-config printed; flags override it, "
        "and alternatives of a flag that is given",
    )
    parser.add_argument(
        "--hf-config",
        metavar="FILE",
        help="take the model's shape and vocabulary from a config.json of Hugging Face, or its "
        "folder; flags override it. The weights are random: megatron_lite.tools.convert brings "
        "trained ones",
    )
    parser.add_argument(
        "--model",
        "--preset",
        metavar="NAME",
        help="take the shape and vocabulary of a known model, with random weights; flags override "
        f"them: {', '.join(PRESETS)}",
    )
    parser.add_argument(
        "--local-rank",
        "--local_rank",
        type=int,
        metavar="N",
        help="number of this process on its node, as "
        "DeepSpeed's launcher and old ones of torch pass it; LOCAL_RANK of the environment "
        "must be the same",
    )
    add_model_flags(parser)
    add_parallel_flags(parser)
    add_data_parallel_flags(parser)
    add_recompute_flags(parser)
    add_training_flags(parser)
    add_optimizer_flags(parser)
    add_loss_scaling_flags(parser)
    add_lr_schedule_flags(parser)
    add_data_flags(parser)
    add_tokenizer_flags(parser)
    add_checkpoint_flags(parser)
    add_logging_flags(parser)
    add_profiling_flags(parser)
    flags.add_flags_without_effect(parser)
    return parser


def supported_flags(parser: Parser) -> list[str]:
    """Returns all flags that set a field or ask for help, with their aliases."""
    return [
        name
        for action in parser.actions
        if not action.dest.startswith("--")
        for name in action.option_strings
    ]
