"""A memory budget for any model: `fit_memory_` puts the fastest policy that fits on it.

Importing this file loads neither torch nor what measures: the first fit does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from .fitting import Fit


def fit_memory_(
    model: nn.Module,
    budget: str | None,
    *,
    step: Callable[..., Any],
    optimizer: Any = None,
    layers_fqn: str | Sequence[str] | None = None,
    maximize: str | None = None,
) -> Fit:
    """Puts on the model the fastest recompute policy with which a step fits the budget.

    The step runs 11 times, on a CPU 12 times, and more often with few equal layers. Weights,
    gradients, generators and all that modules hold are then as before.
    Under torch.distributed every rank calls this function. The highest peak and the smallest
    budget of all ranks decide, and all ranks get the same policy.

    budget: such as "20GiB", for all that torch allocates on the model's device: weights, gradients,
        optimizer states, activations, logits and temporaries. On a CPU, tensors that exist before
        do not count if they belong to neither model nor optimizer. None: the policy is to keep
        everything, and the result tells what a step takes.
    step: runs a forward and its backward, such as `lambda: model(**batch).loss.backward()`. It may
        accumulate gradients over several. It must not update weights.
    optimizer: the optimizer, or what makes one of parameters, such as its class. Its states count
        as if they existed, and so does its update.
    layers_fqn: the names of the lists of layers. None: the outermost ones with a repeated layer.
    maximize: "batch" finds the largest micro-batch that fits. `step` then takes its size.

    Raises ValueError if the budget is too small, or if the model or the step cannot be measured.
    """

    from .fitting import confirmed_fit

    return confirmed_fit(model, budget, step, optimizer, layers_fqn, maximize)
