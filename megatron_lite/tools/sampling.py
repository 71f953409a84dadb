"""The flags of `generate` that choose the next token. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.setting import check_settings, setting, switch


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The rule that chooses the next token.

    The order is: divide by the temperature, keep the top_k likeliest tokens (0: all), then keep the
    fewest of those whose probabilities reach top_p. `greedy` takes the likeliest token instead.
    """

    greedy: bool = switch("take the likeliest token each time")
    temperature: float = setting(
        "below 1: sharper, above 1: flatter",
        1.0,
        above=0,
        why="use --greedy for the likeliest token",
    )
    top_k: int = setting("draw from the K likeliest tokens; 0: all", 0, least=0)
    top_p: float = setting(
        "draw from the likeliest tokens that together reach P",
        0.9,
        above=0,
        most=1,
        why="1 keeps every token",
    )

    def __post_init__(self) -> None:
        check_settings(self)
