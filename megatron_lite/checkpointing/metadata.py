"""metadata.json and parameters_pp*.json: what is needed to read the tensors of a step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_lite.checkpointing.files import CONFIG, METADATA, parameters_file, read_bounded, rng_file, shard_file
from megatron_lite.checkpointing.manifest import FORMAT, MOST_BYTES, parse_json
from megatron_lite.checkpointing.progress import Progress
from megatron_lite.checkpointing.shards import SavedLayout
from megatron_lite.config.checks import InputError
from megatron_lite.config.run import RunConfig
from megatron_lite.optim.loss_scale import LossScaleState
from megatron_lite.optim.spike import MeanLossState

MOST_RANKS = 2**20


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """How far the run had come, how it was split, and what it read. data: see data/identity.py."""

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

    def to_json(self) -> str:
        """The text of metadata.json."""
        return json.dumps({"format": FORMAT, "progress": asdict(self.progress), "tp_size": self.tp_size, "dp_size": self.dp_size,
                           "pp_size": self.pp_size, "cp_size": self.cp_size, "num_updates": self.num_updates,
                           "loss_scale": None if self.loss_scale is None else asdict(self.loss_scale),
                           "mean_loss": None if self.mean_loss is None else asdict(self.mean_loss), "data": self.data},
                          indent=1)

    def parameters_to_json(self) -> str:
        """The text of this pipeline rank's parameters_pp*.json."""
        return json.dumps({name: layout.to_plain() for name, layout in self.parameters.items()}, indent=1)

    def expected_files(self) -> set[str]:
        """The names of all files of the step but the manifest."""
        shards = {shard_file(kind, pp_rank, tp_rank, self.tp_size) for kind in ("model", "optimizer")
                  for pp_rank in range(self.pp_size) for tp_rank in range(self.tp_size)}
        world_size = self.tp_size * self.dp_size * self.pp_size * self.cp_size
        return {CONFIG, METADATA, *shards, *map(parameters_file, range(self.pp_size)), *map(rng_file, range(world_size))}

    @classmethod
    def read(cls, step: Path) -> Metadata:
        """Reads a step's metadata. InputError where it is damaged or of another format."""
        path = step / METADATA
        try:
            values = parse_json(path)
            if values["format"] != FORMAT:
                raise InputError(f"{path}: format {values['format']}, but this version reads format {FORMAT}")
            sizes = {axis: values[axis] for axis in ("tp_size", "dp_size", "pp_size", "cp_size")}
            numbers = [*values["progress"].values(), *(size - 1 for size in sizes.values()), values["num_updates"]]
            if not all(isinstance(number, int) and number >= 0 for number in numbers) or max(sizes.values()) > MOST_RANKS:
                raise ValueError("sizes and counts must be whole numbers")
            progress = Progress(**values["progress"])
            parameters: dict[str, SavedLayout] = {}
            for pp_rank in range(sizes["pp_size"]):
                path = step / parameters_file(pp_rank)
                parameters |= {name: SavedLayout.from_plain(layout, pp_rank=pp_rank)
                               for name, layout in parse_json(path).items()}
            return cls(progress=progress, num_updates=values["num_updates"], parameters=parameters, data=dict(values["data"]),
                       loss_scale=LossScaleState.from_plain(values.get("loss_scale")),
                       mean_loss=MeanLossState.from_plain(values.get("mean_loss")), **sizes)
        except InputError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise InputError(f"{path}: cannot be read ({error!r}): the checkpoint is damaged") from error


def read_config(step: Path) -> RunConfig:
    """The configuration of the run that saved a step. InputError where it cannot be read."""
    path = step / CONFIG
    try:
        return RunConfig.from_json(read_bounded(path, MOST_BYTES).decode())
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read ({error}): the checkpoint is damaged or of another version") from error
