"""From a RunConfig to the parts of a run."""

from __future__ import annotations

import os

import torch

from megatron_lite.checkpointing.saver import Claim, Saver, claim_directory
from megatron_lite.checkpointing.start import find_start
from megatron_lite.config.checks import InputError
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage, stages_of_rank, whole_model
from megatron_lite.data.build import build_datasets
from megatron_lite.model.gpt import GPTModel
from megatron_lite.model.sharding import shard_model_
from megatron_lite.model.stages import ModelStages
from megatron_lite.optim.adamw import Optimizer
from megatron_lite.optim.loss_scale import LossScale
from megatron_lite.optim.lr_schedule import LrSchedule
from megatron_lite.optim.spike import SpikeGuard
from megatron_lite.parallel.state import ParallelState
from megatron_lite.parallel.weight_gradient import accumulate_with_, apex_kernel, description
from megatron_lite.pipeline.order import check_num_microbatches
from megatron_lite.recompute.schedule import plan_stage
from megatron_lite.tensor_parallel.context import TensorParallelContext
from megatron_lite.tensor_parallel.initialize import initialize_parameters_
from megatron_lite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron_lite.training.compiler import compile_layers_
from megatron_lite.training.loop import Trainer

PARAMS_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_stages(config: RunConfig, parallel: ParallelState) -> ModelStages:
    """All stages that this rank holds."""
    stages = stages_of_rank(config.parallel, config.model.num_layers, parallel.pp_rank)
    return ModelStages([build_model(config, parallel, stage) for stage in stages])


def build_model(config: RunConfig, parallel: ParallelState, stage: Stage | None = None) -> GPTModel:
    """This rank's shard of the model or of one stage, initialised from `--seed`; 16-bit under `--bf16` or `--fp16`."""
    stage = stage or whole_model(config.model.num_layers)
    context = TensorParallelContext.of(parallel, sequence_parallel=config.parallel.sequence_parallel,
                                       params_dtype=PARAMS_DTYPE[config.training.precision],
                                       cp_comm_type=config.parallel.cp_comm_type)
    model = GPTModel(config.model, context, vocab_size=config.tokenizer.true_vocab_size,
                     padded_vocab_size=config.tokenizer.padded_vocab_size(parallel.tp_size),
                     plan=plan_stage(config.recompute, stage.num_layers, stage.number),
                     loss_chunk_size=config.training.loss_chunk_size, stage=stage)
    initialize_parameters_(model, seed=config.training.seed, tp_rank=parallel.tp_rank, tp_size=parallel.tp_size)
    if config.training.torch_compile:
        compile_layers_(model)
    shard_model_(model, parallel, config.data_parallel)
    return model


def use_deterministic_algorithms() -> None:
    """Makes every later operation of this process repeatable bit for bit; torch raises where it has no such kernel.

    CPU runs are repeatable anyway. On a GPU cuBLAS reads its workspace setting at the first matrix product.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def build_trainer(config: RunConfig, parallel: ParallelState) -> Trainer:
    """Model, optimizer, schedule and data of a run at iteration 0; `Trainer.run` loads the step that is chosen here.

    Takes the directory of `--save`, which `Trainer.run` lets go of. InputError: no data, no length, no learning rate, a batch
    that does not divide, faults in the data files, in the checkpoint, in the directories.
    """
    claim = claim_directory(config.checkpoint, parallel)
    try:
        return _build(config, parallel, claim)
    except BaseException:
        claim.release()
        raise


def _build(config: RunConfig, parallel: ParallelState, claim: Claim) -> Trainer:
    training = config.training
    if training.deterministic_mode:
        use_deterministic_algorithms()
    start = find_start(config.checkpoint, parallel)
    done = start.progress
    try:
        batches = training.batch_schedule(parallel.dp_size)
        chunks = len(stages_of_rank(config.parallel, config.model.num_layers, parallel.pp_rank))
        for size in batches.sizes:
            check_num_microbatches(batches.num_microbatches(size), size=parallel.pp_size, chunks=chunks)
        # Counted from where the run stands, in case it goes on with another batch size.
        num_iterations = training.num_iterations(batches, done=done.iteration, consumed=done.consumed_samples)
        train_samples = batches.consumed_after(num_iterations - done.iteration, consumed=done.consumed_samples)
        schedule = LrSchedule.build(config.lr_schedule, train_samples=training.train_samples or train_samples, batches=batches)
    except ValueError as error:
        raise InputError(str(error)) from error
    evaluation_samples = training.eval_iters * batches.full
    datasets = build_datasets(config.data, vocab_size=config.tokenizer.true_vocab_size, seed=training.seed,
                              num_samples=(train_samples, evaluation_samples, evaluation_samples))
    model = build_stages(config, parallel)
    loss_scale = LossScale(config.loss_scaling, parallel.device) if training.fp16 else None
    ratio = training.skip_update_on_spike
    optimizer = Optimizer(model, config.optimizer, parallel, config.data_parallel, loss_scale=loss_scale,
                          spikes=None if ratio is None else SpikeGuard(ratio, parallel.device))
    if training.check_for_nan_in_loss_and_grad:
        optimizer.layout.gradients.watch()
    fused = fuse_weight_gradients_(config, parallel, model, optimizer)
    return Trainer(config=config, parallel=parallel, model=model, optimizer=optimizer, schedule=schedule, datasets=datasets,
                   num_iterations=num_iterations, batches=batches, start=start,
                   saver=Saver(config.checkpoint, parallel, claim, started_at=done.iteration),
                   accumulation=description(PARAMS_DTYPE[training.precision], fused=fused))


def fuse_weight_gradients_(config: RunConfig, parallel: ParallelState, model: ModelStages, optimizer: Optimizer) -> bool:
    """Has apex's kernel sum the gradients of linear weights, where it can; whether it does.

    Not of tied output weights, a part of whose gradient comes from the embedding, nor in compiled graphs, which cannot hold it,
    nor where gradients are sent as soon as autograd has added them up.
    """
    training = config.training
    kernel = apex_kernel(parallel.device)
    hooked = config.data_parallel.overlap_grad_reduce or config.data_parallel.use_torch_fsdp2
    if kernel is None or hooked or training.precision == "fp32" or training.torch_compile:
        return False
    if not training.gradient_accumulation_fusion:
        return False
    linear = {module.weight for module in model.modules() if isinstance(module, (ColumnParallelLinear, RowParallelLinear))}
    accumulate_with_(kernel, [(parameter, optimizer.buffer.grads[name]) for name, parameter in model.named_parameters()
                              if parameter in linear])
    return True
