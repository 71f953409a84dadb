"""Settings that differ from layer to layer: attention windows, and layers without rotary embedding.

    --window-size 128,0                  a query reads its own token and the 128 before it
    --window-attn-skip-freq 4            layers 3, 7, 11, .. (from 0) have no window
    --window-attn-skip-freq [1,1,0]*2    a list: 1 for a layer with the window, 0 for one without
    --no-rope-freq 4                     layers 3, 7, 11, .. do not rotate queries and keys
    --no-rope-freq ([0]*3+[1])*2         a list: 1 for a layer that does not rotate, 0 for others

The meaning is the one of Megatron-core's `is_layer_window_attention` and `no_rope_freq`, which
count layers from 1. The trap is --window-attn-skip-freq: a number marks the layers without the
window, and a list has 1 for the layers with it. pattern_text.py parses the text of a list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_lite.config.json_text import shown
from megatron_lite.config.pattern_text import LARGEST_NUMBER, Pattern

if TYPE_CHECKING:
    from megatron_lite.config.model import ModelConfig

UNLIMITED = -1  # Megatron's value for a side of the window without an end


def marks(pattern: Pattern, layer: int) -> bool:
    """Returns whether the pattern marks the layer, which counts from 0.

    A list marks the layers for which it has 1. A number N marks the N-th layer, the 2N-th, and so
    on.
    """
    return (layer + 1) % pattern == 0 if isinstance(pattern, int) else pattern[layer] == 1


def reach(window: tuple[int, int] | None, seq_length: int) -> int | None:
    """Returns how many tokens before its own a query reads, or None if the window limits no query.

    A window that covers the whole sequence limits no query.
    """
    return None if window is None or window[0] >= seq_length - 1 else window[0]


def check_layers(model: ModelConfig) -> None:
    """Raises ValueError if a window or rotary setting breaks a rule, or if two contradict."""
    _check_window(model)
    pattern = model.no_rope_freq
    if pattern is None:
        return
    _check_pattern("--no-rope-freq", pattern, model.num_layers)
    if not model.positions.rotated:
        raise ValueError(
            f"--no-rope-freq {_spelled(pattern)} takes rotary embedding out of some layers, and "
            f"--position-embedding-type {model.position_embedding_type} has none: give "
            "--position-embedding-type rope, or leave --no-rope-freq out"
        )
    if isinstance(pattern, int) and model.num_layers % pattern:
        raise ValueError(
            f"--no-rope-freq {pattern} does not divide --num-layers {model.num_layers}: give a "
            "divisor, or a list with one number for each layer"
        )
    if _marks_all(pattern):
        raise ValueError(
            f"--no-rope-freq {_spelled(pattern)} leaves no layer that rotates: give "
            "--position-embedding-type none instead"
        )


def notices(model: ModelConfig, seq_length: int) -> list[str]:
    """Returns one line for each of these settings that is legal and has no effect."""
    lines, skipped = [], model.window_attn_skip_freq
    if model.window_size is not None and reach(model.window_size, seq_length) is None:
        lines.append(
            f"--window-size {_spelled(model.window_size)} limits nothing: no token of --seq-length "
            f"{seq_length} is {model.window_size[0] + 1} or more tokens away from another"
        )
    if skipped is not None and (
        skipped > model.num_layers if isinstance(skipped, int) else _marks_all(skipped)
    ):
        lines.append(
            f"--window-attn-skip-freq {_spelled(skipped)} has no effect: it gives all "
            f"{model.num_layers} layers the window"
        )
    if isinstance(model.no_rope_freq, tuple) and not any(model.no_rope_freq):
        lines.append(
            f"--no-rope-freq {_spelled(model.no_rope_freq)} has no effect: every layer rotates"
        )
    return lines


def _check_window(model: ModelConfig) -> None:
    window, pattern = model.window_size, model.window_attn_skip_freq
    if window is None:
        if pattern is not None:
            raise ValueError(
                f"--window-attn-skip-freq {_spelled(pattern)} says which layers have no window, "
                "and no layer has one: give --window-size LEFT,0 too"
            )
        return
    if len(window) != 2 or not all(UNLIMITED <= side <= LARGEST_NUMBER for side in window):
        raise ValueError(
            f"--window-size {_spelled(window)}: give two numbers, the tokens before and after a "
            "query that it reads, such as 128,0"
        )
    left, right = window
    if right != 0:
        raise ValueError(
            f"--window-size {left},{right}: the model is causal and no query reads a later token, "
            f"so the second number must be 0: give {left},0"
        )
    if left == UNLIMITED:
        raise ValueError(
            f"--window-size {left},{right} limits nothing, since -1 is a window without an "
            "end: leave it out"
        )
    if pattern is None:
        return
    _check_pattern("--window-attn-skip-freq", pattern, model.num_layers)
    if pattern == 1 if isinstance(pattern, int) else not any(pattern):
        raise ValueError(
            f"--window-attn-skip-freq {_spelled(pattern)} leaves no layer with --window-size "
            f"{_spelled(window)}: leave both out"
        )


def _check_pattern(flag: str, pattern: Pattern, num_layers: int) -> None:
    if isinstance(pattern, int):
        if pattern < 1:
            raise ValueError(f"{flag} must be at least 1 (got {pattern})")
        return
    if len(pattern) != num_layers:
        raise ValueError(
            f"{flag} has {len(pattern)} numbers for --num-layers {num_layers}: give one for "
            "each layer"
        )
    if not set(pattern) <= {0, 1}:
        wrong = next(number for number in pattern if number not in (0, 1))
        raise ValueError(f"{flag} must be a list of 0 and 1 (got {wrong})")


def _marks_all(pattern: Pattern) -> bool:
    return pattern == 1 if isinstance(pattern, int) else all(pattern)


def _spelled(pattern: Pattern) -> str:
    """Returns the value as the user types it after the flag."""
    return shown(str(pattern) if isinstance(pattern, int) else ",".join(map(str, pattern)))
