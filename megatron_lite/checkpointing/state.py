"""The state of a run: filled from a verified step, and collected for a new one.

In the layout that saved the step, the run's state is the same bit for bit. The step can also be
loaded in any other tensor-parallel or pipeline-parallel layout.

A snapshot has the files that a rank writes for a step: tensors on the CPU, and texts. With copied
tensors, training can go on while another thread writes them.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megatron_lite.config.checks import InputError, Values, flag, shown
from megatron_lite.config.input_file import crafted, regular_path
from megatron_lite.config.optimizer_settings import SGD
from megatron_lite.config.run import RunConfig
from megatron_lite.optim.lr_schedule import LrSchedule
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.collectives import all_gather_first_dim
from megatron_lite.parallel.parameter_spec import ParameterSpec, saved_state, spec_of
from megatron_lite.parallel.rng import DEFAULT, RngSnapshot
from megatron_lite.parallel.state import ParallelState

from .metadata import AXES, Metadata, Progress, layouts_to_json
from .shards import SavedStep, kind_of
from .start import Start
from .step_files import CONFIG, METADATA, parameters_file, rng_file, shard_file

# Settings of a run on which the order of its samples depends: the seed and the length.
ORDER = (
    *("seed", "train_iters", "train_samples"),
    *("global_batch_size", "rampup_batch_size", "step_batch_size_schedule"),
)


def load_checkpoint(
    start: Start,
    config: RunConfig,
    parallel: ParallelState,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    data: Values,
) -> list[str]:
    """Fills the model, the optimizer and the random-number streams from the step that was found.
    Returns lines for the log.

    Issues no collective. With `--finetune` or from `--pretrained-checkpoint` it reads the weights
    only, and the run starts at iteration 0.

    data: the identity of this run's data; {} if it must not be compared.
    Raises InputError if the step has another architecture, vocabulary, data set or update rule, or
    if its files do not fit together.
    """
    options, saved = config.checkpoint, start.saved
    if not saved:
        return [*start.notices]
    step, metadata = saved.path, saved.metadata
    check_same_model(config, saved.config, step)
    # A converted step names no data: the run that trained its weights is not known.
    # Both must have read the same documents, split and cut alike. The paths of the files do not
    # count, nor do --seed and the length of the run, which decide only the order of the samples.
    compares = data and metadata.data and not (start.weights_only or options.allow_changed_data)
    if compares and (table := _differing(data, metadata.data)):
        raise InputError(
            f"{step} was trained on other data, and its position there means nothing here. Give "
            f"its data, or --allow-changed-data to go on with this one:{table}"
        )
    load_weights(saved, parallel, model, optimizer)
    notices = [
        *start.notices,
        f"loaded the checkpoint of iteration {metadata.progress.iteration} from {step.parent}",
        *changed_settings(config, saved.config),
    ]
    if start.weights_only:
        asked = "--finetune" if options.finetune else "--pretrained-checkpoint"
        return [*notices, f"{asked}: weights only, starting at iteration 0"]
    changed = [
        flag(name)
        for name in ORDER
        if getattr(config.training, name) != getattr(saved.config.training, name)
    ]
    if changed and metadata.progress.consumed_samples and not config.data.mock_data:
        notices.append(
            f"{' and '.join(changed)} can change the order of the samples, of which the run has "
            "read the first: some may come again, others never. The checkpoint's values keep it"
        )
    if "optimizer" in metadata.missing:
        notices.append(f"{step} holds no optimizer states (it was converted): they start from zero")
    elif not options.no_load_optim:
        mine, theirs = (
            one.optimizer if one.optimizer != SGD or one.sgd_momentum else f"{SGD} --sgd-momentum 0"
            for one in (config.optimizer, saved.config.optimizer)
        )
        if mine != theirs:
            raise InputError(
                f"{step} holds the optimizer states of --optimizer {theirs}, from which "
                f"--optimizer {mine} cannot go on: give --optimizer {theirs}, or --no-load-optim "
                "to start the states from zero, or --finetune to take the weights alone"
            )
        _load_optimizer(saved, parallel, model, optimizer)
    if "rng" in metadata.missing:
        notices.append(
            f"{step} holds no random-number streams (it was converted): they start from --seed"
        )
    elif not options.no_load_rng:
        then, now = (
            f"TP {one.tp_size} x CP {one.cp_size} x PP {one.pp_size} x DP {one.dp_size}"
            for one in (metadata, parallel)
        )
        if then != now:
            notices.append(
                f"the checkpoint was saved on {then}, this run has {now}: random-number streams "
                "(dropout) start from --seed"
            )
            return notices
        path = step / rng_file(parallel.rank)
        with crafted(f"{path} (--no-load-rng starts the streams from --seed instead)"):
            parallel.rng.restore(RngSnapshot(DEFAULT, load_file(regular_path(path))))
    return notices


@torch.no_grad()
def load_weights(
    saved: SavedStep, parallel: ParallelState, model: nn.Module, optimizer: Optimizer | None = None
) -> None:
    """Fills the model's parameters, and the optimizer's master weights without rounding.

    Raises InputError if the parameters' names or global shapes differ from the checkpoint's.
    """
    held = saved_state(model)
    # With several pipeline ranks each holds only the parameters of its own stages, so the other
    # parameters of the checkpoint are not unexpected.
    unexpected = sorted(set(saved.layouts) - set(held)) if parallel.pp_size == 1 else []
    missing = [name for name in held if name not in saved.layouts]
    if unexpected or missing:
        name = (unexpected or missing)[0]
        who = "this model has no" if unexpected else "the checkpoint has no"
        raise InputError(f"{saved.path}: {who} parameter {name}")
    for name, parameter in held.items():
        values = saved.read(name, spec_of(parameter), parallel)
        if optimizer is None or not isinstance(parameter, nn.Parameter):
            parameter.copy_(values)
        else:
            optimizer.set_weight(name, values)


def _load_optimizer(
    saved: SavedStep, parallel: ParallelState, model: nn.Module, optimizer: Optimizer
) -> None:
    states, metadata = {}, saved.metadata
    for name, parameter in model.named_parameters():
        spec = spec_of(parameter)
        keys = [*optimizer.state_names(name), *({"master"} & saved.states(name))]
        states[name] = {key: saved.read(f"{name}/{key}", spec, parallel) for key in keys}
    optimizer.load(states, num_updates=metadata.num_updates)
    if optimizer.loss_scale:
        optimizer.loss_scale.restore(metadata.loss_scale)
    if optimizer.spikes:
        optimizer.spikes.restore(metadata.mean_loss)


def check_same_model(ours: RunConfig, saved: RunConfig, where: Path) -> None:
    """Raises InputError unless the weights of `saved` fit into a model of `ours`.

    The error holds a table of the differing fields. The vocabulary counts as one of them. Some
    fields may differ, because they do not change what a weight means: dropout, the kernels that
    compute attention and norms, the precision of the softmax, and the spread of initial weights.
    """
    free = {
        "hidden_dropout",
        "attention_dropout",
        "attention_backend",
        "attention_softmax_in_fp32",
        "init_method_std",
    }
    mine, theirs = (
        {**asdict(one.model), "vocabulary": one.tokenizer.true_vocab_size} for one in (ours, saved)
    )
    table = _differing(mine, theirs, without=free)
    if table:
        raise InputError(
            f"{where} holds another model. Give the flags of its model, or another --load, or none "
            f"to start from scratch:{table}"
        )


def changed_settings(ours: RunConfig, saved: RunConfig) -> list[str]:
    """Returns a line for each changed setting that decides the run's course.

    Settings about storage, logging, evaluation and the length of one start do not count, and of the
    model only those that may differ (`check_same_model`).
    """
    free = {
        "init_method_std",
        "exit_interval",
        "exit_duration_in_mins",
        "exit_signal_handler",
        "exit_signal",
        "eval_interval",
        "eval_iters",
        "eval_global_batch_size",
        "data_cache_path",
        "max_skipped_updates",
        "check_weight_hash_across_dp_replicas_interval",
        "use_checkpoint_opt_param_scheduler",
        "override_opt_param_scheduler",
    }
    topics = ["model", "training", "data", "tokenizer", "optimizer", "loss_scaling", "lr_schedule"]
    if ours.lr_schedule.use_checkpoint_opt_param_scheduler:
        topics.remove("lr_schedule")  # the run follows the checkpoint's
    lines = []
    for topic in topics:
        mine, theirs = asdict(getattr(ours, topic)), asdict(getattr(saved, topic))
        lines += [
            f"changed since the checkpoint: {flag(name)} {theirs[name]} -> {mine[name]}"
            for name in mine
            if mine[name] != theirs[name] and name not in free
        ]
    return lines


def _differing(ours: Values, saved: Mapping[str, Any], *, without: Collection[str] = ()) -> str:
    """Returns a table of the fields that differ; "" if none does."""
    rows = [("field", "checkpoint", "this run")] + [
        (name, shown(str(saved.get(name))), shown(str(ours.get(name))))
        for name in dict.fromkeys((*ours, *saved))
        if name not in without and ours.get(name) != saved.get(name)
    ]
    lines = [f"\n  {name:40} {theirs:>20} {mine:>20}" for name, theirs, mine in rows]
    return "".join(lines) if rows[1:] else ""


class Snapshot(NamedTuple):
    """The files that this rank writes for a step: tensors and texts, by the names of the files."""

    iteration: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    texts: Mapping[str, bytes]


def take_snapshot(
    config: RunConfig,
    parallel: ParallelState,
    model: nn.Module,
    optimizer: Optimizer,
    progress: Progress,
    *,
    data: Values,
    copy: bool,
    schedule: LrSchedule | None = None,
    computed_on: str = "",
    tokenizer: Mapping[str, bytes] | None = None,
) -> Snapshot:
    """Returns the files that this rank writes for a step.

    Every rank must call this. Tensors that are sharded over data-parallel ranks, and experts that
    are spread over them, are gathered, one parameter at a time.

    copy: whether to copy all tensors, so that later training steps do not change the snapshot.
    Otherwise tensors on a CPU are the model's own tensors, and the caller must write them before
    the next step.
    schedule: the learning-rate schedule of the run.
    computed_on: the processor of rank 0 and its libraries; "" if a reader need not know.
    tokenizer: the contents of the tokenizer's files, which rank 0 writes; None: none.
    """
    metadata = Metadata(
        progress=progress,
        **{axis: getattr(parallel, axis) for axis in AXES},
        num_updates=optimizer.num_updates,
        data=data,
        schedule=schedule,
        computed_on=computed_on,
        loss_scale=optimizer.loss_scale.state() if optimizer.loss_scale else None,
        mean_loss=optimizer.spikes.state() if optimizer.spikes else None,
    )
    files = {
        kind: shard_file(kind, parallel.pp_rank, parallel.tp_rank, parallel.tp_size)
        for kind in ("model", "optimizer")
    }
    held: dict[str, dict[str, Tensor]] = {file: {} for file in files.values()}
    specs = {}
    # Gathering a parameter is a collective, so every data-parallel rank must run the loop.
    for name, parameter in saved_state(model).items():
        values = {name: parameter}
        if isinstance(parameter, nn.Parameter):
            states = optimizer.whole_states(name).items()
            values = {name: optimizer.weight(name), **{f"{name}/{key}": one for key, one in states}}
        spec = spec_of(parameter)
        place = parallel.holding(spec)
        is_split = place.tp_size < parallel.tp_size
        if spec.of_experts:
            device = values[name].device
            values = {
                key: _of_all_experts(one.detach().to(device), spec, place, joins=is_split)
                for key, one in values.items()
            }
        # The last stage's copy of a tied embedding is not saved, and a tensor that is not split is
        # saved by TP rank 0 only.
        if spec.is_copy:
            continue
        specs[name] = spec
        dim = spec.tp_dim
        if parallel.dp_cp_rank or (dim is None and parallel.tp_rank):
            continue
        for key, tensor in values.items():
            own = tensor.detach()
            if dim is not None:  # its rows without padding
                rows = [
                    own.narrow(dim, one.global_start if is_split else one.local_start, one.length)
                    for one in spec.spans(parallel.tp_rank, parallel.tp_size)
                ]
                own = torch.cat([own.narrow(dim, 0, 0), *rows], dim)  # there may be no rows
            held[files[kind_of(key)]][key] = own.to("cpu", copy=copy)
    tensors = {rng_file(parallel.rank): parallel.rng.snapshot().states}
    texts = {}
    if parallel.dp_cp_rank == 0:
        tensors |= held
        if parallel.tp_rank == 0:
            texts[parameters_file(parallel.pp_rank)] = layouts_to_json(specs).encode()
    if parallel.rank == 0:
        texts |= {CONFIG: config.to_json().encode(), METADATA: metadata.to_json().encode()}
        texts |= tokenizer or {}
    return Snapshot(progress.iteration, tensors, texts)


def _of_all_experts(
    own: Tensor, spec: ParameterSpec, place: ParallelState, *, joins: bool
) -> Tensor:
    """Returns a parameter of all experts. joins: with the channels of all ranks that share one."""
    gathered = all_gather_first_dim(own, place.ep_group)
    if not joins or spec.tp_dim is None or place.tp_group is None:
        return gathered
    shards = all_gather_first_dim(gathered, place.tp_group).chunk(place.tp_size)
    blocks = zip(*(one.chunk(spec.tp_blocks, spec.tp_dim) for one in shards), strict=True)
    return torch.cat([part for block in blocks for part in block], spec.tp_dim)
