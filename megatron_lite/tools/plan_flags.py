"""The flags of the planner's command line."""

from __future__ import annotations

import argparse

from megatron_lite.config.known_models import PRESETS
from megatron_lite.config.megatron_flags import add_flags_without_effect
from megatron_lite.config.parser import Parser
from megatron_lite.config.run_flags import add_run_flags
from megatron_lite.plan.hardware import ALIASES, machine_names

OWN = (
    "model",
    "hf_config",
    "config_json",
    "gpus",
    "gpu",
    "machine",
    "fix",
    "memory_budget",
    "reserve",
    "host_memory",
    "json",
    "html",
)


def plan_parser(program: str) -> argparse.ArgumentParser:
    """Returns the parser of the command line: the names of OWN, and the flags of a run."""
    parser = Parser(
        prog=program,
        allow_abbrev=False,
        description=(
            "Finds the fastest plan of a training run that fits into memory. A flag of the run "
            "fixes that setting; `megatron-lite train --help` has the flags of a run."
        ),
        epilog="Exit status: 0 a plan fits, 1 only in a part of the reserve, 2 none fits or bad "
        "input.",
    )
    add = parser.add_argument
    add("--model", "--preset", metavar="NAME", help=", ".join(PRESETS))
    add("--hf-config", metavar="FILE", help="a config.json of Hugging Face")
    add("--config-json", metavar="FILE", help="a run as `train --dump-config` prints it")
    add("--gpus", metavar="N,..", help="numbers of GPUs (default: the fewest on which it trains)")
    names = [*machine_names(), *sorted(ALIASES)]
    add("--gpu", metavar="NAME", help=", ".join(names))
    add("--machine", metavar="FILE", help="a machine as megatron_lite.tools.calibrate writes it")
    add("--fix", metavar="NAME=VALUE", action="append", default=[], help="fix a setting (several)")
    add("--memory-budget", metavar="SIZE", help="such as 40GiB, instead of the card's memory")
    add("--reserve", metavar="SIZE", help="memory to leave free (default: 1 GiB and 3%% of it)")
    add(
        "--host-memory",
        metavar="SIZE",
        default="0",
        help="host memory of each GPU in which a policy may keep tensors, @host (default: 0)",
    )
    add("--json", metavar="FILE", help="write the plans as JSON; - is stdout, without the text")
    add("--html", metavar="FILE.html", help="write a page that shows the plans and their terms")
    add_run_flags(parser, without=OWN, hidden=True)
    add_flags_without_effect(parser)
    return parser
