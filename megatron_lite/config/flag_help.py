"""The texts of `--help refused` and `--help ignored`: Megatron's flags by what happens to them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from megatron_lite.config import flags
from megatron_lite.config.megatron_flags import REFUSED_FAMILIES


def help_on(topic: str) -> str | None:
    """Returns the text of `--help refused` or `--help ignored`, or None for another topic."""
    if topic == "refused":
        families = [
            (reason, [f"--{name}" for name in names.split()]) for reason, names in REFUSED_FAMILIES
        ]
        only = "\n".join(f"  {flag} {value}" for flag, value in flags.ONLY_VALUE.items())
        return (
            "Flags of Megatron that are refused, since they would change numbers, or would not do "
            f"what they promise:\n\n{_by_reason(families)}\n\n"
            f"These are accepted with the value that changes nothing:\n{only}"
        )
    if topic == "ignored":
        rows: dict[str, list[str]] = {}
        for flag, ignored in flags.ignored_flags().items():
            rows.setdefault(f"no effect {ignored.reason}", []).append(flag)
        return (
            "Flags of Megatron, of all its releases, that are accepted and have no effect on the "
            f"results:\n\n{_by_reason(list(rows.items()))}"
        )
    return None


def _by_reason(rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    return "\n".join(
        f"{reason}\n"
        + textwrap.fill(
            " ".join(names),
            96,
            initial_indent="  ",
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for reason, names in rows
    )
