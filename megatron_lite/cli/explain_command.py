"""The subcommand `megatron-lite explain`: --explain-recompute of the program that trains."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lite.cli import pretrain
from megatron_lite.parallel.signals import dies_without_reader

HELP = """usage: {program} FLAGS

Prints, layer by layer, what a run keeps for backward, rebuilds and sends, the memory of each rank,
and what other recompute flags would do. It trains nothing and needs no GPU.

FLAGS are the flags of the run. Only those of sizes and layout are needed, such as:
  {program} --num-layers 32 --hidden-size 4096 --num-attention-heads 32 \\
      --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 \\
      --vocab-size 50257 --bf16 --recompute-granularity selective
  {program} --hf-config config.json --seq-length 8192 --micro-batch-size 1

`megatron-lite train --help` has the topics of all flags; `--help recompute` those of recomputation.
"""


def main(argv: Sequence[str], program: str = "megatron-lite explain") -> int:
    """Prints the explanation and returns the exit status."""
    position = next((at for at, word in enumerate(argv) if word in ("-h", "--help")), None)
    if not argv or position == len(argv) - 1:
        with dies_without_reader():
            print(HELP.format(program=program), end="")
        return 0 if argv else 2
    return pretrain.main([*argv, "--explain-recompute"], program)
