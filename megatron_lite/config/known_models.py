"""Well-known models by name, as the fields of ModelConfig and the size of the vocabulary.

known_models.json has the sizes of the papers and of the models' published configurations: Llama
(arXiv 2407.21783, 2307.09288), Qwen3 (2505.09388), Mixtral (2401.04088), and 22b to 1t (2205.05198,
table 3). Every preset has its published number of parameters (tests/config/test_json.py).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lite.config.checks import InputError
from megatron_lite.config.plain import parse_json, shown


class Preset(NamedTuple):
    """A model. fields: those of ModelConfig that differ from the defaults. vocab_size: V."""

    fields: Mapping[str, Any]
    vocab_size: int


def _read() -> dict[str, Preset]:
    rows = parse_json(Path(__file__).with_name("known_models.json").read_text())
    return {
        name: Preset(vocab_size=row.pop("vocab_size"), fields=row) for name, row in rows.items()
    }


PRESETS: Mapping[str, Preset] = _read()


def preset(name: str) -> Preset:
    """Returns the model with this name.

    Raises InputError for an unknown name, with the names that are nearest to it.
    """
    if name not in PRESETS:
        near = nearest_presets(name)
        meant = f"did you mean {' or '.join(near)}? The names are" if near else "give one of"
        raise InputError(
            f"--model {shown(repr(name))} is not known: {meant} {', '.join(PRESETS)}; for another "
            "model give --hf-config FILE, or the flags of its sizes"
        )
    return PRESETS[name]


def nearest_presets(name: str) -> list[str]:
    """Returns up to three names of presets, nearest first, for a name that is none.

    Only letters and digits count, so `meta-llama/Meta-Llama-3-8B` is near to `llama3-8b`.
    """
    plain = {re.sub(r"[^a-z0-9]", "", known): known for known in PRESETS}
    word = re.sub(r"[^a-z0-9]", "", name.lower().rpartition("/")[2])
    if word in plain:
        return [plain[word]]
    return [plain[one] for one in difflib.get_close_matches(word, plain, n=3, cutoff=0.65)]
