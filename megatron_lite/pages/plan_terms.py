"""The terms of a peak: how they are grouped, drawn and explained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_lite.pages.bars import NUM_COLORS
from megatron_lite.pages.figures import MeasureUnit, time_unit

MIB, GIB = 2**20, 2**30
GIBIBYTES = MeasureUnit("GiB", GIB)
TAGS = {
    "exact": "the run allocates exactly these bytes",
    "bound": "the run never holds more than this",
    "estimate": "an estimate",
}
WORKSPACE = "workspace"
# n is the number of data- and context-parallel ranks, which share the states.
FORMULAS = {
    "weights": "elements of the rank's weights x bytes of the dtype; under FSDP2 1/n of them in "
    "float32",
    "main weights": "4 bytes for each element, beside 16-bit weights; 1/n of it under ZeRO-1",
    "gradients": "4 bytes for each element, in whole buckets; 1/n of it under FSDP2",
    "optimizer states": "the update rule's float32 states (AdamW: two for each element); 1/n of it "
    "under ZeRO-1 and FSDP2",
    "rotary tables": "the tables of the rotary embedding, which all layers of a stage share",
    "states of generators": "the states of random-number generators that a replay restores",
    "activations kept for backward": "the kept bytes of all micro-batches in flight at the peak",
    "activations rebuilt by a replay": "what the running backward has rebuilt at the peak",
    "hidden states received early": "one [s, b, h] that arrives before its passage runs",
    "hidden states being sent": "those whose send to a neighbour has not ended",
    "arena of saved inputs": "the buffer of --contiguous-saved-activations",
    "copies in host memory": "what the policy keeps in host memory, on a CPU",
    WORKSPACE: "the tensors that the running operation holds only while it runs",
}
STATES = ("weights", "main weights", "gradients", "optimizer states")


def category(term: Mapping[str, Any]) -> str:
    """Returns the name under which a term is drawn.

    Workspaces of different operations, such as "workspace of the loss", are one category.
    """
    name = str(term["name"])
    return WORKSPACE if name.startswith(WORKSPACE) else name


def categories(terms: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the categories of the terms that are not empty, each with its weakest tag."""
    found: dict[str, str] = {}
    for term in terms:
        if term["bytes"]:
            name, tag = category(term), str(term["tag"])
            found[name] = max(found.get(name, tag), tag, key=_weakness)
    return found


def _weakness(tag: str) -> int:
    return [*TAGS].index(tag) if tag in TAGS else len(TAGS)


def hint(name: str, tag: str) -> str:
    """Returns the tag of a term, what the tag means, and the formula if it is known."""
    formula = f" {FORMULAS[name]}." if name in FORMULAS else ""
    return f"{tag}: {TAGS.get(tag, tag)}.{formula}"


def colors_of(details: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, int]:
    """Returns the colour of each term, the same in all figures of a verdict."""
    stages = [*details.get("stages", ()), {"terms": plan["peak_terms"]}]
    names = [*categories(term for stage in stages for term in stage["terms"])]
    names += [name for name, _ in details.get("grid", {}).get("terms", ())]
    return {name: place % NUM_COLORS for place, name in enumerate(dict.fromkeys(names))}


def seconds_text(seconds: float) -> str:
    """Returns a time in ms or s."""
    return time_unit(seconds).shown(seconds)
