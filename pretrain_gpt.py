"""Trains a GPT: `python pretrain_gpt.py --flags`, under torchrun or srun for more than one rank.

    command line -> frozen RunConfig -> parallel state -> trainer -> run

Start here to read the project. Continue in `megatron_lite/cli/pretrain.py`, which has the steps
above, and then in `megatron_lite/training/loop.py`. `megatron-lite train` runs the same program.
"""

from __future__ import annotations

import sys

from megatron_lite.parallel.signals import ctrl_c_ends, ctrl_c_raises, open_streams

if __name__ == "__main__":
    ctrl_c_ends()  # the imports below take a second

from megatron_lite.cli.pretrain import main, run, train

__all__ = ["main", "run", "train"]

if __name__ == "__main__":
    ctrl_c_raises()
    open_streams()
    sys.exit(main())
