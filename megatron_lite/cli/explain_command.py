"""The subcommand `megatron-lite explain`: --explain-recompute of the program that trains."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Sequence

from megatron_lite.cli import pretrain
from megatron_lite.config.invocation import subcommand
from megatron_lite.config.known_models import PRESETS
from megatron_lite.parallel.signals import dies_without_reader
from megatron_lite.plan.hardware import machine_names

USUAL_LENGTH = 8192  # the longest --seq-length that is assumed

HELP = """usage: {program} FLAGS

Prints, layer by layer, what a run keeps for backward, rebuilds and sends, the
memory of each rank, and what other recompute flags would do. It trains nothing
and needs no GPU.

FLAGS are those of the run, of which only sizes and layout are needed:
  {program} --model llama3-8b --recompute-policy 'every-2:full'
  {program} --hf-config config.json --seq-length 8192 --micro-batch-size 1

--model NAME, or --preset NAME, is one of
{names}.
It assumes --bf16, --micro-batch-size 1 and a --seq-length, and says so.
--gpu NAME, or --machine FILE, is the machine of the run, one of
{machines}.

`{train} --help` has the topics of all flags, and
`--help recompute` those of recomputation.
"""


def main(argv: Sequence[str], program: str = "megatron-lite explain") -> int:
    """Prints the explanation and returns the exit status."""
    if not argv or argv[-1] in ("-h", "--help"):
        text = HELP.format(
            program=program,
            names=textwrap.fill(", ".join(PRESETS), 80),
            train=" ".join(subcommand(program, "train")),
            machines=", ".join(machine_names()),
        )
        with dies_without_reader():
            print(text, end="")
        return 0 if argv else 2
    assumed = assumed_words(argv)
    if assumed:
        with dies_without_reader():
            print(f"assumed for this model: {' '.join(assumed)}")
    # The planner's --gpu takes the names that --machine takes here.
    renamed = [re.sub("^--gpu(?==|$)", "--machine", word) for word in argv]
    return pretrain.main([*renamed, *assumed, "--explain-recompute"], program)


def assumed_words(argv: Sequence[str]) -> list[str]:
    """Returns the flags that a command line with a known `--model` lacks, with usual values."""
    words = [part for word in argv for part in word.split("=", 1)]
    given = {word.replace("_", "-") for word in words}
    names = [
        name
        for flag, name in itertools.pairwise(words)
        if flag in ("--model", "--preset") and name in PRESETS
    ]
    if not names:
        return []
    positions = PRESETS[names[0]].fields["max_position_embeddings"]
    usual = {
        ("--seq-length",): ["--seq-length", str(min(positions, USUAL_LENGTH))],
        ("--micro-batch-size",): ["--micro-batch-size", "1"],
        ("--bf16", "--fp16", "--no-bf16"): ["--bf16"],
    }
    return [word for flags, words in usual.items() if not given & {*flags} for word in words]
