"""The notices about a configuration: one line for each setting that is legal and has no effect, or
less effect than its name promises.

    setting_notices      follow from the configuration alone
    placement_notices    depend on the device and the number of ranks too
    guard_notices        name the checks of the run that have nothing to compare

`megatron_lite.training.run_notices.run_notices` joins them for a run, with the notices about
kernels.
"""

from __future__ import annotations

from collections.abc import Collection

from megatron_lite.config import layer_pattern
from megatron_lite.config.checkpoint_settings import WITHOUT_LOAD, WITHOUT_SAVE
from megatron_lite.config.checks import flag
from megatron_lite.config.data_settings import TIKTOKEN_FIELDS
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.recompute_notices import (
    recompute_notices,
    recompute_notices_on,
    unread_notices,
)
from megatron_lite.config.run import RunConfig

WITHOUT_SHARING = (
    "overlap_grad_reduce",
    "overlap_param_gather",
    "grad_reduce_in_bf16",
    "use_distributed_optimizer",
    "use_torch_fsdp2",
)
# The flag that each setting of the profilers needs.
PROFILING_FIELDS = {
    "profile_step_start": "--profile",
    "profile_step_end": "--profile",
    "use_pytorch_profiler": "--profile",
    "pytorch_profiler_collect_shapes": "--use-pytorch-profiler",
    "pytorch_profiler_collect_callstack": "--use-pytorch-profiler",
}
STRAGGLER_FIELDS = ("straggler_minmax_count", "straggler_ratio")


def setting_notices(config: RunConfig, given: Collection[str] = ()) -> list[str]:
    """Returns the notices that depend neither on the device nor on the number of ranks.

    given: the fields that the command line sets. A few notices appear only for a field that the
        user set.
    """
    model, parallel = config.model, config.parallel
    notices = []
    if "sequence_parallel" in given and not parallel.sequence_parallel:
        notices.append(
            "--sequence-parallel is turned off: it needs --tensor-model-parallel-size > 1"
        )
    if not model.add_bias_linear and model.activation == "gelu" and model.bias_gelu_fusion:
        notices.append(
            "GELU has its tanh form; Megatron computes the exact one if the linear layers have no "
            "bias: --no-bias-gelu-fusion"
        )
    if model.attention_softmax_in_fp32 and model.attention_backend != "unfused":
        notices.append(
            "--attention-softmax-in-fp32 has no effect where flash attention runs, which works in "
            "float32 inside; --attention-backend unfused never takes it"
        )
    if (
        parallel.context_parallel_size > 1
        and model.attention_backend == "unfused"
        and parallel.cp_comm_type == "p2p"
    ):
        notices.append(
            "--cp-comm-type p2p has no effect on unfused attention, which gathers keys and values"
        )
    notices += _rotary_notices(model, given)
    if model.fp32_residual_connection and config.training.precision == "fp32":
        notices.append(
            "--fp32-residual-connection has no effect without --bf16 or --fp16: all of the run is "
            "in float32"
        )
    tokens = (
        config.data.seq_length // parallel.context_parallel_size * config.training.micro_batch_size
    )
    loss_chunk_size = config.training.loss_chunk_size
    if loss_chunk_size and loss_chunk_size >= tokens:
        notices.append(
            f"--loss-chunk-size {loss_chunk_size} takes all {tokens} tokens of a micro-batch at "
            "once: their logits are not kept, but exist"
        )
    if not parallel.overlap_p2p_comm and parallel.pipeline_model_parallel_size == 1:
        notices.append(
            "--no-overlap-p2p-communication has no effect: --pipeline-model-parallel-size is 1"
        )
    if config.optimizer.muon_tp_mode == "blockwise" and parallel.tensor_model_parallel_size == 1:
        notices.append("--muon-tp-mode blockwise has no effect: --tensor-model-parallel-size is 1")
    schedule = config.lr_schedule
    if schedule.decoupled_min_lr is not None and schedule.decoupled_lr is None:
        notices.append("--decoupled-min-lr has no effect without --decoupled-lr")
    notices += [
        f"{flag(name)} has no effect without {needed}"
        for name, needed in PROFILING_FIELDS.items()
        if name in given
        and not (config.profiling.profile and getattr(config.profiling, _field(needed)))
    ]
    notices += [
        f"{flag(name)} has no effect without --tokenizer-type TikTokenizer"
        for name in TIKTOKEN_FIELDS
        if name in given and config.tokenizer.tokenizer_type != "TikTokenizer"
    ]
    notices += [
        f"{flag(name)} has no effect: --tokenizer-type {config.tokenizer.tokenizer_type} does not "
        "read it"
        for name in config.tokenizer.unread_fields()
        if name in given and name not in TIKTOKEN_FIELDS
    ]
    if config.recompute.offload_modules and not config.recompute.fine_grained_activation_offloading:
        notices.append(
            "--offload-modules has no effect without --fine-grained-activation-offloading"
        )
    notices += [
        f"{flag(name)} has no effect without --wandb-project"
        for name in ("wandb_exp_name", "wandb_save_dir", "wandb_entity")
        if name in given and not config.logging.wandb_project
    ]
    notices += [
        f"{flag(name)} has no effect without --log-straggler"
        for name in STRAGGLER_FIELDS
        if name in given and not config.logging.log_straggler
    ]
    return [
        *notices,
        *_directory_notices(config),
        *_loss_scale_notices(config),
        *layer_pattern.notices(model, config.data.seq_length),
        *_document_notices(config),
        *_bucket_notices(config),
        *unread_notices(config, given),
        *recompute_notices(config),
    ]


def placement_notices(config: RunConfig, *, device: str, world_size: int) -> list[str]:
    """Returns the notices that depend on the device, "cpu" or "cuda", or on the number of ranks.

    The parser of the command line knows neither. Raises ValueError if the number of ranks is not a
    multiple of the ranks that hold one model.
    """
    notices = recompute_notices_on(config, device)
    notices += _profiling_notices(config, device)
    if _dp_cp_size(config, world_size) == 1:
        notices += [
            f"{flag(name)} has no effect at data-parallel size 1: nothing is shared out or summed"
            for name in WITHOUT_SHARING
            if getattr(config.data_parallel, name)
        ]
    return notices


def _field(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def _profiling_notices(config: RunConfig, device: str) -> list[str]:
    if device == "cuda":
        return []
    notices = []
    if config.profiling.profile and not config.profiling.use_pytorch_profiler:
        notices.append(
            f"--profile has no effect on {device}: Nsight Systems profiles CUDA; "
            "--use-pytorch-profiler works here, too"
        )
    if config.profiling.record_memory_history:
        notices.append(
            f"--record-memory-history has no effect on {device}: it records CUDA's allocations; "
            "--memory-timeline FILE works here, too"
        )
    return notices


def guard_notices(config: RunConfig, *, world_size: int) -> list[str]:
    """Returns a notice for each comparison of ranks that is switched on and has no second rank."""
    parallel, notices = config.parallel, []
    if config.training.check_weight_hash_across_dp_replicas_interval is not None:
        name = "--check-weight-hash-across-dp-replicas-interval"
        rest = (
            " (weights that tensor-parallel ranks or the ends of the pipeline hold alike are)"
            if parallel.tensor_model_parallel_size > 1 or parallel.pipeline_model_parallel_size > 1
            else ""
        )
        if _dp_cp_size(config, world_size) == 1:
            notices.append(f"{name} compares nothing over data-parallel ranks: there is one{rest}")
        elif config.data_parallel.use_torch_fsdp2:
            notices.append(
                f"{name} compares nothing over data-parallel ranks: --use-torch-fsdp2 keeps "
                f"one copy{rest}"
            )
    if config.logging.log_straggler and world_size == parallel.pipeline_model_parallel_size:
        notices.append(
            "--log-straggler names nobody: it compares the ranks of a pipeline stage, and each "
            "has one"
        )
    return notices


def _dp_cp_size(config: RunConfig, world_size: int) -> int:
    """Returns the number of ranks that hold the same parameters and compute different tokens.

    They are the data-parallel and context-parallel ranks.
    """
    return config.parallel.data_parallel_size(world_size) * config.parallel.context_parallel_size


def _directory_notices(config: RunConfig) -> list[str]:
    checkpoint, notices = config.checkpoint, []
    for names, directory, effect in (
        (WITHOUT_SAVE, checkpoint.save, "without --save DIR: no checkpoint is written"),
        (WITHOUT_LOAD, checkpoint.load, "without --load DIR: no checkpoint is read"),
    ):
        if directory is None:
            notices += [
                f"{flag(name)} has no effect {effect}"
                for name in names
                if getattr(checkpoint, name)
            ]
    return notices


def _loss_scale_notices(config: RunConfig) -> list[str]:
    """Returns a notice for each loss-scale setting of a run whose loss is not scaled by it."""
    changed = config.loss_scaling.changed()
    if not config.training.fp16:
        return [
            f"{flag(name)} has no effect without --fp16: the loss of a float32 or --bf16 run is "
            "not scaled"
            for name in changed
        ]
    if config.loss_scaling.loss_scale is None:
        return []
    return [
        f"{flag(name)} has no effect with --loss-scale {config.loss_scaling.loss_scale}, a constant"
        for name in changed
        if name != "loss_scale"
    ]


def _rotary_notices(model: ModelConfig, given: Collection[str]) -> list[str]:
    scalings = {
        "--use-rope-scaling": model.use_rope_scaling,
        "--rotary-seq-len-interpolation-factor": model.rotary_seq_len_interpolation_factor,
    }
    notices = [
        f"{name} has no effect: --position-embedding-type {model.position_embedding_type} rotates "
        "nothing"
        for name, is_set in scalings.items()
        if is_set and not model.positions.rotated
    ]
    if "rope_scaling_factor" in given and not model.use_rope_scaling:
        notices.append("--rope-scaling-factor has no effect without --use-rope-scaling")
    return notices


def _document_notices(config: RunConfig) -> list[str]:
    data, notices = config.data, []
    if data.reset_position_ids and not config.model.positions.learned:
        notices.append(
            "--reset-position-ids has no effect with --position-embedding-type "
            f"{config.model.position_embedding_type}: it changes learned positions only, and "
            "rotary angles follow the place in the sequence, as in Megatron"
        )
    if config.training.calculate_per_token_loss and not data.eod_mask_loss:
        notices.append(
            "--calculate-per-token-loss has no effect without --eod-mask-loss: every token "
            "counts, so the mean over tokens is the mean over micro-batches"
        )
    names = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
    given = [flag(name) for name in names if getattr(data, name)]
    if data.mock_data and given:
        notices.append(
            f"--mock-data packs no documents: {', '.join(given)} find end-of-document tokens in "
            "its samples by chance only"
        )
    return notices


def _bucket_notices(config: RunConfig) -> list[str]:
    data_parallel, notices = config.data_parallel, []
    if data_parallel.use_torch_fsdp2 and data_parallel.overlap_grad_reduce:
        notices.append(
            "--overlap-grad-reduce has no effect under --use-torch-fsdp2, which overlaps always"
        )
    if data_parallel.ddp_bucket_size is not None and (
        data_parallel.use_torch_fsdp2 or not data_parallel.overlap_grad_reduce
    ):
        reason = (
            "under --use-torch-fsdp2, which reduces layer by layer"
            if data_parallel.use_torch_fsdp2
            else "without --overlap-grad-reduce: everything is reduced at once"
        )
        notices.append(f"--ddp-bucket-size {data_parallel.ddp_bucket_size} has no effect {reason}")
    return notices
