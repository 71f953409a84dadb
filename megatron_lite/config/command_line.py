"""The flags of a configuration: the inverse of cli/arguments/. Standard library only.

A field's flag is its name with dashes. OFF_SWITCHES has the exceptions: the flags that turn a field
off. tests/config/test_command_line.py compares all of them with the parser.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megatron_lite.config.checks import flag
from megatron_lite.config.run import RunConfig

COMMAND_WIDTH = 80  # columns of a line
OFF_SWITCHES: Mapping[str, str] = {
    "bias_gelu_fusion": "--no-bias-gelu-fusion",
    "log_loss_scale_to_tensorboard": "--no-log-loss-scale-to-tensorboard",
    "add_bias_linear": "--disable-bias-linear",
    "overlap_p2p_comm": "--no-overlap-p2p-communication",
    "torch_fsdp2_reshard_after_forward": "--torch-fsdp2-no-reshard-after-forward",
    "recompute_tail_skip": "--no-recompute-tail-skip",
    "gradient_accumulation_fusion": "--no-gradient-accumulation-fusion",
    "check_for_nan_in_loss_and_grad": "--no-check-for-nan-in-loss-and-grad",
    "muon_split_qkv": "--muon-no-split-qkv",
    "data_sharding": "--no-data-sharding",
}


def flag_of(field: str) -> str:
    """Returns the flag that sets the field to another value than its default."""
    return OFF_SWITCHES.get(field, flag(field))


def flags_of(config: RunConfig, *, without: Collection[str] = ()) -> list[str]:
    """Returns the words of a command line that `parse_args` parses to an equal configuration.

    Fields with their default values are left out, and so are the fields in `without`.
    """
    words: list[str] = []
    for topic in dataclasses.fields(config):
        values = getattr(config, topic.name)
        for field in dataclasses.fields(values):
            value = getattr(values, field.name)
            if value != field.default and field.name not in without:
                words += flag_words(field.name, value)
    return words


def flag_words(field: str, value: Any) -> list[str]:
    """Returns the words of a command line that give the field this value, not its default."""
    return [flag_of(field), *_words(field, value)]


def shell_lines(words: Sequence[str], program: str = "-m") -> str:
    """Returns a command as lines of a shell, with one flag of the program a line.

    program: the word with which the program begins, such as -m of `-m megatron_lite train`.

    The words before the program are the launcher's, and keep their shell variables, such as
    $NODE_RANK. They stand on one line if it has at most 78 columns.
    """
    place = words.index(program) if program in words else 0
    launcher = " ".join(words[:place])
    if len(launcher) > 76:  # and " \\"
        launcher = launcher.replace(" --", " \\\n  --")
    rows = [launcher] if place else []
    for word in words[place:]:
        if not rows or word == program or word.startswith("--"):
            rows.append(shlex.quote(word))
        else:
            rows[-1] += f" {shlex.quote(word)}"
    return " \\\n  ".join(rows)


def filled_lines(words: Sequence[str]) -> str:
    """Returns a command as lines of a shell, with as many flags a line as fit COMMAND_WIDTH."""
    items: list[str] = []  # a flag with its values
    for word in words:
        if word.startswith("--") or not items:
            items.append(shlex.quote(word))
        else:
            items[-1] += f" {shlex.quote(word)}"
    rows = items[:1]
    for item in items[1:]:
        if len(rows[-1]) + len(item) + len("  \\") > COMMAND_WIDTH:
            rows.append(f"    {item}")
        else:
            rows[-1] += f" {item}"
    return " \\\n".join(rows)


def _words(field: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return []
    if field == "window_size":
        return [",".join(map(str, value))]
    if field in ("window_attn_skip_freq", "no_rope_freq") and not isinstance(value, int):
        return [f"[{','.join(map(str, value))}]"]
    return [str(one) for one in value] if isinstance(value, tuple) else [str(value)]
