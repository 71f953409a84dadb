"""Translates the section `activation_checkpointing` of OSLO configs. See translators.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lite.tools.deepspeed import SECTION, size_of_file, stored
from megatron_lite.tools.translation import KEEP, Translation, notes_elsewhere, section, typed

OSLO_KEYS = ("partitioned_checkpointing", "cpu_checkpointing", "contiguous_checkpointing")
OSLO_FILE = (
    "model_parallelism",
    "data_parallelism",
    "tensor_parallelism",
    "sequence_parallelism",
    "pipeline_parallelism",
    "expert_parallelism",
    "kernel_fusion",
    "lazy_initialization",
    "tensor_parallel_size",
)
OSLO_SIZES = (
    ("model_parallelism", "tensor_parallel_size"),
    ("tensor_parallelism", "parallel_size"),
)


def from_oslo(config: Mapping[str, Any], *, tp_size: int | None = None) -> Translation:
    """Translates the section `activation_checkpointing` of an OSLO config.

    tp_size: the tensor-parallel size. Partitioning needs it, unless the file has it.
    Without `enable` nothing is rebuilt. OSLO partitions in place, and its contiguous memory is a
    list of tensors: see `from_deepspeed` for the difference.
    """
    given = typed(
        section(config, "oslo", SECTION),
        f"oslo: {SECTION}",
        file=config,
        enable=bool,
        **dict.fromkeys(OSLO_KEYS, bool),
    )
    notes = notes_elsewhere("oslo", config, (SECTION,))
    size = size_of_file("oslo", config, OSLO_SIZES)
    if given.get("enable", False):
        return stored("oslo", given, OSLO_KEYS, tp_size, size, notes)
    idle = tuple(
        f"oslo: {name} does nothing without enable true" for name in OSLO_KEYS if given.get(name)
    )
    return Translation(KEEP, notes=(*idle, *notes))
