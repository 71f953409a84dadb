"""metadata.json and parameters_pp*.json, which a reader needs to read the tensors of a step.

The progress is part of them. With the weights, the optimizer states and the random-number streams
it is all that resuming needs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_lite.checkpointing.manifest import (
    FORMAT,
    MOST_BYTES,
    damaged,
    parse_formatted,
    parse_json,
)
from megatron_lite.checkpointing.shards import SavedLayout
from megatron_lite.checkpointing.step_files import (
    CONFIG,
    METADATA,
    Progress,
    parameters_file,
    rng_file,
    shard_file,
)
from megatron_lite.config import plain
from megatron_lite.config.checks import InputError
from megatron_lite.config.input_file import read_input
from megatron_lite.config.run import RunConfig
from megatron_lite.memory.predict.states import parameter_count
from megatron_lite.optim.loss_scale import LossScaleState
from megatron_lite.optim.lr_schedule import LrSchedule
from megatron_lite.optim.spike import MeanLossState

AXES = ("tp_size", "dp_size", "pp_size", "cp_size")
MOST_UPDATES = 10**9 - 1
PARTS = ("optimizer", "rng")


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """The progress of a saved run, its layout over ranks, and the data that it read.

    tp_size, dp_size, pp_size, cp_size: the sizes of the parallel axes.
    num_updates: how many updates the optimizer had made.
    parameters: the layout of each parameter, by name.
    loss_scale, mean_loss: the states of the loss scale and of the spike detection; None without.
    data: the identity of the data (data/datasets.py).
    schedule: the learning-rate schedule of the run; None in a checkpoint of an older version.
    computed_on: the processor of rank 0 and its libraries, which decide the low bits of the results
        (training/start_text.py); "" in a converted checkpoint, or one of an older version.
    missing: what a converted step does not hold, of "optimizer" (the optimizer states) and "rng"
        (the random-number streams). A run that loads it starts these anew.
    """

    progress: Progress
    tp_size: int
    dp_size: int
    pp_size: int
    cp_size: int
    num_updates: int
    parameters: Mapping[str, SavedLayout]
    loss_scale: LossScaleState | None = None
    mean_loss: MeanLossState | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    schedule: LrSchedule | None = None
    computed_on: str = ""
    missing: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Returns the text of metadata.json."""
        values = {"format": FORMAT, **asdict(replace(self, parameters={}))}
        for name in ("parameters", "computed_on", "missing"):
            if not values[name]:  # the parameters have files of their own
                del values[name]
        return json.dumps(values, indent=1)

    def parameters_to_json(self, pp_rank: int) -> str:
        """Returns the text of a pipeline rank's parameters_pp*.json."""
        layouts = self.parameters.items()
        own = {name: one.to_plain() for name, one in layouts if one.pp_rank == pp_rank}
        return json.dumps(own, indent=1)

    @property
    def world_size(self) -> int:
        """The number of ranks that saved the step."""
        return self.tp_size * self.dp_size * self.pp_size * self.cp_size

    def expected_files(self) -> set[str]:
        """Returns the names of all files of the step except the manifest."""
        shards = {
            shard_file(kind, pp_rank, tp_rank, self.tp_size)
            for kind in ("model", *({"optimizer"} - set(self.missing)))
            for pp_rank in range(self.pp_size)
            for tp_rank in range(self.tp_size)
        }
        streams = () if "rng" in self.missing else range(self.world_size)
        return {
            CONFIG,
            METADATA,
            *shards,
            *map(parameters_file, range(self.pp_size)),
            *map(rng_file, streams),
        }

    @classmethod
    def read(cls, step: Path) -> Metadata:
        """Reads a step's metadata. Raises InputError if it is damaged or of another format."""
        path = step / METADATA
        with damaged(path):
            values = parse_formatted(path)
            del values["format"]
            plain.field(values, "data")  # without it, other data would be taken for the same
            for name in ("iteration", "consumed_samples"):  # a default would be another place
                plain.field(plain.as_object(plain.field(values, "progress"), "progress"), name)
            found: Metadata = plain.from_plain(cls, {**values, "parameters": {}}, METADATA)
            found._check()
        parameters: dict[str, SavedLayout] = {}
        for pp_rank in range(found.pp_size):
            path = step / parameters_file(pp_rank)
            with damaged(path):
                parameters |= {
                    name: SavedLayout.from_plain(
                        layout, name, pp_rank=pp_rank, tp_size=found.tp_size
                    )
                    for name, layout in parse_json(path).items()
                }
        return replace(found, parameters=parameters)

    def _check(self) -> None:
        """Raises ValueError on values that no run has."""
        for axis in AXES:
            plain.as_whole(getattr(self, axis), axis, 1, plain.MOST_RANKS)
        plain.as_whole(self.world_size, " x ".join(AXES), 1, plain.MOST_RANKS)
        plain.as_whole(self.num_updates, "num_updates", 0, MOST_UPDATES)
        plain.as_line(self.computed_on, "computed_on")
        self.progress.check()
        if not {*self.missing} <= {*PARTS}:
            raise ValueError(
                f"missing must name parts of {', '.join(PARTS)} (got {plain.quoted(self.missing)})"
            )


def read_config(step: Path) -> RunConfig:
    """Returns the configuration of the run that saved a step.

    Weights do not depend on the recomputation. Therefore recompute settings that this version
    refuses, such as a rule that could never apply, are left out. Raises InputError if the file
    cannot be read or breaks any other rule.
    """
    path = step / CONFIG
    try:
        text = read_input(path, MOST_BYTES).decode()
        values = plain.parse_object(text)
        try:
            return RunConfig.from_json(text)
        except ValueError:
            if values.pop("recompute", None) is None:
                raise
            return RunConfig.from_json(json.dumps(values))
    except InputError:
        raise
    except (ValueError, OverflowError, RecursionError) as error:
        raise InputError(
            f"{path}: cannot be read ({error}): the checkpoint is damaged or of another version"
        ) from error


def check_config_fits(step: Path, config: RunConfig, metadata: Metadata) -> None:
    """Raises InputError unless config.json describes a model with as many weights as the step."""
    counted = parameter_count(config.model, config.tokenizer.true_vocab_size)
    counted += config.model.num_expert_biases
    held = sum(math.prod(layout.spec.global_shape) for layout in metadata.parameters.values())
    if counted != held:
        raise InputError(
            f"{step / CONFIG}: describes a model of {counted} weights, but the step holds {held}: "
            "the checkpoint is damaged"
        )
