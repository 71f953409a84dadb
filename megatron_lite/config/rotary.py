"""How a rotary embedding reaches longer sequences than it was trained on. ModelConfig inherits the
settings of the rules `yarn` and `longrope`, which have the names of Megatron's where it has them.

    rope      each frequency as it is, or by --use-rope-scaling (Llama 3.1), or of divided positions
    yarn      slow frequencies are divided by the factor, fast ones stay (arXiv 2309.00071)
    longrope  each frequency has a factor of its own that divides it (arXiv 2402.13753): one list
              for sequences up to the original length, and another for longer ones

Both rules also multiply queries and keys by a number, the `magnitude`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from megatron_lite.config.setting import setting, switch

# The constants of Llama 3.1, which Megatron has as well. A frequency whose wave is longer than the
# original length is slow. One whose wave is shorter than a quarter of it is fast.
ORIGINAL_LENGTH = 8192
SLOW_TURNS, FAST_TURNS = 1.0, 4.0
of_both = partial(setting, without="rope_type=yarn/longrope")
of_yarn = partial(setting, without="rope_type=yarn")
factors = partial(setting, default=(), nargs="+", above=0.0, needs=("rope_type=longrope",))


class RotaryScaling(NamedTuple):
    """How frequencies and positions change. The defaults change neither.

    frequency_factor: divides slow frequencies by Llama 3.1's rule; None: not used.
    position_factor: divides positions; None: not used.
    rule, factor, original_length: `--rope-type` and the settings of both rules.
    turns: within the original length, of yarn's frequencies that stay and of those that are
        divided by the factor. The share of the others grows from one to the other.
    divisors: longrope's two lists of the frequencies' divisors.
    magnitude: multiplies cosines and sines.
    """

    frequency_factor: float | None = None
    position_factor: int | None = None
    rule: str = "rope"
    factor: float = 1.0
    original_length: int = 0
    turns: tuple[float, float] = (0.0, 0.0)
    divisors: tuple[tuple[float, ...], ...] = ()
    magnitude: float = 1.0


NO_SCALING = RotaryScaling()


def yarn_magnitude(factor: float, mscale: float) -> float:
    """Returns 0.1 m ln(factor) + 1, by which yarn multiplies queries and keys; 1 up to factor 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True, kw_only=True)
class RotarySettings:
    """The settings of yarn and longrope.

    mscale, mscale_all_dim: yarn's magnitude is that of the first divided by that of the second.
    rope_attention_factor: the magnitude itself. None: by the formula of the rule.
    """

    rope_type: str | None = setting(
        "rotary frequencies as they are, or changed for longer sequences by yarn or longrope; "
        "derived: rope, or yarn with --multi-latent-attention, as in Megatron",
        choices=("rope", "yarn", "longrope"),
    )
    rotary_interleaved: bool = switch(
        "rotate pairs of neighbouring channels of a head, not one of each half",
        without="position_embedding_type=rope",
        excludes=("multi_latent_attention",),
        why="multi-latent attention has pairs of neighbours in any case",
    )
    rotary_base_local: int | None = setting(
        "base of the rotary frequencies of layers with a window, which are not scaled, as in "
        "Gemma 3; none: as those of the others",
        least=1,
        needs=("window_size",),
    )
    rotary_scaling_factor: float = of_both(
        "how many times as long sequences yarn or longrope is for", 1.0, above=0.0
    )
    original_max_position_embeddings: int = of_both(
        "length of sequences before yarn or longrope", 4096, least=2
    )
    rope_attention_factor: float | None = of_both(
        "number that multiplies queries and keys; derived: by the rule", above=0.0
    )
    beta_fast: float = of_yarn("turns of yarn's frequencies that stay", 32.0, above=0.0)
    beta_slow: float = of_yarn("turns of yarn's frequencies that are divided", 1.0, above=0.0)
    mscale: float = of_yarn("scale of yarn's magnitude", 1.0)
    mscale_all_dim: float = of_yarn("scale of the magnitude that divides yarn's", 0.0)
    short_factor: tuple[float, ...] = factors("longrope's divisors, up to the original length")
    long_factor: tuple[float, ...] = factors("longrope's divisors, beyond the original length")

    def scaling_by_rule(self) -> RotaryScaling:
        """Returns what --rope-type changes."""
        length, factor = self.original_max_position_embeddings, self.rotary_scaling_factor
        if self.rope_type is None or self.rope_type == "rope":
            return NO_SCALING
        scaling = RotaryScaling(None, None, self.rope_type, factor, length)
        if self.rope_type == "yarn":
            scaling = scaling._replace(turns=(self.beta_fast, self.beta_slow))
            magnitude = yarn_magnitude(factor, self.mscale)
            magnitude /= yarn_magnitude(factor, self.mscale_all_dim)
        else:
            scaling = scaling._replace(divisors=(self.short_factor, self.long_factor))
            magnitude = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(length))
        return scaling._replace(magnitude=self.rope_attention_factor or magnitude)
