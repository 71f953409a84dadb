"""Translates the section `activation_checkpointing` of DeepSpeed configs.

OSLO has the same section with other keys: oslo.py. translators.py has the rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lite.config.policy import LayerAction, Policy, Rule
from megatron_lite.tools.translation import (
    EVERY,
    Translation,
    notes_elsewhere,
    require,
    resolved,
    section,
    shown,
    typed,
    without_counterpart,
)

SECTION = "activation_checkpointing"  # in configs of DeepSpeed and OSLO
DEEPSPEED_KEYS = (
    "partition_activations",
    "cpu_checkpointing",
    "contiguous_memory_optimization",
    "number_checkpoints",
    "synchronize_checkpoint_boundary",
    "profile",
)
DEEPSPEED_FILE = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "zero_optimization",
    "steps_per_print",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
)


def from_deepspeed(config: Mapping[str, Any], *, tp_size: int | None = None) -> Translation:
    """Translates the section `activation_checkpointing` of a DeepSpeed config.

    tp_size: the tensor-parallel size. Partitioning needs it, unless the file has it.
    The section decides where the input of each recomputed unit is stored. In DeepSpeed the calling
    code decides which layers are units; here every layer is one. Three things differ:

    DeepSpeed partitions in place, so in evaluation the caller is left with a shard. Here the
    caller's tensor never changes.
    DeepSpeed's contiguous memory is a list of tensors that overflows unless `reset()` is called.
    Here it is one buffer sized by the plan, without `number_checkpoints`.
    Partitioning over one rank does nothing in DeepSpeed. Here it is an error.
    """
    given = typed(
        section(config, "deepspeed", SECTION),
        f"deepspeed: {SECTION}",
        file=config,
        partition_activations=bool,
        cpu_checkpointing=bool,
        contiguous_memory_optimization=bool,
        number_checkpoints=(int, type(None)),
        synchronize_checkpoint_boundary=bool,
        profile=bool,
    )
    count = given.get("number_checkpoints")
    require(
        count is None or count >= 1,
        f"deepspeed: number_checkpoints must be at least 1 or null (got {shown(count)})",
    )
    notes = without_counterpart(
        "deepspeed",
        given,
        number_checkpoints="the buffer is sized by the plan",
        synchronize_checkpoint_boundary="nothing waits for the device within a step",
        profile="--memory-timeline shows the replays of a step",
    )
    size = size_of_file("deepspeed", config, (("tensor_parallel", "autotp_size"),))
    notes += notes_elsewhere("deepspeed", config, (SECTION,))
    return stored("deepspeed", given, DEEPSPEED_KEYS[:3], tp_size, size, notes)


def is_of_section(
    config: Mapping[str, Any], of_file: tuple[str, ...], of_section: tuple[str, ...]
) -> bool:
    """Returns whether a config has keys of DeepSpeed or of OSLO that the other system lacks."""
    inside = config.get(SECTION)
    keys = set(of_section) - {"cpu_checkpointing"}  # which both systems have
    return not set(of_file).isdisjoint(config) or (
        isinstance(inside, Mapping) and not keys.isdisjoint(inside)
    )


def size_of_file(
    system: str, config: Mapping[str, Any], places: tuple[tuple[str, str], ...]
) -> tuple[str, int] | None:
    """Returns the tensor-parallel size of a file with the key that has it, or None.

    A section with `enable` false does not count. Raises ValueError if the file has different sizes.
    """
    candidates: list[tuple[str, Any]] = (
        [("tensor_parallel_size", config["tensor_parallel_size"])]
        if "tensor_parallel_size" in config
        else []
    )
    for name, key in places:
        part = config.get(name)
        if isinstance(part, Mapping) and key in part and part.get("enable") is not False:
            candidates.append((f"{name}.{key}", part[key]))
    sizes = {place: resolved(value, config, f"{system}: {place}") for place, value in candidates}
    for place, size in sizes.items():
        require(
            type(size) is int and size >= 1,
            f"{system}: {place} must be a number of ranks from 1 (got {shown(size)})",
        )
    require(
        len(set(sizes.values())) < 2,
        f"{system}: {' and '.join(sizes)} contradict each other: {shown(list(sizes.values()))}",
    )
    return next(iter(sizes.items()), None)


def stored(
    system: str,
    given: Mapping[str, Any],
    names: tuple[str, ...],
    tp_size: int | None,
    of_file: tuple[str, int] | None,
    notes: tuple[str, ...],
) -> Translation:
    """Returns the translation in which every layer is a unit.

    names: the keys for keeping 1/t of a unit's input on each rank, for host memory, and for one
        contiguous buffer.
    tp_size: the tensor-parallel size that the caller gave. of_file: the key and size of the file.
    """
    split, host = (given.get(name, False) for name in (names[0], "cpu_checkpointing"))
    contiguous = given.get(names[2], False)
    require(
        tp_size is None or tp_size >= 1,
        f"the tensor-parallel size must be at least 1 (got {tp_size})",
    )
    if of_file is not None:
        require(
            tp_size in (None, of_file[1]),
            f"{system}: the tensor-parallel size {tp_size} contradicts {of_file[0]} "
            f"{of_file[1]} of the file: leave one of them out",
        )
    require(split or not contiguous, f"{system}: {names[2]} needs {names[0]} true")
    size = tp_size if of_file is None else of_file[1]
    require(
        not split or size is not None,
        f"{system}: {names[0]} splits inputs over tensor-parallel ranks, and the file does "
        "not say how many there are: give --tp N",
    )
    where = "" if of_file is None else f" in {of_file[0]}"
    require(
        not split or size != 1,
        f"{system}: {names[0]} needs a tensor-parallel size > 1 (got 1{where}): set it to "
        "false, since one rank has nobody to share an input with",
    )
    store = (
        "+".join(word for word, wanted in (("split", split), ("host", host)) if wanted) or "device"
    )
    return Translation(
        Policy((Rule(layers=EVERY, action=LayerAction(unit=1), store=store),)),
        contiguous,
        notes=notes,
        tensor_model_parallel_size=of_file[1] if split and of_file is not None else None,
    )
