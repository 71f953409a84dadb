"""Parses the command line of pretrain_gpt.py into one frozen RunConfig.

The flags are in `megatron_lite/cli/arguments/`, one file for each topic. Start with `parse.py`.
"""

from __future__ import annotations

from megatron_lite.cli.arguments.parse import ParsedArguments, parse_args
from megatron_lite.cli.arguments.parser import build_parser, supported_flags
from megatron_lite.cli.arguments.run_config import topics

__all__ = ["ParsedArguments", "build_parser", "parse_args", "supported_flags", "topics"]
