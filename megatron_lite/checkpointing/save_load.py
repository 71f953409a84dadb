"""Saving a run and loading it again: bit for bit in the same layout, and in any other tensor-parallel or pipeline layout."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megatron_lite.checkpointing.files import (
    CONFIG,
    METADATA,
    latest_step,
    parameters_file,
    publish_step,
    rng_file,
    shard_file,
    start_step,
    step_directory,
    write_durably,
)
from megatron_lite.checkpointing.progress import Progress
from megatron_lite.checkpointing.shards import SavedLayout, ShardReader, layouts_of, owned_rows
from megatron_lite.config.checks import InputError, flag
from megatron_lite.config.run import RunConfig
from megatron_lite.config.training import CheckpointConfig
from megatron_lite.data.files import sync_file
from megatron_lite.optim.adamw import Optimizer
from megatron_lite.optim.loss_scale import LossScaleState
from megatron_lite.optim.spike import MeanLossState
from megatron_lite.parallel.parameter_spec import spec_of
from megatron_lite.parallel.rng import DEFAULT, RngSnapshot
from megatron_lite.parallel.state import ParallelState

FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Where the loaded run stands, and what its user should know."""

    progress: Progress
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """metadata.json and parameters_pp*.json: what is needed to read the tensors of a step."""

    progress: Progress
    tp_size: int
    dp_size: int
    pp_size: int
    cp_size: int
    num_updates: int
    parameters: dict[str, SavedLayout]
    loss_scale: LossScaleState | None = None
    mean_loss: MeanLossState | None = None

    def to_json(self) -> str:
        """The text of metadata.json."""
        return json.dumps({"format": FORMAT, "progress": asdict(self.progress), "tp_size": self.tp_size, "dp_size": self.dp_size,
                           "pp_size": self.pp_size, "cp_size": self.cp_size, "num_updates": self.num_updates,
                           "loss_scale": None if self.loss_scale is None else asdict(self.loss_scale),
                           "mean_loss": None if self.mean_loss is None else asdict(self.mean_loss)}, indent=1)

    def parameters_to_json(self) -> str:
        """The text of this pipeline rank's parameters_pp*.json."""
        return json.dumps({name: layout.to_plain() for name, layout in self.parameters.items()}, indent=1)

    @classmethod
    def read(cls, step: Path) -> Metadata:
        """Reads a step's metadata. InputError where it is damaged or of another format."""
        path = step / METADATA
        try:
            values = json.loads(path.read_text())
            if values["format"] != FORMAT:
                raise InputError(f"{path}: format {values['format']}, but this version reads format {FORMAT}")
            sizes = {axis: values[axis] for axis in ("tp_size", "dp_size", "pp_size", "cp_size")}
            numbers = [*values["progress"].values(), *(size - 1 for size in sizes.values()), values["num_updates"]]
            if not all(isinstance(number, int) and number >= 0 for number in numbers):
                raise ValueError("sizes and counts must be whole numbers")
            progress = Progress(**values["progress"])
            parameters: dict[str, SavedLayout] = {}
            for pp_rank in range(sizes["pp_size"]):
                path = step / parameters_file(pp_rank)
                parameters |= {name: SavedLayout.from_plain(layout, pp_rank=pp_rank)
                               for name, layout in json.loads(path.read_text()).items()}
            return cls(progress=progress, num_updates=values["num_updates"], parameters=parameters,
                       loss_scale=LossScaleState.from_plain(values.get("loss_scale")),
                       mean_loss=MeanLossState.from_plain(values.get("mean_loss")), **sizes)
        except InputError:
            raise
        except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise InputError(f"{path}: cannot be read ({error!r}): the checkpoint is damaged") from error


def save_checkpoint(directory: str, config: RunConfig, parallel: ParallelState, model: nn.Module, optimizer: Optimizer,
                    progress: Progress) -> None:
    """Writes iter_N under `directory` and points at it. Every rank must call this; it returns once the step is durable.

    InputError on every rank where any rank could not write; the checkpoints that were there before stay as they are.
    """
    root = Path(directory)
    iteration = progress.iteration
    what = f"--save {directory}: the checkpoint could not be written"
    parallel.together(what, lambda: start_step(root, iteration) if parallel.rank == 0 else None)
    temporary = step_directory(root, iteration).with_suffix(".tmp")
    metadata = Metadata(progress=progress, tp_size=parallel.tp_size, dp_size=parallel.dp_size, pp_size=parallel.pp_size,
                        cp_size=parallel.cp_size, num_updates=optimizer.num_updates, parameters=layouts_of(model),
                        loss_scale=None if optimizer.loss_scale is None else optimizer.loss_scale.state(),
                        mean_loss=None if optimizer.spikes is None else optimizer.spikes.state())

    found = _to_save(model, optimizer, parallel)

    def write() -> None:
        if parallel.data_rank == 0:
            for kind, tensors in (("model", found.weights), ("optimizer", found.states)):
                _write_tensors(temporary / shard_file(kind, parallel.pp_rank, parallel.tp_rank, parallel.tp_size), tensors)
            if parallel.tp_rank == 0:
                write_durably(temporary / parameters_file(parallel.pp_rank), metadata.parameters_to_json().encode())
        _write_tensors(temporary / rng_file(parallel.rank), parallel.rng.snapshot().states)
        if parallel.rank == 0:
            write_durably(temporary / CONFIG, config.to_json().encode())
            write_durably(temporary / METADATA, metadata.to_json().encode())

    parallel.together(what, write)
    parallel.together(what, lambda: publish_step(root, iteration) if parallel.rank == 0 else None)


def check_save_directory(options: CheckpointConfig, parallel: ParallelState) -> None:
    """InputError, before any work is done, where `--save` cannot be written or holds another run's checkpoints, with which this
    run's would mix."""
    if options.save is None:
        return
    root = Path(options.save)

    def try_it() -> None:
        if parallel.rank == 0:
            root.mkdir(parents=True, exist_ok=True)
            (root / ".writable").touch()
            (root / ".writable").unlink()
        step = latest_step(root) if options.save != options.load else None
        if step is not None:
            raise InputError(f"--save {options.save} holds a checkpoint already ({step.name}): continue from it with "
                             f"--load {options.save}, or choose an empty directory")

    parallel.together(f"--save {options.save} cannot be written", try_it)


def loaded_progress(options: CheckpointConfig) -> Progress:
    """How far the run that `--load` names had come; 0 where this one starts anew. InputError: a damaged checkpoint."""
    step = None if options.load is None or options.finetune else latest_step(Path(options.load))
    return Progress() if step is None else Metadata.read(step).progress


def load_checkpoint(config: RunConfig, parallel: ParallelState, model: nn.Module, optimizer: Optimizer | None) -> Loaded:
    """Fills model, optimizer and random-number streams from the newest step under `--load`.

    `--finetune` takes the weights alone and starts at iteration 0. InputError: nothing there (unless `--allow-fresh-start`),
    another architecture or vocabulary, damaged files.
    """
    options = config.checkpoint
    assert options.load is not None
    step = latest_step(Path(options.load))
    if step is None:
        if options.allow_fresh_start:
            return Loaded(progress=Progress(), notices=(f"--load {options.load}: no checkpoint there, starting from scratch",))
        raise InputError(f"--load {options.load}: no checkpoint there (no latest_checkpointed_iteration.txt). Correct the path, "
                         "or add --allow-fresh-start to begin without one")
    metadata = Metadata.read(step)
    check_same_model(config, read_config(step), where=str(step))
    load_weights(step, metadata, parallel, model, optimizer)
    notices = [f"loaded the checkpoint of iteration {metadata.progress.iteration} from {options.load}",
               *changed_settings(config, read_config(step))]
    if optimizer is not None and not options.finetune and not options.no_load_optim:
        _load_optimizer(step, metadata, parallel, model, optimizer)
    if options.finetune:
        return Loaded(progress=Progress(), notices=(*notices, "--finetune: weights only, starting at iteration 0"))
    if not options.no_load_rng:
        notices += _load_rng(step, metadata, parallel)
    return Loaded(progress=metadata.progress, notices=tuple(notices))


def read_config(step: Path) -> RunConfig:
    """The configuration of the run that saved a step. InputError where it cannot be read."""
    path = step / CONFIG
    try:
        return RunConfig.from_json(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}): the checkpoint is damaged or of another version") from error


def check_same_model(ours: RunConfig, saved: RunConfig, *, where: str) -> None:
    """InputError with a table of the differing fields, unless weights of `saved` fit into a model of `ours`.

    Dropout, the attention backend and the spread of initial weights may differ: they do not change what a weight means.
    """
    free = {"hidden_dropout", "attention_dropout", "attention_backend", "attention_softmax_in_fp32", "init_method_std"}
    mine, theirs = asdict(ours.model), asdict(saved.model)
    mine["vocabulary"], theirs["vocabulary"] = ours.tokenizer.true_vocab_size, saved.tokenizer.true_vocab_size
    differing = [name for name in mine if name not in free and mine[name] != theirs[name]]
    if differing:
        rows = "".join(f"\n  {name:40} {theirs[name]!s:>20} {mine[name]!s:>20}" for name in differing)
        raise InputError(f"{where} holds another model:\n  {'field':40} {'checkpoint':>20} {'this run':>20}{rows}")


def changed_settings(ours: RunConfig, saved: RunConfig) -> list[str]:
    """A line for each setting that decides the run's course and differs from the checkpoint's. Where a run is stored, logged and
    evaluated does not count, nor how long one start of it lasts."""
    free = {"exit_interval", "exit_duration_in_mins", "exit_signal_handler", "exit_signal", "eval_interval", "eval_iters",
            "data_cache_path", "max_skipped_updates", "check_weight_hash_across_dp_replicas_interval"}
    lines = []
    for topic in ("training", "data", "tokenizer", "optimizer", "loss_scaling", "lr_schedule"):
        mine, theirs = asdict(getattr(ours, topic)), asdict(getattr(saved, topic))
        lines += [f"changed since the checkpoint: {flag(name)} {theirs[name]} -> {mine[name]}" for name in mine
                  if mine[name] != theirs[name] and name not in free]
    return lines


@torch.no_grad()
def load_weights(step: Path, metadata: Metadata, parallel: ParallelState, model: nn.Module, optimizer: Optimizer | None = None,
                 ) -> None:
    """Fills the model's parameters, and the optimizer's master weights without rounding.

    InputError where their names or global shapes differ from the checkpoint's.
    """
    held = {name for name, _ in model.named_parameters()}
    unexpected = sorted(set(metadata.parameters) - held) if parallel.pp_size == 1 else []
    if unexpected:
        raise InputError(f"{step}: this model has no parameter {unexpected[0]}")
    with ShardReader(step, "model", saved_tp_size=metadata.tp_size) as reader:
        for name, parameter in model.named_parameters():
            saved, wanted = metadata.parameters.get(name), spec_of(parameter)
            if saved is None or saved.global_shape != wanted.global_shape:
                raise InputError(f"{step}: parameter {name} is {'missing' if saved is None else saved.global_shape}, this model "
                                 f"has {wanted.global_shape}")
            values = reader.read(name, saved, wanted, tp_rank=parallel.tp_rank, tp_size=parallel.tp_size)
            if optimizer is None:
                parameter.copy_(values)
            else:
                optimizer.set_weight(name, values)


def _load_optimizer(step: Path, metadata: Metadata, parallel: ParallelState, model: nn.Module, optimizer: Optimizer) -> None:
    states: dict[str, dict[str, Tensor]] = {}
    with ShardReader(step, "optimizer", saved_tp_size=metadata.tp_size) as reader:
        for name, parameter in model.named_parameters():
            saved, wanted = metadata.parameters[name], spec_of(parameter)
            keys = ["exp_avg", "exp_avg_sq", *(["master"] if reader.has(f"{name}/master", saved) else [])]
            states[name] = {key: reader.read(f"{name}/{key}", saved, wanted, tp_rank=parallel.tp_rank, tp_size=parallel.tp_size)
                            for key in keys}
    optimizer.load(states, num_updates=metadata.num_updates)
    if optimizer.loss_scale is not None:
        optimizer.loss_scale.restore(metadata.loss_scale)
    if optimizer.spikes is not None:
        optimizer.spikes.restore(metadata.mean_loss)


def _load_rng(step: Path, metadata: Metadata, parallel: ParallelState) -> list[str]:
    then, now = ((one.tp_size, one.cp_size, one.pp_size, one.dp_size) for one in (metadata, parallel))
    if then != now:
        before, here = ("TP {} x CP {} x PP {} x DP {}".format(*sizes) for sizes in (then, now))
        return [f"the checkpoint was saved on {before}, this run has {here}: random-number streams (dropout) start from --seed"]
    path = step / rng_file(parallel.rank)
    try:
        parallel.rng.restore(RngSnapshot(DEFAULT, load_file(str(path))))
    except Exception as error:
        raise InputError(f"{path}: cannot be read ({error}): add --no-load-rng to start the streams from --seed") from error
    return []


class _ToSave(NamedTuple):
    """What this rank writes, on the CPU, by the names of the files' tensors."""

    weights: dict[str, Tensor]
    states: dict[str, Tensor]


def _to_save(model: nn.Module, optimizer: Optimizer, parallel: ParallelState) -> _ToSave:
    """Empty on all but the first of the data-parallel ranks. What these share out is gathered, one parameter at a time."""
    found = _ToSave({}, {})
    for name, parameter in model.named_parameters():
        weight, states = optimizer.weight(name), optimizer.whole_states(name)
        if parallel.data_rank == 0:
            found.weights.update(_owned({name: weight}, parameter, parallel))
            found.states.update(_owned({f"{name}/{key}": value for key, value in states.items()}, parameter, parallel))
    return found


def _owned(tensors: dict[str, Tensor], parameter: Tensor, parallel: ParallelState) -> dict[str, Tensor]:
    """This rank's part of tensors that are split like the parameter, without what another TP rank saves."""
    spec = spec_of(parameter)
    owned = {key: owned_rows(tensor, spec, tp_rank=parallel.tp_rank, tp_size=parallel.tp_size) for key, tensor in tensors.items()}
    return {key: tensor.cpu() for key, tensor in owned.items() if tensor is not None}


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    path.touch()
    mode = path.stat().st_mode  # what the umask allows; save_file would make it readable by its owner alone
    save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, str(path))
    path.chmod(mode)
    with path.open("rb") as file:
        sync_file(file)

