"""The forward hooks of modules, which torch shows by no public name."""

from __future__ import annotations

from torch import nn


def modules_with_hooks(model: nn.Module) -> list[str]:
    """Returns the names of the modules of `model`, itself included, that have forward hooks."""
    return [
        name
        for name, module in model.named_modules()
        if module._forward_hooks or module._forward_pre_hooks
    ]
