"""Settings that differ from layer to layer: attention windows, and layers without rotary embedding.

    --window-size 128,0                  a query reads its own token and the 128 before it
    --window-attn-skip-freq 4            layers 3, 7, 11, .. (from 0) have no window
    --window-attn-skip-freq [1,1,0]*2    a list: 1 for a layer with the window, 0 for one without
    --no-rope-freq 4                     layers 3, 7, 11, .. do not rotate queries and keys
    --no-rope-freq ([0]*3+[1])*2         a list: 1 for a layer that does not rotate, 0 for others

The meaning is the one of Megatron-core's `is_layer_window_attention` and `no_rope_freq`, which
count layers from 1. The trap is --window-attn-skip-freq: a number marks the layers without the
window, and a list has 1 for the layers with it. Megatron evaluates a list as Python, which would
run any code in it. Here its text may have only numbers, lists of them, parentheses, + and *, and
every intermediate text is bounded, so that a short one such as [0]*999*999 cannot fill the memory.
"""

import re
from collections.abc import Callable

from .checks import quoted, shown

Pattern = int | tuple[int, ...]

LONGEST_TEXT = 10_000  # characters; the deepest models have a few hundred layers
LARGEST_NUMBER = 2**31


def parse_window(text: str) -> tuple[int, int]:
    """Returns (left, right) from "128,0" or "(128,0)".

    Raises ValueError if the text is no pair of whole numbers.
    """
    match = re.fullmatch(r"\(?\s*(-?\d{1,10})\s*,\s*(-?\d{1,10})\s*\)?", text.strip())
    if match is None:
        raise ValueError(
            f"--window-size {quoted(text)}: give two numbers, the tokens before and after a "
            "query that it reads, such as 128,0"
        )
    return int(match[1]), int(match[2])


def parse_pattern(flag: str, text: str) -> Pattern:
    """Returns a frequency from "4", or a tuple with one number for each layer from "([0]*3+[1])*2".

    Each rule replaces one operation by its result, those of multiplication first. Raises ValueError
    if what is left is neither.
    """
    left, before = re.sub(r"\s*([\[\](),+*])\s*", r"\1", text.strip()), ""
    while left != before and len(left) <= LONGEST_TEXT:
        before = left
        for rule, result in RULES:
            left = re.sub(rule, result, left, count=1)
            if left != before:
                break
    if re.fullmatch(r"\d{1,10}", left):
        return int(left)
    if len(left) > LONGEST_TEXT or not re.fullmatch(rf"\[{ITEMS},?\]", left):
        raise ValueError(
            f"{flag} {quoted(text)}: give a whole number, or a list with one number for each layer "
            "(at most some thousands), such as ([0]*3+[1])*2"
        )
    return tuple(map(int, re.findall(r"\d+", left)))


def _repeated(found: re.Match[str]) -> str:
    number, items, times = found.groups()
    return f"[{','.join([items] * (int(number or times) if items else 0))}]"


ITEMS = r"(?:\d{1,10}(?:,\d{1,10})*)?"
RULES: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (rf"\((\[{ITEMS}\])\)", r"\1"),
    (rf"(\d{{1,3}})\*\[({ITEMS})\]()", _repeated),
    (rf"()\[({ITEMS})\]\*(\d{{1,3}})(?!\d)", _repeated),
    (r"\[\]\+(?=\[)|(?<=\])\+\[\]", ""),
    (rf"\[({ITEMS})\]\+\[({ITEMS})\]", r"[\1,\2]"),
)


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


def check_pattern(name: str, pattern: Pattern, num_layers: int) -> None:
    """Raises ValueError unless the pattern is a frequency, or has a mark for each layer."""
    if isinstance(pattern, int):
        if pattern < 1:
            raise ValueError(f"{name}: give at least 1")
    elif len(pattern) != num_layers or not {*pattern} <= {0, 1}:
        raise ValueError(
            f"{name} must be a list of 0 and 1, one for each of --num-layers {num_layers} (got "
            f"{len(pattern)} numbers)"
        )


def spelled(pattern: Pattern) -> str:
    """Returns the value as the user types it after the flag."""
    return shown(str(pattern) if isinstance(pattern, int) else ",".join(map(str, pattern)))
