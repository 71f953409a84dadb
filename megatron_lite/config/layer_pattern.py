"""Settings that differ from layer to layer: attention windows, and layers without rotary embedding.

    --window-size 128,0                  a query reads its own token and the 128 before it
    --window-attn-skip-freq 4            layers 3, 7, 11, .. (from 0) have no window
    --window-attn-skip-freq [1,1,0]*2    a list: 1 for a layer with the window, 0 for one without
    --no-rope-freq 4                     layers 3, 7, 11, .. do not rotate queries and keys
    --no-rope-freq ([0]*3+[1])*2         a list: 1 for a layer that does not rotate, 0 for others

The meaning is the one of Megatron-core's `is_layer_window_attention` and `no_rope_freq`, which
count layers from 1. The trap is --window-attn-skip-freq: a number marks the layers without the
window, and a list has 1 for the layers with it. Megatron evaluates a list as Python, which would
run any code in it. Here its text may have only numbers, lists, parentheses, + and *, and every
intermediate value is bounded, so that a short text such as [0]*9999*9999 cannot fill the memory.
"""

import ast
import re
from itertools import accumulate
from typing import Any

from megatron_lite.config.checks import quoted
from megatron_lite.config.plain import shown

Pattern = int | tuple[int, ...]

LONGEST_TEXT = 10_000  # characters
LONGEST_LIST = 10_000  # layers; the deepest models have a few hundred
MOST_NESTED, MOST_OPERATORS = 50, 500
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

    Raises ValueError if the text is neither.
    """
    try:
        value = _value_of(_tree_of(text))
    except (ValueError, TypeError, RecursionError) as fault:
        raise ValueError(
            f"{flag} {quoted(text)}: {fault}; give a whole number, or a list with one number for "
            "each layer, such as ([0]*3+[1])*2"
        ) from None
    return value if isinstance(value, int) else tuple(value)


def _tree_of(text: str) -> ast.expr:
    """Returns the syntax tree of a text, which is not evaluated. Raises ValueError for other
    characters than those of a pattern, and for too many characters, brackets or operators."""
    if wrong := re.search(r"[^0-9\s()\[\],+*]|\d{11,}", text):
        raise ValueError(f"{shown(wrong.group())!r} is no number, list or bracket")
    depths = accumulate((one in "([") - (one in ")]") for one in text)
    if (
        len(text) > LONGEST_TEXT
        or max(depths, default=0) > MOST_NESTED
        or len(re.findall("[+*]", text)) > MOST_OPERATORS
    ):
        raise ValueError(
            f"more than {LONGEST_TEXT} characters, {MOST_NESTED} brackets or {MOST_OPERATORS} "
            "operators: write repeated parts as [0]*3"
        )
    try:
        # Python has no numbers with leading zeros
        return ast.parse(re.sub(r"\b0+(?=\d)", "", text.strip()), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"it is no list ({error.msg})") from None


def _value_of(node: ast.expr) -> Any:
    """Returns a number or a list of numbers. Raises ValueError or TypeError for anything else."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.List(elts=parts):
            numbers = [_value_of(one) for one in parts]
            if list in map(type, numbers):
                raise ValueError("a list inside a list: join lists with +")
            return numbers
        case ast.BinOp(op=ast.Add() | ast.Mult()):
            left, right = _value_of(node.left), _value_of(node.right)
        case _:
            raise ValueError(f"{ast.unparse(node)[:40]!r} is no number, list, sum or product")
    sizes = [len(one) if isinstance(one, list) else one for one in (left, right)]
    is_sum = isinstance(node.op, ast.Add)
    # The size is known before the value is built: [0]*9999*9999 cannot fill the memory.
    size = sum(sizes) if is_sum else sizes[0] * sizes[1]
    if size > (LONGEST_LIST if list in (type(left), type(right)) else LARGEST_NUMBER):
        raise ValueError(f"{size} is more than {LONGEST_LIST} layers")
    return left + right if is_sum else left * right


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
