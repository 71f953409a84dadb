"""Builds the parts of a run from a RunConfig."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from megatron_lite.checkpointing.step_files import NO_PROGRESS
from megatron_lite.config.batch_schedule import BatchSchedule
from megatron_lite.config.checks import InputError, input_faults
from megatron_lite.config.notices import notices
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage, whole_model
from megatron_lite.context_parallel.attention_kernels import KERNELS
from megatron_lite.data.datasets import build_datasets
from megatron_lite.model.gpt import GPTModel, ModelStages, shard_model_
from megatron_lite.optim.loss_scale import LossScale, SpikeGuard
from megatron_lite.optim.lr_schedule import LrSchedule
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.compiled import CompiledKernels, compiler_fault
from megatron_lite.parallel.messages import told_by_rank_0
from megatron_lite.parallel.state import ParallelState
from megatron_lite.recompute.schedule import stage_plan
from megatron_lite.tensor_parallel.initialize import initialize_parameters_
from megatron_lite.tensor_parallel.rank_context import RankContext

from .apex_kernels import fuse_weight_gradients_
from .batches import MicroBatches, document_rules, sample_order
from .loop import Trainer
from .out_of_memory import check_fits, peak_lines, told_where_memory_runs_out
from .step import StageRunner, train_step
from .summary import here

if TYPE_CHECKING:
    from megatron_lite.checkpointing.start import Start

PARAMS_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_stages(config: RunConfig, parallel: ParallelState) -> ModelStages:
    """Returns all stages that this rank holds, in the order of the model."""
    stages = config.stages_of_rank(parallel.pp_rank)
    kernels = CompiledKernels() if config.uses_compiler(parallel.device.type) else None
    return ModelStages([build_model(config, parallel, stage, kernels) for stage in stages])


def with_known_compiler(config: RunConfig, parallel: ParallelState) -> tuple[RunConfig, str]:
    """Returns the run, and the log's line about who makes its kernels.

    If the compiler does not work on some rank, the run is the same with --no-torch-compile. Issues
    collectives if the run compiles. InputError: it does not work, and --torch-compile asks for it.
    """
    asked, device = config.training.torch_compile, parallel.device.type
    compiles = config.uses_compiler(device)
    why = f"the default on {device}"
    if asked is not None:
        why = "--torch-compile" if asked else "--no-torch-compile"
    if compiles:
        faults = [*filter(None, parallel.gathered(compiler_fault(parallel.device)))]
        if faults and asked:
            raise InputError(f"--torch-compile {faults[0]}, or leave --torch-compile out")
        if faults:
            compiles, why = False, f"torch's compiler {faults[0]}"
            config = config.with_fields({"torch_compile": False})
    who = "torch's compiler" if compiles else "torch's own operators"
    return config, f"the kernels between matmuls are made by {who}: {why}"


def build_model(
    config: RunConfig,
    parallel: ParallelState,
    stage: Stage | None = None,
    kernels: CompiledKernels | None = None,
) -> GPTModel:
    """Returns this rank's shard of the model or of one stage, initialised from `--seed`.

    The weights are 16-bit under `--bf16` or `--fp16`, else float32. kernels: compiled kernels.
    """
    stage = stage or whole_model(config.model.num_layers)
    context = RankContext.of(
        parallel,
        sequence_parallel=config.parallel.sequence_parallel,
        params_dtype=PARAMS_DTYPE[config.training.precision],
        cp_comm_type=config.parallel.cp_comm_type,
        kernels=None if config.compiles_layers else kernels,
        loss_kernels=kernels,
    )
    model = GPTModel(
        config.model,
        context,
        vocab_size=config.tokenizer.true_vocab_size,
        padded_vocab_size=config.tokenizer.rows(parallel.tp_size),
        plan=stage_plan(config, stage),
        loss_chunk_size=config.loss_chunk_size,
        stage=stage,
    )
    initialize_parameters_(model, parallel, seed=config.training.seed)
    if config.compiles_layers:
        compile_layers_(model)
    shard_model_(model, parallel, config.data_parallel)
    return model


def compile_layers_(model: GPTModel) -> None:
    """Marks each layer for torch.compile. Its first call compiles it, for seconds to minutes.

    Each layer is one graph, or several with dropout. `--activation-memory-budget` limits the share
    of the bytes that each graph keeps for backward: 0 recomputes everything, 1 (torch's default)
    nothing. The compiler chooses the kept bytes, so they are neither predicted nor compared.
    Gradients equal those of eager layers up to rounding only.
    """
    for layer in model.decoder.layers:
        layer.compile()


def build_runner(config: RunConfig, parallel: ParallelState) -> tuple[StageRunner, Optimizer, str]:
    """Returns the runner of a rank's stages and the optimizer, and the log's line about who sums
    the weight gradients.

    The optimizer has the loss scale of the run and its guard against spikes.
    """
    model = build_stages(config, parallel)
    training, loss_scale, spikes = config.training, None, None
    if training.fp16:
        loss_scale = LossScale(config.loss_scaling, parallel.device)
    if training.skip_update_on_spike is not None:
        spikes = SpikeGuard(training.skip_update_on_spike, parallel.device)
    optimizer = Optimizer(
        model,
        config.optimizer,
        parallel,
        config.data_parallel,
        loss_scale=loss_scale,
        spikes=spikes,
        kernels=next(iter(model)).context.kernels,
    )
    if training.check_for_nan_in_loss_and_grad:
        optimizer.measure_own_grad_norm()
    accumulation = fuse_weight_gradients_(
        training, parallel, model, optimizer, compiled_layers=config.compiles_layers
    )
    return StageRunner.of(config, model, parallel), optimizer, accumulation


def build_trainer(config: RunConfig, parallel: ParallelState) -> Trainer:
    """Returns a trainer with the model, optimizer, schedule and data of a run at iteration 0.

    This function chooses the checkpoint to start from, and `Trainer.run` loads it. It also takes
    the lock of the `--save` directory, which `Trainer.run` releases.
    Raises InputError for missing data, a missing length or learning rate, a batch that does not
    divide, and faults in the data files, the checkpoint or the directories.
    """
    check_fits(config, parallel)
    training, saver = config.training, None
    with ExitStack() as on_error:
        if config.checkpoint.save is not None:
            from megatron_lite.checkpointing.directory import claim_directory
            from megatron_lite.checkpointing.saver import Saver

            saver = Saver(config.checkpoint, parallel, claim_directory(config.checkpoint, parallel))
            on_error.callback(saver.release)
        start, done = None, NO_PROGRESS
        attention, followed = list[str](), list[str]()
        if training.deterministic_mode:
            from .deterministic import use_deterministic_algorithms

            use_deterministic_algorithms()
        config, kernels = with_known_compiler(config, parallel)
        if config.checkpoint.load or config.checkpoint.pretrained_checkpoint:
            from megatron_lite.checkpointing.start import find_start

            start = find_start(config.checkpoint, parallel)
            done = start.progress
        with input_faults():
            batches = config.batch_schedule(parallel.dp_size)
            # Counts from the checkpoint's progress: the run may continue with another batch size.
            num_iterations = training.num_iterations(
                batches, done=done.iteration, consumed=done.consumed_samples
            )
            left = num_iterations - done.iteration
            sizes = batches.sizes_from(done.consumed_samples, num_iterations=left)
            _check_batches(config, parallel, batches, sizes)
            num_samples = batches.consumed_after(left, consumed=done.consumed_samples)
            schedule = LrSchedule.build(
                config.lr_schedule,
                train_samples=training.train_samples or num_samples,
                batches=batches,
            )
            if start is not None:
                config, schedule, followed = follow_schedule(config, schedule, start)
        if not (training.allow_predicted_out_of_memory or config.compiles_layers):
            check_fits(config, parallel, in_step=True)
        rules = document_rules(config)
        evaluated = training.eval_iters * (training.eval_global_batch_size or batches.full)
        with told_where_memory_runs_out(config, parallel, lambda: "while the run was built"):
            with told_by_rank_0("reading the data and building its sample index", parallel.rank):
                datasets = build_datasets(
                    config.data,
                    vocab_size=config.tokenizer.true_vocab_size,
                    seed=training.seed,
                    num_samples=(num_samples, evaluated, evaluated),
                    tokenizer=config.tokenizer,
                )
            identities = parallel.gathered(datasets.identity)
            for rank, identity in enumerate(identities):
                if identity != identities[0]:
                    raise InputError(
                        f"rank {rank} has other data files than rank 0: give all nodes the same "
                        "files"
                    )
            with told_by_rank_0("building the model and its optimizer", parallel.rank):
                runner, optimizer, accumulation = build_runner(config, parallel)
            if parallel.device.type == "cuda":
                from . import deterministic

                if parallel.cp_size == 1 and config.model.attention_backend in KERNELS:
                    attention = deterministic.use_asked_attention_(runner.model, config, parallel)
                if training.deterministic_mode:
                    attention += deterministic.cost_of_determinism(runner.model, config, parallel)
        if saver is not None:
            saver.started_at = done.iteration
            if parallel.rank == 0:
                from megatron_lite.data.tokenizer_files import contents_of, files_of

                # Read once, at the start: the files may be moved while the run lasts.
                step = start.saved.path if start and start.saved else None
                saver.tokenizer = contents_of(files_of(config.tokenizer, step))
        trainer = Trainer(
            config=config,
            parallel=parallel,
            model=runner.model,
            runner=runner,
            optimizer=optimizer,
            schedule=schedule,
            datasets=datasets,
            num_iterations=num_iterations,
            batches=batches,
            samples=MicroBatches(
                dataset=datasets.train,
                micro_batch_size=training.micro_batch_size,
                parallel=parallel,
                order=sample_order(config.data, len(datasets.train)),
                rules=rules,
            ),
            saver=saver,
            start=start,
            notices=(
                kernels,
                accumulation,
                *attention,
                *peak_lines(config, parallel),
                *notices(
                    config,
                    "log",
                    device=parallel.device.type,
                    world_size=parallel.world_size,
                    here=here(training.precision),
                ),
                *followed,
            ),
        )
        _add_what_flags_ask_for(trainer)
        on_error.pop_all()
    return trainer


def follow_schedule(
    config: RunConfig, schedule: LrSchedule, start: Start
) -> tuple[RunConfig, LrSchedule, list[str]]:
    """Returns the run, the learning-rate schedule that it follows, and lines for the log.

    Megatron stops if the checkpoint's schedule differs from that of the flags, and no flag says
    which one to follow. Here the flags decide, and the log lists the differences.

    config: gets the weight decay of the checkpoint if the run follows it.
    schedule: that of the flags.
    ValueError: the checkpoint's schedule cannot be read, or contradicts the flags.
    """
    saved, settings = start.saved, config.lr_schedule
    notices = list[str]()
    if saved is None or start.weights_only:
        return config, schedule, notices
    held = saved.metadata.schedule
    # A converted checkpoint without the optimizer's states has no schedule. As in Megatron, a
    # schedule that is not loaded begins anew, while the iterations and the data go on.
    if config.checkpoint.no_load_optim or "optimizer" in saved.metadata.missing:
        schedule = replace(schedule, skipped_samples=start.progress.consumed_samples)
    elif held is not None and settings.use_checkpoint_opt_param_scheduler:
        ours = replace(schedule, skipped_samples=held.skipped_samples)
        schedule = ours.taken_from(held)
        weight_decay = saved.config.optimizer.weight_decay
        changed = schedule.changed_from(ours)
        if weight_decay != config.optimizer.weight_decay:
            changed.append(f"weight_decay {config.optimizer.weight_decay} -> {weight_decay}")
            config = config.with_fields({"weight_decay": weight_decay})
        notices.append(
            "--use-checkpoint-opt_param-scheduler: the learning rate and the weight decay follow "
            "the checkpoint"
            + (f" (flags -> checkpoint: {', '.join(changed)})" if changed else ", as the flags do")
        )
    elif held is not None:
        schedule = replace(schedule, skipped_samples=held.skipped_samples)
        changed = schedule.changed_from(held)
        if changed and not settings.override_opt_param_scheduler:
            notices.append(
                "the learning rate follows the flags, which differ from the checkpoint (checkpoint "
                f"-> flags, lengths in samples: {', '.join(changed)}); "
                "--use-checkpoint-opt_param-scheduler follows the checkpoint"
            )
    elif settings.use_checkpoint_opt_param_scheduler:  # it was converted
        raise InputError(
            f"--use-checkpoint-opt_param-scheduler: {saved.path} does not hold its schedule: leave "
            "the flag out, and give --lr and the like"
        )
    return config, schedule, notices


def _add_what_flags_ask_for(trainer: Trainer) -> None:
    """Gives the trainer the parts without which most runs do."""
    config, parallel = trainer.config, trainer.parallel
    if config.training.cuda_graph_impl != "none" and parallel.device.type == "cuda":
        from .graphs import Recorder

        trainer.graphs = Recorder(
            partial(train_step, trainer.runner, trainer.optimizer),
            parallel.rng,
            warmup_steps=config.training.cuda_graph_warmup_steps,
        )
    if config.logging.timing_log_level:
        from .profiler import Timers

        trainer.timers = Timers(config.logging.timing_log_level, parallel)
        trainer.optimizer.timed = trainer.runner.timed = trainer.timers
    if config.profiling.profile or config.profiling.record_memory_history:
        from .profiler import Profiler

        trainer.profiler = Profiler(config, parallel, lambda text: trainer.log.line(text))
    if config.logging.log_straggler:
        from megatron_lite.supervision.slow_rank import SlowRanks

        trainer.slow_ranks = SlowRanks(config.logging, parallel)


def _check_batches(
    config: RunConfig, parallel: ParallelState, batches: BatchSchedule, sizes: Sequence[int]
) -> None:
    """Raises ValueError for a batch that the ranks or the pipeline's virtual stages cannot take.

    sizes: the global batch sizes of the iterations that this run still has.
    Evaluations take the full batch, also if the run ends within the ramp.
    """
    training, unit = config.training, batches.samples_per_microbatch
    rule = f"--micro-batch-size {training.micro_batch_size} x data-parallel size {parallel.dp_size}"
    if len(config.stages_of_rank(parallel.pp_rank)) > 1:
        unit *= parallel.pp_size
        rule += f" x --pipeline-model-parallel-size {parallel.pp_size} (for virtual stages)"
    flag = "--global-batch-size"
    if training.step_batch_size_schedule is not None:
        flag = f"--step-batch-size-schedule '{training.step_batch_size_schedule}'"
    elif training.rampup_batch_size:
        flag = f"--rampup-batch-size {' '.join(map(str, training.rampup_batch_size))}"
    named = [(flag, batch_size) for batch_size in sizes]
    if training.eval_iters and training.eval_global_batch_size:
        named.append(("--eval-global-batch-size", training.eval_global_batch_size))
    elif training.eval_iters:
        named.append((flag, batches.full))
    for flag, batch_size in named:
        if batch_size % unit:
            raise ValueError(
                f"{flag}: a batch of {batch_size} samples, which this run still has, is not "
                f"divisible by {rule} = {unit}: give sizes that are multiples of {unit}"
            )
