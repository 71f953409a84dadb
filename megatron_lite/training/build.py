"""From a RunConfig to the parts of a run."""

from __future__ import annotations

import os

import torch

from megatron_lite.checkpointing.save_load import loaded_progress
from megatron_lite.config.checks import InputError
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage, stages_of_rank, whole_model
from megatron_lite.data.build import build_datasets
from megatron_lite.model.gpt import GPTModel
from megatron_lite.model.stages import ModelStages
from megatron_lite.optim.adamw import Optimizer
from megatron_lite.optim.lr_schedule import LrSchedule
from megatron_lite.parallel.state import ParallelState
from megatron_lite.pipeline.order import check_num_microbatches
from megatron_lite.recompute.schedule import plan_stage
from megatron_lite.tensor_parallel.context import TensorParallelContext
from megatron_lite.tensor_parallel.initialize import initialize_parameters_
from megatron_lite.training.compiler import compile_layers_
from megatron_lite.training.loop import Trainer


def build_stages(config: RunConfig, parallel: ParallelState) -> ModelStages:
    """All stages that this rank holds."""
    stages = stages_of_rank(config.parallel, config.model.num_layers, parallel.pp_rank)
    return ModelStages([build_model(config, parallel, stage) for stage in stages])


def build_model(config: RunConfig, parallel: ParallelState, stage: Stage | None = None) -> GPTModel:
    """This rank's shard of the model or of one stage, initialised from `--seed`; bf16 weights under `--bf16` (optim/adamw.py)."""
    stage = stage or whole_model(config.model.num_layers)
    context = TensorParallelContext.of(parallel, sequence_parallel=config.parallel.sequence_parallel,
                                       params_dtype=torch.bfloat16 if config.training.bf16 else torch.float32)
    model = GPTModel(config.model, context, vocab_size=config.tokenizer.true_vocab_size,
                     padded_vocab_size=config.tokenizer.padded_vocab_size(parallel.tp_size),
                     plan=plan_stage(config.recompute, stage.num_layers, stage.number),
                     loss_chunk_size=config.training.loss_chunk_size, stage=stage)
    initialize_parameters_(model, seed=config.training.seed, tp_rank=parallel.tp_rank, tp_size=parallel.tp_size)
    if config.training.torch_compile:
        compile_layers_(model)
    return model


def use_deterministic_algorithms() -> None:
    """Makes every later operation of this process repeatable bit for bit; torch raises where it has no such kernel.

    CPU runs are repeatable anyway. On a GPU cuBLAS reads its workspace setting at the first matrix product.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def build_trainer(config: RunConfig, parallel: ParallelState) -> Trainer:
    """Model, optimizer, schedule and data of a run at iteration 0; `Trainer.run` loads what `--load` names.

    InputError: no data, no length, no learning rate, a batch that does not divide, faults in the data files.
    """
    training = config.training
    if training.deterministic_mode:
        use_deterministic_algorithms()
    try:
        start = loaded_progress(config.checkpoint)
        num_microbatches = training.num_microbatches(parallel.dp_size)
        check_num_microbatches(num_microbatches, size=parallel.pp_size,
                               chunks=len(stages_of_rank(config.parallel, config.model.num_layers, parallel.pp_rank)))
        batch_size = training.batch_size(parallel.dp_size)
        # Counted from where the run stands, in case it goes on with another batch size.
        num_iterations = training.num_iterations(batch_size, done=start.iteration, consumed=start.consumed_samples)
        train_samples = start.consumed_samples + max(0, num_iterations - start.iteration) * batch_size
        schedule = LrSchedule.build(config.lr_schedule, train_samples=training.train_samples or train_samples,
                                    batch_size=batch_size)
    except ValueError as error:
        raise InputError(str(error)) from error
    evaluation_samples = training.eval_iters * batch_size
    datasets = build_datasets(config.data, vocab_size=config.tokenizer.true_vocab_size, seed=training.seed,
                              num_samples=(train_samples, evaluation_samples, evaluation_samples))
    model = build_stages(config, parallel)
    optimizer = Optimizer(model, config.optimizer, parallel)
    return Trainer(config=config, parallel=parallel, model=model, optimizer=optimizer, schedule=schedule, datasets=datasets,
                   num_iterations=num_iterations, num_microbatches=num_microbatches, batch_size=batch_size)
