"""Translates another system's config into our flags:
`python -m megatron_lite.tools.translate_recompute ds_config.json --tp 2`

The file is a whole config of torchtune, torchtitan, Modalities, DeepSpeed, OSLO or of Hugging
Face's trainers (Trainer, TRL, axolotl, Automodel), or its part on activation checkpointing, as
JSON, TOML or YAML; of torchtitan's Python configs the literals are read. The tool prints the flags
on stdout, quoted for a shell. It prints a note on stderr for each value without a counterpart, and
for each key elsewhere in the file that concerns recomputation, offloading or wrapping. It does not
import torch.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from megatron_lite.config.checks import InputError
from megatron_lite.config.run_flags import Parser
from megatron_lite.tools.command import exit_status
from megatron_lite.tools.config_file import read_config_file
from megatron_lite.tools.translators import SYSTEMS, systems_of, translated


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m megatron_lite.tools.translate_recompute",
        description=(
            "Prints the recompute flags that do what another system's activation "
            "checkpointing config asks for."
        ),
    )
    add = parser.add_argument
    add(
        "file",
        nargs="?",
        metavar="FILE",
        help="the config, or its part on activation checkpointing: .json, "
        ".toml or .yaml, or FILE.py:NAME, a function of torchtitan; a file with another ending is "
        "told by its contents",
    )
    add("--json", "--config", dest="named_file", metavar="FILE", help="the same, as a flag")
    add(
        "--from",
        dest="system",
        choices=SYSTEMS,
        help="whose config it is (default: what its keys tell)",
    )
    add(
        "--tp",
        type=int,
        metavar="N",
        help="deepspeed, oslo: the tensor-parallel size of the run (default: that of the file)",
    )
    args = parser.parse_args(argv)
    if (args.file is None) == (args.named_file is None):
        parser.error("give the config once: FILE, or --json FILE")
    return exit_status(lambda: translate(args), parser.prog)


def translate(args: argparse.Namespace) -> None:
    """Prints the flags and the notes.

    Raises OSError if the file cannot be read. Raises InputError, which names the file, for a fault
    in its contents.
    """
    path = args.file or args.named_file
    config = read_config_file(path)
    try:
        system = _system(config, args.system)
        translation = translated(config, system, args.tp)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    for note in translation.notes:
        print(f"note: {note}", file=sys.stderr)
    print(shlex.join(translation.flags))


def _system(config: Any, named: str | None) -> str:
    """Returns the system whose config it is.

    Raises ValueError if the keys do not decide, or if they contradict the system the user named.
    """
    found = systems_of(config)
    if named is not None and found and named not in found:
        raise ValueError(
            f"this is a config of {' or '.join(found)}, not of {named}: leave --from {named} out"
        )
    if named is None and len(found) != 1:
        told = f"its keys fit {' and '.join(found)}" if found else "none of its keys tells"
        raise ValueError(f"whose config is this? {told}: give --from {{{','.join(SYSTEMS)}}}")
    return named or found[0]


if __name__ == "__main__":
    sys.exit(main())
