"""The subcommand `megatron-lite explain`: --explain-recompute of the program that trains."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from megatron_lite.cli import pretrain
from megatron_lite.config.invocation import subcommand
from megatron_lite.config.known_models import PRESETS
from megatron_lite.parallel.signals import dies_without_reader
from megatron_lite.plan.hardware import machine_names

WIDTH = 80
USUAL_LENGTH = 8192  # the longest --seq-length that is assumed

HELP = """usage: {program} FLAGS

Prints, layer by layer, what a run keeps for backward, rebuilds and sends, the
memory of each rank, and what other recompute flags would do. It trains nothing
and needs no GPU.

FLAGS are the flags of the run. Only those of sizes and layout are needed:
  {program} --model llama3-8b \\
      --recompute-policy 'every-2:full'
  {program} --hf-config config.json \\
      --seq-length 8192 --micro-batch-size 1
  {program} --num-layers 32 --hidden-size 4096 \\
      --num-attention-heads 32 --seq-length 4096 \\
      --max-position-embeddings 4096 --micro-batch-size 1 --vocab-size 50257 \\
      --bf16 --recompute-granularity selective

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
    position = next((at for at, word in enumerate(argv) if word in ("-h", "--help")), None)
    if not argv or position == len(argv) - 1:
        with dies_without_reader():
            train = subcommand(program, "train")
            names = textwrap.fill(", ".join(PRESETS), WIDTH)
            machines = ", ".join(machine_names())
            words = " ".join(train)
            text = HELP.format(program=program, names=names, train=words, machines=machines)
            print(text, end="")
        return 0 if argv else 2
    assumed = assumed_words(argv)
    if assumed:
        with dies_without_reader():
            print(f"assumed for this model: {' '.join(assumed)}")
    # The planner's --gpu takes the names that --machine takes here.
    renamed = [
        f"--machine{equals}{value}" if name == "--gpu" else word
        for word in argv
        for name, equals, value in [word.partition("=")]
    ]
    return pretrain.main([*renamed, *assumed, "--explain-recompute"], program)


def assumed_words(argv: Sequence[str]) -> list[str]:
    """Returns the flags that a command line with a known `--model` lacks, with usual values."""
    given = {word.partition("=")[0].replace("_", "-") for word in argv}
    known = next((PRESETS[name] for name in _model_names(argv) if name in PRESETS), None)
    if known is None:
        return []
    positions = known.fields["max_position_embeddings"]
    usual = {
        ("--seq-length",): ["--seq-length", str(min(positions, USUAL_LENGTH))],
        ("--micro-batch-size",): ["--micro-batch-size", "1"],
        ("--bf16", "--fp16", "--no-bf16"): ["--bf16"],
    }
    return [word for flags, words in usual.items() if not given & {*flags} for word in words]


def _model_names(argv: Sequence[str]) -> Iterator[str]:
    """Yields the values of `--model NAME` and `--model=NAME`."""
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name in ("--model", "--preset"):
            yield value if equals else following
