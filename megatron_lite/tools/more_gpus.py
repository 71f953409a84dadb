"""The planner's answer to a run that fits on none of the given numbers of GPUs: how many it needs.

Standard library only.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence

from megatron_lite.memory.predict.parameter_counts import parameter_count
from megatron_lite.parallel.messages import told_on_terminal
from megatron_lite.plan.auto_policy import Budget
from megatron_lite.plan.fit_verdict import DOES_NOT_FIT, FitVerdict, fewest_ranks
from megatron_lite.plan.layouts import Problem
from megatron_lite.plan.plan_text import WIDTH

MORE_DO_NOT_HELP = (
    "More GPUs alone do not help, as far as was tried. Shorten --seq-length, give more "
    "--memory-budget or --host-memory, or fix fewer settings."
)


def more_gpus(
    problem: Problem, budget: Budget, verdicts: Sequence[FitVerdict], typed: Sequence[str]
) -> list[str]:
    """Returns the lines about the fewest GPUs on which the run fits, with a command to try.

    typed: the command line, which begins with the name of the program. The result is empty if one
    of the verdicts is better than DOES_NOT_FIT.
    """
    if any(one.word != DOES_NOT_FIT for one in verdicts):
        return []
    base, tried = problem.base, max(one.num_ranks for one in verdicts)
    parameters = parameter_count(base.model, base.tokenizer.true_vocab_size)
    with told_on_terminal(f"searching the fewest GPUs that are enough, of more than {tried}"):
        count = fewest_ranks(problem, budget, parameters, above=tried)
    if count is None:
        return ["", *textwrap.wrap(MORE_DO_NOT_HELP, WIDTH)]
    return [
        "",
        f"It fits on {count} GPUs, the fewest of 2, 4, 8, ... This command has the plans:",
        f"  {_with_gpus(typed, count)}",
    ]


def _with_gpus(typed: Sequence[str], count: int) -> str:
    """Returns the command line with another number of GPUs."""
    program, *words = typed
    for place, word in enumerate(words):
        if word == "--gpus":
            words[place + 1] = f"{count}"
        elif word.startswith("--gpus="):
            words[place] = f"--gpus={count}"
    return f"{program} {shlex.join(words)}"
