"""Trains a GPT: `python pretrain_gpt.py --flags`, under torchrun or srun for more than one rank.

Command line -> frozen RunConfig -> parallel state -> trainer -> run. A reader's way through the project starts here.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from arguments import arguments_table, parse_args
from megatron_lite.config.checks import InputError
from megatron_lite.config.run import RunConfig

# A fault that all ranks meet is reported once: the launcher ends the others while they wait.
RANK_0_SPEAKS_FIRST_S = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0 done, 1 the training failed, 2 a fault in the input."""
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    # All ranks parse the same flags: one of them is enough to say what is wrong.
    with contextlib.redirect_stderr(sys.stderr if rank == "0" else open(os.devnull, "w")):
        arguments = parse_args(sys.argv[1:] if argv is None else argv)
    if arguments.dump_config:
        print(arguments.config.to_json())
        return 0
    try:
        return train(arguments.config, arguments.notices)
    except InputError as error:
        if rank != "0":
            time.sleep(RANK_0_SPEAKS_FIRST_S)
        print(f"pretrain_gpt.py: {'' if rank == '0' else f'[rank {rank}] '}error: {error}", file=sys.stderr, flush=True)
        return 2


def train(config: RunConfig, notices: Sequence[str]) -> int:
    """Trains as the configuration says. Returns 0, or 1 where the training failed. InputError: a fault in files or launch."""
    from megatron_lite.data.tokenizers import resolve_vocabulary
    from megatron_lite.parallel.state import parallel_state
    from megatron_lite.training.build import build_trainer
    from megatron_lite.training.step import TrainingError

    config = replace(config, tokenizer=resolve_vocabulary(config.tokenizer))
    with parallel_state(config.parallel, seed=config.training.seed) as parallel:
        if parallel.rank == 0:
            print(*notices, arguments_table(config), sep="\n", flush=True)
            print(f"{parallel.world_size} rank(s): tensor-parallel {parallel.tp_size}, data-parallel {parallel.dp_size}, "
                  f"on {parallel.device.type}", flush=True)
        try:
            build_trainer(config, parallel).run()
        except TrainingError as error:
            if parallel.rank == 0:
                print(f"pretrain_gpt.py: error: {error}", file=sys.stderr, flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
