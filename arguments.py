"""Parses the command line of pretrain_gpt.py into one frozen RunConfig.

The flags are the fields of the configuration classes in `megatron_lite/config/`;
`megatron_lite/cli/flags.py` reads the command line.
"""

from __future__ import annotations

from megatron_lite.cli.flags import ParsedArguments, build_parser, parse_args
from megatron_lite.config.run_flags import supported_flags, topics

__all__ = ["ParsedArguments", "build_parser", "parse_args", "supported_flags", "topics"]
