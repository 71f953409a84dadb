"""The optimizer states of a legacy Megatron checkpoint, by the names of the parameters.

The files number the states and do not name their parameters. Megatron's optimizer has a group of
parameters with weight decay and a group without it, each in the order of the model. The float32
weights beside the 16-bit ones show whether the states were mapped as they were saved.

The distributed optimizer has one long row of numbers for each state of a model chunk, in a file of
its own and without names. The parameters lie in it from the last to the first. A parameter begins
at a multiple of 64 within its bucket of gradients, and buckets follow each other without a gap. The
file does not say where buckets begin. The float32 weights show that: they round to the 16-bit
weights at the right place only.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.config.checks import InputError
from megatron_lite.config.model import ModelConfig
from megatron_lite.convert.megatron.args import ADAM, MASTER
from megatron_lite.convert.megatron.source import (
    Ranks,
    Unmapped,
    has_decay,
    need,
    updates_of,
    whole_parameters,
)
from megatron_lite.convert.megatron.torch_file import Window, read_torch_file
from megatron_lite.convert.weights import is_buffer

DISTRIBUTED_OPTIMIZER = "distrib_optim.pt"
ROWS = {**dict(zip(ADAM, ADAM, strict=True)), MASTER: "param"}  # keys of its file
ALIGNMENT = 64
COMPARED = 256  # numbers of each parameter
# What values of another form than Megatron's lead to.
FOREIGN = (LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError, ValueError)

Named = tuple[str, Tensor]
Own = Iterator[tuple[str, dict[str, Tensor]]]  # parameters with their states
States = dict[str, dict[str, list[Any]]]  # by state and parameter, the part of each TP rank


def read_states(
    saved: Mapping[Ranks, Any],
    files: Mapping[Ranks, Path],
    parts: Mapping[Ranks, Sequence[Sequence[Named]]],
    model: ModelConfig,
) -> tuple[States, int]:
    """Returns the states that can be mapped exactly, and how many updates were made.

    saved: the optimizer of each rank. files: where it was read.
    parts: by rank, its model chunks with names and weights, in the order of the model.
    Raises Unmapped, with the reason, if there are none.
    """
    need(any(saved.values()), "the checkpoint holds no optimizer states")
    need(
        not any(expert_rank for _, _, expert_rank in saved),
        "those of expert parallelism lie in several optimizers",
    )
    found = defaultdict(list)
    updates, keys = set(), set()
    try:
        for ranks, optimizer in sorted(saved.items()):
            inner = optimizer.get("optimizer", optimizer)
            groups, states = inner["param_groups"], inner.get("state", {})
            distributed = files[ranks].with_name(DISTRIBUTED_OPTIMIZER)
            is_distributed = distributed.exists()
            updates.add(updates_of(groups, {} if is_distributed else states))
            masters = optimizer.get("fp32_from_fp16_params", optimizer.get("fp32_from_fp16"))
            chunks = [[one for one in chunk if not is_buffer(one[0])] for chunk in parts[ranks]]
            for name, own in (
                _of_chunks(distributed, chunks)
                if is_distributed
                else _of_groups(groups, states, masters, [*itertools.chain(*chunks)])
            ):
                keys.add(tuple(own))
                for key, tensor in own.items():
                    found[key].append((ranks, name, tensor))
        need(len(updates) == len(keys) == 1, "the ranks or the parameters have different states")
        whole = {key: whole_parameters(held, model, 1) for key, held in found.items()}
    except InputError:
        raise
    except FOREIGN as error:
        raise Unmapped("they are not those of one optimizer of Megatron-LM") from error
    return whole, updates.pop()


def _of_groups(
    groups: list[Any], states: Mapping[Any, Any], masters: Any, named: Sequence[Named]
) -> Own:
    """Yields one rank's parameters with their states, which the optimizer's groups number."""
    seen: set[str] = set()
    for place, group in enumerate(groups):
        decays = bool(group["wd_mult"]) if "wd_mult" in group else group.get("weight_decay") != 0.0
        members = [(name, one) for name, one in named if has_decay(name, one.ndim) is decays]
        held = members if masters is None else masters[place]
        need(
            len(group["params"]) == len(held) == len(members)
            and seen.isdisjoint(name for name, _ in members),
            f"one of {len(groups)} groups has other parameters than the model",
        )
        for number, master, (name, weight) in zip(group["params"], held, members, strict=True):
            own = {key: states[number][key] for key in ADAM}
            if masters is not None:
                own[MASTER] = master
            need(
                all(one.shape == weight.shape for one in own.values()),
                f"the states of {name} have another shape",
            )
            need(
                _is_master(own.get(MASTER, weight), weight),
                f"the float32 weights of {name} are not those of its 16-bit weights",
            )
            seen.add(name)
            yield name, own
    need(len(seen) == len(named), "some parameters are in no group")


def _is_master(master: Tensor, weight: Tensor) -> bool:
    """Returns whether these are the float32 weights of a parameter, by its first numbers."""
    head = master.flatten()[:COMPARED].to(weight.dtype)
    return master.numel() == weight.numel() and torch.equal(head, weight.flatten()[:COMPARED])


def _of_chunks(path: Path, chunks: Sequence[Sequence[Named]]) -> Own:
    """Yields the parameters of one rank with their states of the distributed optimizer.

    chunks: the names and weights of each model chunk, in the order of the model's parameters.
    """
    value = read_torch_file(Window(path))
    value = value[0] if isinstance(value, list) else value
    need(
        value.get("buckets_coalesced") is True and len(value) == 1 + len(chunks),
        "the file of the distributed optimizer is of an older release, or of another model",
    )
    for number, named in enumerate(chunks):
        ((_, states),) = value[number].items()  # of one dtype
        rows = {key: states[name] for key, name in ROWS.items()}
        need(
            len({one.shape for one in rows.values()}) == 1 == rows[MASTER].ndim,
            "the distributed optimizer holds other states than Adam's",
        )
        masters = rows[MASTER]
        bucket = end = 0
        for name, weight in reversed(named):
            # The parameter is in the bucket of the one before, at the next multiple of 64, or it
            # begins a bucket of its own right behind.
            aligned = bucket + -(-(end - bucket) // ALIGNMENT) * ALIGNMENT
            places = [slice(start, start + weight.numel()) for start in (aligned, end)]
            place = next((one for one in places if _is_master(masters[one], weight)), None)
            if place is None:
                raise Unmapped(f"{name} is not where the distributed optimizer should have it")
            if place.start != aligned:
                bucket = place.start
            end = place.stop
            yield name, {key: row[place].view(weight.shape) for key, row in rows.items()}
        need(
            end == len(masters), "the distributed optimizer holds more than the model's parameters"
        )
