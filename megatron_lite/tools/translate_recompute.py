"""`python -m megatron_lite.tools.translate_recompute --from deepspeed --json ds_config.json --tp 2`: their config as our flags.

The file holds the config of the other system, or the part of it that `recompute/presets.py` names, as JSON. The flags go to
stdout, quoted for a shell; a note on each value without a counterpart goes to stderr. No torch.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megatron_lite.config.checks import InputError
from megatron_lite.recompute import presets
from megatron_lite.recompute.presets import Translation
from megatron_lite.tools.command import exit_status

MAX_FILE_BYTES = 2**20
PARTITIONING: dict[str, Callable[..., Translation]] = {"deepspeed": presets.from_deepspeed, "oslo": presets.from_oslo}
SYSTEMS: dict[str, Callable[..., Translation]] = {"torchtune": presets.from_torchtune, "torchtitan": presets.from_torchtitan,
                                                  "modalities": presets.from_modalities, **PARTITIONING}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_lite.tools.translate_recompute", allow_abbrev=False,
        description="Prints the recompute flags that do what another system's activation checkpointing config asks for.")
    parser.add_argument("--from", dest="system", required=True, choices=SYSTEMS, help="whose config it is")
    parser.add_argument("--json", required=True, metavar="FILE", help="the config, or its part on activation checkpointing")
    parser.add_argument("--tp", type=int, metavar="N", help="deepspeed, oslo: the tensor-parallel size of the run (default: 1)")
    args = parser.parse_args(argv)
    if args.tp is not None and args.system not in PARTITIONING:
        parser.error(f"--tp belongs to {' and '.join(PARTITIONING)} (got --from {args.system})")
    return exit_status(lambda: translate(args.system, args.json, args.tp))


def translate(system: str, path: str, tp_size: int | None) -> None:
    """Prints the flags and notes. OSError if the file cannot be read; InputError, which names it, for what is in it."""
    convert = SYSTEMS[system]
    if system in PARTITIONING:
        convert = partial(convert, tp_size=1 if tp_size is None else tp_size)
    config = _read(path)
    try:
        translation = convert(config)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    for note in translation.notes:
        print(f"note: {note}", file=sys.stderr)
    print(shlex.join(translation.flags))


def _read(path: str) -> Any:
    with open(path, "rb") as file:
        text = file.read(MAX_FILE_BYTES + 1)
    if len(text) > MAX_FILE_BYTES:
        raise InputError(f"{path}: larger than {MAX_FILE_BYTES // 2**20} MiB, so not a config")
    try:
        return json.loads(text, object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError; deep nesting ends in the other
        raise InputError(f"{path}: not JSON ({error})") from None


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. ValueError where a key stands in it twice, of which json would drop one."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:40]!r} stands twice in one object")
        found[key] = value
    return found


if __name__ == "__main__":
    sys.exit(main())
