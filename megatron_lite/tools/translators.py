"""Translates other systems' activation checkpointing. Each system has a file: torchtune.py ...

Each `from_...` takes that system's own config, the whole of it or its part on activation
checkpointing. It returns a Translation, whose `flags` are the flags to give here. A note names
every value that has no counterpart. A config that the original refuses raises ValueError. A value
of the wrong type does so too, and an unknown key in that part, which most of the systems ignore
silently. `docs/coming-from.md` has a table for each system; the command is
`tools/translate_recompute.py`.

Two rules hold for all systems. "Every n-th layer" begins with the n-th layer: n = 2 selects layers
1, 3, 5 of a stage, by their number from 0. torchtune, torchtitan and Modalities count calls with
one counter per process instead, which continues in a second model. And a replay always draws the
dropout masks of its forward, even if the original would not restore the generators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_lite.tools.deepspeed import (
    DEEPSPEED_FILE,
    DEEPSPEED_KEYS,
    SECTION,
    from_deepspeed,
    is_of_section,
)
from megatron_lite.tools.modalities import from_modalities, is_modalities
from megatron_lite.tools.oslo import OSLO_FILE, OSLO_KEYS, from_oslo
from megatron_lite.tools.torchtitan import from_torchtitan, is_torchtitan
from megatron_lite.tools.torchtune import from_torchtune, is_torchtune
from megatron_lite.tools.translation import Translation

# The translation of each system's config. Those in PARTITIONING take `tp_size`, that of Modalities
# takes `component`.
PARTITIONING: dict[str, Callable[..., Translation]] = {
    "deepspeed": from_deepspeed,
    "oslo": from_oslo,
}
SYSTEMS: dict[str, Callable[..., Translation]] = {
    "torchtune": from_torchtune,
    "torchtitan": from_torchtitan,
    "modalities": from_modalities,
    **PARTITIONING,
}
# The functions that return whether a config is clearly one of a system.
RECOGNITION: dict[str, Callable[[Any], bool]] = {
    "torchtune": is_torchtune,
    "torchtitan": is_torchtitan,
    "modalities": is_modalities,
    "deepspeed": lambda config: is_of_section(config, DEEPSPEED_FILE, DEEPSPEED_KEYS),
    "oslo": lambda config: is_of_section(config, OSLO_FILE, ("enable", *OSLO_KEYS)),
}


def systems_of(config: Any) -> tuple[str, ...]:
    """Returns the systems whose config this may be, by the keys that only they have.

    The result is empty if no key decides.
    """
    if not isinstance(config, Mapping):
        return ()
    found = tuple(system for system, is_one in RECOGNITION.items() if is_one(config))
    undecided = not found and isinstance(config.get(SECTION), Mapping)
    return ("deepspeed", "oslo") if undecided else found
