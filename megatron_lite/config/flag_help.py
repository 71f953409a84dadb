"""The texts of `--help` on flags of Megatron that the program refuses, ignores or renames."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lite.config import flags
from megatron_lite.config.help_format import paragraph
from megatron_lite.config.megatron_flags import REFUSED_FAMILIES


def help_on(topic: str) -> str | None:
    """Returns the text of `--help refused` or `--help ignored`, or None for another topic."""
    if topic == "refused":
        families = [
            (reason, [f"--{name}" for name in names.split()]) for reason, names in REFUSED_FAMILIES
        ]
        only = "\n".join(f"  {flag} {value}" for flag, value in flags.ONLY_VALUE.items())
        title = (
            "Flags of Megatron that are refused, since they would change numbers, or would not do "
            "what they promise:"
        )
        return (
            f"{paragraph(title)}\n\n{_by_reason(families)}\n\n"
            f"These are accepted with the value that changes nothing:\n{only}"
        )
    if topic == "ignored":
        rows: dict[str, list[str]] = {}
        for flag, ignored in flags.ignored_flags().items():
            rows.setdefault(f"no effect {ignored.reason}", []).append(flag)
        title = (
            "Flags of Megatron, of all its releases, that are accepted and have no effect on the "
            "results:"
        )
        return f"{paragraph(title)}\n\n{_by_reason(list(rows.items()))}"
    return None


def fate_of(word: str) -> str | None:
    """Returns one line on a flag of Megatron that this program renames, refuses or ignores.

    word: the flag in lower case, with or without its two dashes. Returns None for any other word.
    """
    flag = word if word.startswith("--") else f"--{word}"
    if new := flags.RENAMED.get(flag):
        return f"{flag} is an old spelling of {new}"
    if ignored := flags.ignored_flags().get(flag):
        return f"{flag} is accepted and has no effect {ignored.reason}"
    if reason := flags.refusal_reason(flag):
        return f"{flag} is refused: {reason}"
    return None


def _by_reason(rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    return "\n".join(
        f"{paragraph(reason)}\n{paragraph(' '.join(names), indent='  ')}" for reason, names in rows
    )
