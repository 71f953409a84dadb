"""The notices about a configuration: one line for each setting that is legal and has no effect, or
less effect than its name promises.

Each list here has rows of a condition and the sentence that is told if it holds:

    settings     follow from the configuration alone, and from the fields that a command line sets
    recompute    follow from the recompute settings alone; the report of --explain-recompute has
                 them too
    placement    depend on the device and on the number of ranks
    log          name the checks of the run that have nothing to compare, and defaults; only the
                 log has them

`megatron_lite.training.run_notices.run_notices` joins them for a run, with the notices about
kernels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from megatron_lite.config.checkpoint_settings import WITHOUT_LOAD, WITHOUT_SAVE
from megatron_lite.config.checks import flag
from megatron_lite.config.data_settings import TIKTOKEN_FIELDS
from megatron_lite.config.layer_pattern import marks_all, reach, spelled
from megatron_lite.config.operators import GROUPS, parse_entry
from megatron_lite.config.policy import check_policy_reaches
from megatron_lite.config.regions import (
    NORM_PARTS,
    REGIONS,
    any_skips_tail,
    nested,
    parts_of,
    without_effect,
)
from megatron_lite.config.run import RunConfig

Rows = Iterable[tuple[object, str]]

WITHOUT_SHARING = (
    "overlap_grad_reduce",
    "overlap_param_gather",
    "grad_reduce_in_bf16",
    "use_distributed_optimizer",
    "use_torch_fsdp2",
)
OWN_ATTENTION = "megatron_lite.context_parallel_attention.default"


def _told(rows: Rows) -> list[str]:
    return [sentence for holds, sentence in rows if holds]


def setting_notices(config: RunConfig, given: Collection[str] = ()) -> list[str]:
    """Returns the notices that depend neither on the device nor on the number of ranks.

    given: the fields that the command line sets. A few notices appear only for a field that the
        user set.
    """
    return [*_told(_of_settings(config, {*given})), *recompute_notices(config)]


def recompute_notices(config: RunConfig) -> list[str]:
    """Returns the notices about recomputation that follow from the configuration alone."""
    recompute, notices = config.recompute, _told(_of_recompute(config))
    if recompute.recompute_policy is not None and not recompute.is_to_be_chosen:
        notices += check_policy_reaches(recompute.policy, config.stage_lengths())
    return notices


def placement_notices(config: RunConfig, *, device: str, world_size: int) -> list[str]:
    """Returns the notices that depend on the device, "cpu" or "cuda", or on the number of ranks.

    The parser of the command line knows neither. Raises ValueError if the number of ranks is not a
    multiple of the ranks that hold one model.
    """
    return _told(_of_placement(config, device, _dp_cp_size(config, world_size)))


def log_notices(config: RunConfig, *, world_size: int) -> list[str]:
    """Returns the notices that only the log has."""
    return _told(_of_log(config, world_size))


def _of_settings(config: RunConfig, given: set[str]) -> Rows:
    model, data, training, parallel = config.model, config.data, config.training, config.parallel
    schedule, sharding, tokenizer = config.lr_schedule, config.data_parallel, config.tokenizer
    checkpoint, scaling, profiling = config.checkpoint, config.loss_scaling, config.profiling
    scaled = scaling.changed()
    tokens = data.seq_length // parallel.context_parallel_size * training.micro_batch_size
    chunk = training.loss_chunk_size
    skipped, no_rope = model.window_attn_skip_freq, model.no_rope_freq
    window = model.window_size or (0, 0)
    recompute, granularity = config.recompute, config.recompute.recompute_granularity
    of_documents = [
        flag(name)
        for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
        if getattr(data, name)
    ]
    needed = [
        (("rope_scaling_factor",), model.use_rope_scaling, "--use-rope-scaling"),
        (
            ("profile_step_start", "profile_step_end", "use_pytorch_profiler"),
            profiling.profile,
            "--profile",
        ),
        (
            ("pytorch_profiler_collect_shapes", "pytorch_profiler_collect_callstack"),
            profiling.profile and profiling.use_pytorch_profiler,
            "--use-pytorch-profiler",
        ),
        (
            TIKTOKEN_FIELDS,
            tokenizer.tokenizer_type == "TikTokenizer",
            "--tokenizer-type TikTokenizer",
        ),
        (
            ("wandb_exp_name", "wandb_save_dir", "wandb_entity"),
            config.logging.wandb_project,
            "--wandb-project",
        ),
        (
            ("straggler_minmax_count", "straggler_ratio"),
            config.logging.log_straggler,
            "--log-straggler",
        ),
    ]
    return [
        (
            "sequence_parallel" in given and not parallel.sequence_parallel,
            "--sequence-parallel is turned off: it needs --tensor-model-parallel-size > 1",
        ),
        (
            not model.add_bias_linear and model.activation == "gelu" and model.bias_gelu_fusion,
            "GELU has its tanh form; Megatron computes the exact one if the linear layers have no "
            "bias: --no-bias-gelu-fusion",
        ),
        (
            model.attention_softmax_in_fp32 and model.attention_backend != "unfused",
            "--attention-softmax-in-fp32 has no effect where flash attention runs, which works in "
            "float32 inside; --attention-backend unfused never takes it",
        ),
        (
            parallel.context_parallel_size > 1
            and model.attention_backend == "unfused"
            and parallel.cp_comm_type == "p2p",
            "--cp-comm-type p2p has no effect on unfused attention, which gathers keys and values",
        ),
        *(
            (
                is_set and not model.positions.rotated,
                f"{name} has no effect: --position-embedding-type {model.position_embedding_type} "
                "rotates nothing",
            )
            for name, is_set in (
                ("--use-rope-scaling", model.use_rope_scaling),
                (
                    "--rotary-seq-len-interpolation-factor",
                    model.rotary_seq_len_interpolation_factor,
                ),
            )
        ),
        (
            model.fp32_residual_connection and training.precision == "fp32",
            "--fp32-residual-connection has no effect without --bf16 or --fp16: all of the run is "
            "in float32",
        ),
        (
            chunk and chunk >= tokens,
            f"--loss-chunk-size {chunk} takes all {tokens} tokens of a micro-batch at once: their "
            "logits are not kept, but exist",
        ),
        (
            not parallel.overlap_p2p_comm and parallel.pipeline_model_parallel_size == 1,
            "--no-overlap-p2p-communication has no effect: --pipeline-model-parallel-size is 1",
        ),
        (
            config.optimizer.muon_tp_mode == "blockwise"
            and parallel.tensor_model_parallel_size == 1,
            "--muon-tp-mode blockwise has no effect: --tensor-model-parallel-size is 1",
        ),
        (
            schedule.decoupled_min_lr is not None and schedule.decoupled_lr is None,
            "--decoupled-min-lr has no effect without --decoupled-lr",
        ),
        (
            recompute.offload_modules and not recompute.fine_grained_activation_offloading,
            "--offload-modules has no effect without --fine-grained-activation-offloading",
        ),
        *(
            (name in given and not is_met, f"{flag(name)} has no effect without {need}")
            for names, is_met, need in needed
            for name in names
        ),
        *(
            (
                name in given and name not in TIKTOKEN_FIELDS,
                f"{flag(name)} has no effect: --tokenizer-type {tokenizer.tokenizer_type} does not "
                "read it",
            )
            for name in tokenizer.unread_fields()
        ),
        *(
            (directory is None and getattr(checkpoint, name), f"{flag(name)} has no effect {why}")
            for names, directory, why in (
                (WITHOUT_SAVE, checkpoint.save, "without --save DIR: no checkpoint is written"),
                (WITHOUT_LOAD, checkpoint.load, "without --load DIR: no checkpoint is read"),
            )
            for name in names
        ),
        *(
            (
                not training.fp16,
                f"{flag(name)} has no effect without --fp16: the loss of a float32 or --bf16 run "
                "is not scaled",
            )
            for name in scaled
        ),
        *(
            (
                training.fp16 and scaling.loss_scale is not None and name != "loss_scale",
                f"{flag(name)} has no effect with --loss-scale {scaling.loss_scale}, a constant",
            )
            for name in scaled
        ),
        (
            model.window_size is not None and reach(window, data.seq_length) is None,
            f"--window-size {spelled(window)} limits nothing: no token of --seq-length "
            f"{data.seq_length} is {window[0] + 1} or more tokens away from another",
        ),
        (
            skipped is not None
            and (skipped > model.num_layers if isinstance(skipped, int) else marks_all(skipped)),
            f"--window-attn-skip-freq {spelled(skipped or 0)} has no effect: it gives all "
            f"{model.num_layers} layers the window",
        ),
        (
            isinstance(no_rope, tuple) and not any(no_rope),
            f"--no-rope-freq {spelled(no_rope or 0)} has no effect: every layer rotates",
        ),
        (
            data.reset_position_ids and not model.positions.learned,
            "--reset-position-ids has no effect with --position-embedding-type "
            f"{model.position_embedding_type}: it changes learned positions only, and rotary "
            "angles follow the place in the sequence, as in Megatron",
        ),
        (
            training.calculate_per_token_loss and not data.eod_mask_loss,
            "--calculate-per-token-loss has no effect without --eod-mask-loss: every token "
            "counts, so the mean over tokens is the mean over micro-batches",
        ),
        (
            data.mock_data and of_documents,
            f"--mock-data packs no documents: {', '.join(of_documents)} find end-of-document "
            "tokens in its samples by chance only",
        ),
        (
            sharding.use_torch_fsdp2 and sharding.overlap_grad_reduce,
            "--overlap-grad-reduce has no effect under --use-torch-fsdp2, which overlaps always",
        ),
        (
            sharding.ddp_bucket_size is not None and sharding.use_torch_fsdp2,
            f"--ddp-bucket-size {sharding.ddp_bucket_size} has no effect under --use-torch-fsdp2, "
            "which reduces layer by layer",
        ),
        (
            sharding.ddp_bucket_size is not None
            and not (sharding.use_torch_fsdp2 or sharding.overlap_grad_reduce),
            f"--ddp-bucket-size {sharding.ddp_bucket_size} has no effect without "
            "--overlap-grad-reduce: everything is reduced at once",
        ),
        *(
            (
                name in given and config.recompute.recompute_policy is None and granularity is None,
                f"{flag(name)} has no effect without --recompute-granularity: nothing is "
                "recomputed",
            )
            for name in ("recompute_method", "recompute_num_layers", "recompute_modules")
        ),
        (
            "recompute_modules" in given and granularity == "full",
            "--recompute-modules has no effect with --recompute-granularity full, which rebuilds "
            "whole layers",
        ),
    ]


def _of_recompute(config: RunConfig) -> Rows:
    model, recompute = config.model, config.recompute
    rules = recompute.policy.rules
    actions = [rule.action for rule in rules]
    modules = sorted({region for action in actions for region in action.regions})
    has_tail = any(action.unit or action.ops for action in actions) or any_skips_tail(modules)
    count, longest = recompute.recompute_num_layers, max(config.stage_lengths())
    ends = {"block": "all of them are recomputed", "uniform": "each stage is one unit"}
    end = ends.get(recompute.recompute_method or "")
    num_kept = recompute.num_microbatches_with_partial_activation_checkpoints
    # One data-parallel rank has the most micro-batches. More ranks have fewer each.
    most = 1
    if num_kept is not None and config.training.global_batch_size is not None:
        most = config.training.most_microbatches(1)
    # With attention dropout a CPU has no flash kernel and builds the scores; CUDA does not. This
    # notice is for regions without effect on both. `_of_placement` has the other case.
    always_flash = not any(map(model.builds_scores, ("cpu", "cuda")))
    return [
        *(
            (
                always_flash,
                f"--recompute-modules {region} saves next to nothing under --attention-backend "
                f"{model.attention_backend}: flash attention rebuilds its scores in backward by "
                "itself",
            )
            for region in without_effect(modules, builds_scores=False)
        ),
        *(
            (
                model.norms_after and REGIONS[region].needs_norms_before,
                f"--recompute-modules {region} has no effect under --norm-position after: no "
                "operation keeps the output of such a norm",
            )
            for region in modules
        ),
        *(
            (
                model.norms_after and any(part in parts_of(rule.store) for rule in rules),
                f"{part} in host memory has no effect under --norm-position after: no norm reads "
                "the input of attention or of the MLP",
            )
            for part in NORM_PARTS
        ),
        *(
            (True, f"--recompute-modules {region} adds nothing to {parent}, which it is a part of")
            for region, parent in dict.fromkeys(
                pair for action in actions for pair in nested(action.regions)
            )
        ),
        *_operators_without_effect(
            config, {parse_entry(text).name for action in actions for text in action.ops}
        ),
        (
            not recompute.recompute_tail_skip and not has_tail,
            "--no-recompute-tail-skip has no effect: nothing is recomputed that ends in a matmul",
        ),
        (
            recompute.recompute_verify and has_tail and recompute.recompute_tail_skip,
            "--recompute-verify turns the tail skip off: it compares the whole of every replay",
        ),
        (
            recompute.activation_memory_budget is not None
            and model.hidden_dropout + model.attention_dropout > 0.0,
            "--activation-memory-budget is a share of what each compiled graph keeps, and "
            "every dropout ends a graph",
        ),
        (
            end is not None and count is not None and count > longest,
            f"--recompute-num-layers {count} is more than the {longest} layers of a stage: {end}",
        ),
        (
            num_kept is not None and num_kept >= config.most_in_flight(most),
            f"{flag('num_microbatches_with_partial_activation_checkpoints')} {num_kept}: a step "
            f"has at most {most} micro-batch{'es' if most > 1 else ''} (--global-batch-size over "
            "--micro-batch-size), so all of them keep everything and nothing is recomputed",
        ),
    ]


def _operators_without_effect(config: RunConfig, names: set[str]) -> Rows:
    model, parallel = config.model, config.parallel
    over_ranks, alone = parallel.context_parallel_size > 1, parallel.tensor_model_parallel_size == 1
    kernels = {*GROUPS["attention"]} - {OWN_ATTENTION}
    reasons = [
        ("attention", model.always_unfused, "attention is unfused and builds its scores"),
        (
            "attention",
            not model.always_unfused and model.attention_dropout > 0.0,
            "--attention-dropout draws random numbers, so that attention has to run again",
        ),
        ("collective", alone and not over_ranks, "--tensor-model-parallel-size is 1"),
        (
            "collective",
            alone and over_ranks and not model.always_unfused,
            "--tensor-model-parallel-size is 1, and what context-parallel ranks exchange is part "
            "of their attention",
        ),
        ("max", True, "no layer of this model computes one"),
        *(
            (
                kernel,
                over_ranks,
                f"over context-parallel ranks attention is one operator, {OWN_ATTENTION}",
            )
            for kernel in kernels
        ),
        (OWN_ATTENTION, not over_ranks, "--context-parallel-size is 1"),
    ]
    return [
        (name in names and holds, f"--recompute-policy ops({name}) keeps nothing: {reason}")
        for name, holds, reason in reasons
    ]


def _of_placement(config: RunConfig, device: str, dp_cp_size: int) -> Rows:
    model, profiling = config.model, config.profiling
    modules = {region for rule in config.recompute.policy.rules for region in rule.action.regions}
    place = "CUDA" if device == "cuda" else "a CPU"
    return [
        *(
            (
                # else all devices behave alike, and `_of_recompute` has the notice
                model.builds_scores("cpu"),
                f"--recompute-modules {region} saves next to nothing on {place}: flash attention "
                "runs there, and rebuilds its scores in backward by itself",
            )
            for region in without_effect(sorted(modules), builds_scores=model.builds_scores(device))
        ),
        (
            device != "cuda" and profiling.profile and not profiling.use_pytorch_profiler,
            f"--profile has no effect on {device}: Nsight Systems profiles CUDA; "
            "--use-pytorch-profiler works here, too",
        ),
        (
            device != "cuda" and profiling.record_memory_history,
            f"--record-memory-history has no effect on {device}: it records CUDA's allocations; "
            "--memory-timeline FILE works here, too",
        ),
        *(
            (
                dp_cp_size == 1 and getattr(config.data_parallel, name),
                f"{flag(name)} has no effect at data-parallel size 1: nothing is shared out or "
                "summed",
            )
            for name in WITHOUT_SHARING
        ),
    ]


def _of_log(config: RunConfig, world_size: int) -> Rows:
    parallel, is_one = config.parallel, _dp_cp_size(config, world_size) == 1
    compared = config.training.check_weight_hash_across_dp_replicas_interval is not None
    nothing = (
        "--check-weight-hash-across-dp-replicas-interval compares nothing over data-parallel ranks"
    )
    rest = ""
    if parallel.tensor_model_parallel_size > 1 or parallel.pipeline_model_parallel_size > 1:
        rest = " (weights that tensor-parallel ranks or the ends of the pipeline hold alike are)"
    return [
        (compared and is_one, f"{nothing}: there is one{rest}"),
        (
            compared and not is_one and config.data_parallel.use_torch_fsdp2,
            f"{nothing}: --use-torch-fsdp2 keeps one copy{rest}",
        ),
        (
            config.logging.log_straggler and world_size == parallel.pipeline_model_parallel_size,
            "--log-straggler names nobody: it compares the ranks of a pipeline stage, and each "
            "has one",
        ),
        (
            config.training.loss_chunk_size is None and config.loss_chunk_size is not None,
            f"loss: {config.loss_chunk_size} tokens have logits at a time, which takes less memory "
            "and about the same time (--loss-chunk-size 0: all at once)",
        ),
    ]


def _dp_cp_size(config: RunConfig, world_size: int) -> int:
    """Returns the number of ranks that hold the same parameters and compute different tokens.

    They are the data-parallel and context-parallel ranks.
    """
    return config.parallel.data_parallel_size(world_size) * config.parallel.context_parallel_size
