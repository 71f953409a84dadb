"""Scales a rotary embedding for sequences longer than those it was trained on.

Two rules, of which a model may use both:

    frequencies    Llama 3.1's rule (`--use-rope-scaling`). Slow frequencies are divided by a
                   factor, fast ones stay, and those between them are a mixture of both.
    positions      Linear interpolation (arXiv 2306.15595). Every position is divided by a factor
                   (`--rotary-seq-len-interpolation-factor`).

Standard library only. model/rotary.py applies the rules.
"""

from __future__ import annotations

from typing import NamedTuple

# The constants of Llama 3.1, which Megatron has as well. A frequency whose wave is longer than the
# original length is slow. One whose wave is shorter than a quarter of it is fast.
ORIGINAL_LENGTH = 8192
SLOW_TURNS, FAST_TURNS = 1.0, 4.0


class RotaryScaling(NamedTuple):
    """The factors of both rules. None: the rule is not used.

    frequency_factor: divides slow frequencies.
    position_factor: divides positions.
    """

    frequency_factor: float | None = None
    position_factor: int | None = None


NO_SCALING = RotaryScaling()
