"""Translates another system's config into our flags:
`python -m megatron_lite.tools.translate_recompute ds_config.json --tp 2`

The file is a whole config of torchtune, torchtitan, Modalities, DeepSpeed, OSLO or of Hugging
Face's trainers (Trainer, TRL, axolotl, Automodel), or its part on activation checkpointing, as
JSON, TOML or YAML. A Python config is not run: write its part as JSON. The tool prints the flags on
stdout, quoted for a shell. It prints a note on stderr for each value without a counterpart, and for
each key elsewhere in the file that concerns recomputation, offloading or wrapping. It does not
import torch.

The file comes from somebody else, so it is treated as untrusted data. No text is evaluated: YAML is
read by PyYAML's safe loader. The file's size, its depth, the values that YAML aliases expand to and
the parts of a TOML key are bounded before they can cost time or memory. A duplicate key is an error
in all formats, since a reader that takes the last one hides the first one.
"""

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from megatron_lite.config.checks import InputError, input_faults, parse_json
from megatron_lite.config.input_file import read_input_text
from megatron_lite.config.run_flags import Parser

from .command import tool
from .translation import inside
from .translators import SYSTEMS, systems_of, translated

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_FILE_BYTES = 2**18
MAX_DEPTH = 50
MAX_VALUES = 20_000
TOO_MANY = f"more than {MAX_VALUES} values, aliases included"
# Python's TOML reader takes time quadratic in the parts of a key such as a.b.c: 3 s for 8,000.
MAX_DOTS = 200
LONGEST_FAULT = 150  # characters of a parser's own message
FAULTS = (ValueError, yaml.YAMLError, RecursionError, MemoryError)
NOT_RUN = (
    "a Python config is not run: write its part as JSON, such as "
    '{"activation_checkpoint": {"mode": "full"}}'
)


def _add_flags(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "file",
        nargs="?",
        metavar="FILE",
        help="the config, or its part on activation checkpointing: .json, "
        ".toml or .yaml; a file with another ending is told by its contents",
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


def translate(args: argparse.Namespace) -> None:
    """Prints the flags and the notes.

    Raises OSError if the file cannot be read. Raises InputError, which names the file, for a fault
    in its contents.
    """
    if (args.file is None) == (args.named_file is None):
        raise InputError("give the config once: FILE, or --json FILE")
    path = args.file or args.named_file
    config = read_config_file(path)
    with input_faults(f"{path}: "):
        translation = translated(config, _system(config, args.system), args.tp)
    for note in translation.notes:
        print(f"note: {note}", file=sys.stderr)
    print(shlex.join(translation.flags))


main = tool(
    "python -m megatron_lite.tools.translate_recompute",
    "Prints the recompute flags that do what another system's activation checkpointing config asks "
    "for.",
    _add_flags,
    translate,
)


def _system(config: Any, named: str | None) -> str:
    """Returns the system whose config it is.

    Raises ValueError if the keys do not decide, or if they contradict the system the user named.
    """
    found = systems_of(config)
    if named and found and named not in found:
        raise ValueError(
            f"this is a config of {' or '.join(found)}, not of {named}: leave --from {named} out"
        )
    if named is None and len(found) != 1:
        told = f"its keys fit {' and '.join(found)}" if found else "none of its keys tells"
        raise ValueError(f"whose config is this? {told}: give --from {{{','.join(SYSTEMS)}}}")
    return named or found[0]


def read_config_file(path: str) -> Any:
    """Returns the content of the file as plain data.

    The file's ending decides the format (.json, .toml, .yaml, .yml). With another ending it is the
    first of the three formats that the file fits.
    Raises OSError if the file cannot be read. Raises InputError, which names the file, if it is too
    large, is not text, or cannot be parsed.
    """
    text = read_input_text(path, MAX_FILE_BYTES)
    ending = Path(path).suffix[1:].upper().replace("YML", "YAML")
    if ending == "PY":
        raise InputError(f"{path}: {NOT_RUN}")
    faults = []
    for kind in [ending] if ending in PARSERS else PARSERS:
        try:
            config = PARSERS[kind](text)
            _size_of(config)
            return config
        except FAULTS as error:
            faults.append(f"not {kind} ({' '.join(str(error).split())[:LONGEST_FAULT]})")
    raise InputError(f"{path}: {'; '.join(faults)}")


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys, and merges of very many keys."""

    def flatten_mapping(self, node: Any) -> None:
        """Puts the keys that `<<` merges in into the mapping."""
        super().flatten_mapping(node)
        if len(node.value) > MAX_VALUES:
            raise ValueError(TOO_MANY)

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Composes a mapping. Raises ValueError for a duplicate key.

        Keys that `<<` will merge in are not here yet, so they may repeat a key.
        """
        node = super().compose_mapping_node(anchor)
        found = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in found:
                    raise ValueError(f"the key {key.value[:40]!r} stands twice in one mapping")
                found.add(key.value)
        return node


def _read_toml(text: str) -> Any:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.count(".") > MAX_DOTS:
            raise ValueError(f"line {number}: more than {MAX_DOTS} dots in one line")
    return tomllib.loads(text)


PARSERS: dict[str, Callable[[str], Any]] = {
    "JSON": parse_json,
    "TOML": _read_toml,
    "YAML": lambda text: yaml.load(text, _Loader),
}


def _size_of(value: Any, levels: int = MAX_DEPTH) -> int:
    """Returns how many values a config holds. Raises ValueError for more than MAX_VALUES, or for
    more than so many levels.

    Functions that walk a config rely on it. A short file of nested aliases can stand for billions
    of values: each alias counts as often as it is used.
    """
    if levels < 0:
        raise ValueError(f"more than {MAX_DEPTH} levels deep")
    size = 0
    for *_, below in inside(value):
        size += 1 + _size_of(below, levels - 1)
        if size > MAX_VALUES:
            raise ValueError(TOO_MANY)
    return size


if __name__ == "__main__":
    sys.exit(main())
