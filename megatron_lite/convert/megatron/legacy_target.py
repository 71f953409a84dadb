"""Writes weights as a legacy checkpoint of Megatron-LM, for its local layer spec.

The files of all ranks are made first, with empty places for their tensors (torch's `skip_data`).
Each tensor is then read once, split, and written to its places, so that only one is in memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.checkpointing.step_files import LATEST
from megatron_lite.config.checks import InputError
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.stages import Stage, stages
from megatron_lite.convert.megatron import written_args
from megatron_lite.convert.megatron.legacy_source import MODEL_FILES
from megatron_lite.convert.megatron.parameter_names import LAYER_NUMBER, OUTPUT, layer_name
from megatron_lite.convert.megatron.source import WORDS
from megatron_lite.convert.megatron.torch_file import Window, read_torch_file
from megatron_lite.convert.parameters import parameter_specs
from megatron_lite.convert.staging import check_absent, complete_folder
from megatron_lite.convert.weight_formats import Described, WeightSource
from megatron_lite.data.durable_files import write_synced
from megatron_lite.parallel.parameter_spec import ParameterSpec
from megatron_lite.parallel.torch_internals import FakeTensorMode

WEIGHT = "weight"
Specs = Mapping[str, ParameterSpec]
# The places of one parameter or state: by TP rank, in each file that holds it.
Places = dict[tuple[str, str], list[tuple[int, Tensor]]]


class LegacyTarget:
    """A directory as Megatron-LM's `--save` with `--ckpt-format torch`. It does not exist yet."""

    def __init__(self, path: Path, *, tp_size: int = 1, pp_size: int = 1) -> None:
        check_absent(path)
        self._path, self._tp_size, self._pp_size = path, tp_size, pp_size

    def write(self, source: WeightSource, advance: Callable[[int], None]) -> None:
        """Writes all that the source has. The directory appears complete, or not at all.

        Raises InputError if the model does not divide over the parallel sizes.
        """
        described = source.described
        written_args.check_exact(described, "megatron")
        try:
            specs = parameter_specs(
                described.model,
                described.true_vocab_size,
                tp_size=self._tp_size,
                padded_vocab_size=written_args.padded_vocab_size(described, self._tp_size),
            )
            for spec in specs.values():
                spec.local_shape(self._tp_size)
            parallel = ParallelConfig(
                tensor_model_parallel_size=self._tp_size,
                pipeline_model_parallel_size=self._pp_size,
                distributed_backend="gloo",
            )
            held = stages(parallel, described.model.num_layers)
        except ValueError as error:
            raise InputError(f"--to megatron: {error}") from error
        dtype = source.read(WORDS).dtype
        newest = written_args.newest(described)
        with complete_folder(self._path) as folder:
            step = folder / written_args.folder_of(newest)
            places: Places = {}
            for stage in held:
                for tp_rank in range(self._tp_size):
                    rank = _Rank(described, specs, dtype, stage, tp_rank, self._tp_size)
                    for place, tensor in rank.make(step):
                        places.setdefault(place, []).append((tp_rank, tensor))
            for name, spec in specs.items():
                self._copy(name, source.read(name), places[name, WEIGHT], spec, advance)
                for key in described.state_keys:
                    self._copy(name, source.read_state(name, key), places[name, key], spec, advance)
            write_synced(folder / LATEST, newest.encode())

    def _copy(
        self,
        name: str,
        whole: Tensor,
        places: list[tuple[int, Tensor]],
        spec: ParameterSpec,
        advance: Callable[[int], None],
    ) -> None:
        if whole.dtype != places[0][1].dtype:
            raise InputError(
                f"--to megatron: {name} is {whole.dtype} and other weights are "
                f"{places[0][1].dtype}, and Megatron-LM has one dtype: convert with --to hf"
            )
        for tp_rank, place in places:
            place.copy_(local_part(whole, spec, tp_rank, self._tp_size))
        advance(whole.numel() * whole.element_size())


def local_part(whole: Tensor, spec: ParameterSpec, tp_rank: int, tp_size: int) -> Tensor:
    """Returns the part of a whole tensor that a TP rank holds, with zeros as padding."""
    if spec.tp_dim is None:
        return whole
    local = whole.new_zeros(spec.local_shape(tp_size))
    for span in spec.spans(tp_rank, tp_size):
        local.narrow(spec.tp_dim, span.local_start, span.length).copy_(
            whole.narrow(spec.tp_dim, span.global_start, span.length)
        )
    return local


class _Rank:
    """The file of one TP rank of one pipeline stage."""

    def __init__(
        self,
        described: Described,
        specs: Specs,
        dtype: torch.dtype,
        stage: Stage,
        tp_rank: int,
        tp_size: int,
    ) -> None:
        self._described, self._stage = described, stage
        self._tp_rank, self._tp_size = tp_rank, tp_size
        self._specs, self._dtype = specs, dtype
        # By the name in the file, in the order of the model: the name in the whole model.
        self._names = dict(self._own_names())

    def make(self, step: Path) -> Iterator[tuple[tuple[str, str], Tensor]]:
        """Writes the file without the numbers, and yields where each tensor goes."""
        folder = f"mp_rank_{self._tp_rank:02d}"
        if self._stage.count > 1:
            folder += f"_{self._stage.rank:03d}"
        (step / folder).mkdir(parents=True)
        path = step / folder / MODEL_FILES[0]
        # Fake tensors have sizes and no numbers, so the whole model is never in memory. The file
        # gets room for each of them.
        with FakeTensorMode():
            value = self._value()
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(value, path)
        found = read_torch_file(Window(path), shared=True)
        for own, name in self._names.items():
            yield (name, WEIGHT), found["model"][own]
        if not self._described.state_keys:
            return
        inner = found["optimizer"].get("optimizer", found["optimizer"])
        masters = found["optimizer"].get("fp32_from_fp16_params")
        for group, members in enumerate(self._groups()):
            for place, (number, name) in enumerate(members):
                for key in ("exp_avg", "exp_avg_sq"):
                    yield (name, key), inner["state"][number][key]
                if masters is not None:
                    yield (name, "master"), masters[group][place]

    def _own_names(self) -> Iterator[tuple[str, str]]:
        tied = not self._described.model.untie_embeddings_and_output_weights
        for name in written_args.in_order(self._specs):
            found = LAYER_NUMBER.fullmatch(name)
            if found is not None:
                layer = int(found[1]) - self._stage.first_layer
                if 0 <= layer < self._stage.num_layers:
                    yield layer_name(layer, found[2]), name
            elif self._stage.is_first if name.startswith("embedding.") else self._stage.is_last:
                yield name, name
        if tied and self._stage.is_last and not self._stage.is_first:
            yield OUTPUT, WORDS

    def _value(self) -> dict[str, Any]:
        described = self._described
        model: dict[str, Any] = OrderedDict()
        for own, name in self._names.items():
            model[own] = torch.empty(
                self._specs[name].local_shape(self._tp_size), dtype=self._dtype
            )
        for layer in range(self._stage.num_layers):
            for linear in written_args.LINEARS:
                model[f"{layer_name(layer, linear)}.{written_args.EXTRA_STATE}"] = None
        if self._stage.is_last:
            model[f"output_layer.{written_args.EXTRA_STATE}"] = None
        value = {
            **written_args.common_values(
                described, tp_size=self._tp_size, pp_size=self._stage.count
            ),
            "model": model,
        }
        if described.state_keys:
            value["optimizer"] = self._optimizer(model)
        return value

    def _groups(self) -> list[list[tuple[int, str]]]:
        """Returns the numbers and names of the parameters with and without weight decay."""
        found: list[list[tuple[int, str]]] = []
        number = 0
        for decay in (True, False):
            members = []
            for name in self._names.values():
                if written_args.has_decay(name, self._specs[name]) is decay:
                    members.append((number, name))
                    number += 1
            found.append(members)
        return found

    def _optimizer(self, model: Mapping[str, Any]) -> dict[str, Any]:
        groups = self._groups()
        facts = written_args.groups()
        for fact, members in zip(facts, groups, strict=True):
            fact |= {
                "params": [number for number, _ in members],
                "step": self._described.num_updates,
            }
        inner = {
            "state": {
                number: {key: self._empty(name) for key in ("exp_avg", "exp_avg_sq")}
                for members in groups
                for number, name in members
            },
            "param_groups": facts,
        }
        if "master" not in self._described.state_keys:
            return inner
        masters = [[self._empty(name) for _, name in members] for members in groups]
        return {"optimizer": inner, "fp32_from_fp16_params": masters}

    def _empty(self, name: str) -> Tensor:
        return torch.empty(self._specs[name].local_shape(self._tp_size), dtype=torch.float32)
