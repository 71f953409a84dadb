"""The notices about a configuration: one line for each setting that is legal and has no effect, or
less effect than its name promises.

Each function here but `notices` yields rows of a condition and the sentence that is told if it
holds. `megatron_lite.training.run_notices.run_notices` joins them for a run, with the notices about
kernels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from megatron_lite.config.checks import flag
from megatron_lite.config.data_settings import TIKTOKEN_FIELDS
from megatron_lite.config.layer_pattern import reach, spelled
from megatron_lite.config.operators import parse_entry
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
from megatron_lite.config.run_flags import flag_of, run_fields
from megatron_lite.config.setting import unmet

Rows = Iterator[tuple[object, str]]


def notices(
    config: RunConfig,
    about: str,
    *,
    given: Collection[str] = (),
    device: str = "cpu",
    world_size: int = 1,
) -> list[str]:
    """Returns the notices of one kind.

    about: "settings": those that follow from the configuration alone, with those of "recompute".
        "recompute": those about recomputation, which the report of --explain-recompute has too.
        "placement": those that depend on the device and on the number of ranks.
        "log": those that only the log has: checks that have nothing to compare, and defaults.
    given: the fields that the command line sets, for "settings".
    device, world_size: "cpu" or "cuda", and the number of ranks, for "placement" and "log". Raises
        ValueError if the number is not a multiple of the ranks that hold one model.
    """
    if about == "settings":
        rows = [*_without_effect(config, given), *_of_settings(config), *_of_recompute(config)]
    elif about == "recompute":
        rows = [*_of_recompute(config)]
    else:
        # the ranks that hold the same parameters and compute different tokens
        dp_size = config.parallel.data_parallel_size(world_size)
        is_alone = dp_size * config.parallel.context_parallel_size == 1
        if about == "placement":
            rows = [*_of_placement(config, device, is_alone)]
        else:
            rows = [*_of_log(config, world_size, is_alone)]
    return [sentence for holds, sentence in rows if holds]


def _without_effect(config: RunConfig, given: Collection[str]) -> Rows:
    """Yields the fields that are set and that nothing reads. A field is set if the command line
    gives it, or if it does not have its default."""
    model, parallel, training = config.model, config.parallel, config.training
    recompute, tokenizer = config.recompute, config.tokenizer
    fsdp = config.data_parallel.use_torch_fsdp2
    overlaps = config.data_parallel.overlap_grad_reduce
    positions = f"with --position-embedding-type {model.position_embedding_type}"
    granularity, scale = recompute.recompute_granularity, config.loss_scaling.loss_scale
    policy = granularity or recompute.recompute_policy
    is_tik = tokenizer.tokenizer_type == "TikTokenizer"
    fields = run_fields()
    values = {name: getattr(getattr(config, one.topic), name) for name, one in fields.items()}
    changed = {name for name, one in fields.items() if values[name] != one.default}
    why = {
        name: f"without {missing}"
        for name, one in fields.items()
        if (need := one.facts.without)
        and (missing := unmet(need, getattr(config, fields[need].topic)))
    }
    for names, has_none, reason in (
        (
            ("sequence_parallel",),
            parallel.tensor_model_parallel_size == 1,
            "without --tensor-model-parallel-size > 1: it is turned off",
        ),
        (
            ("attention_softmax_in_fp32",),
            not model.always_unfused,
            "where flash attention runs, which works in float32 inside; --attention-backend "
            "unfused never takes it",
        ),
        (
            ("use_rope_scaling", "rotary_seq_len_interpolation_factor"),
            not model.positions.rotated,
            f"{positions}, which rotates nothing",
        ),
        (
            ("fp32_residual_connection",),
            training.precision == "fp32",
            "without --bf16 or --fp16: all of the run is in float32",
        ),
        (
            ("overlap_p2p_comm",),
            parallel.pipeline_model_parallel_size == 1,
            "at --pipeline-model-parallel-size 1",
        ),
        (
            ("muon_tp_mode",),
            parallel.tensor_model_parallel_size == 1,
            "at --tensor-model-parallel-size 1",
        ),
        (
            (*tokenizer.unread_fields(), *(() if is_tik else TIKTOKEN_FIELDS)),
            True,
            f"with --tokenizer-type {tokenizer.tokenizer_type}, which does not read it",
        ),
        (
            ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
            training.fp16 and scale is not None,
            f"with --loss-scale {scale}, a constant",
        ),
        (
            ("reset_position_ids",),
            not model.positions.learned,
            f"{positions}: it changes learned positions only, and rotary angles follow the place "
            "in the sequence, as in Megatron",
        ),
        (
            ("overlap_grad_reduce", "ddp_bucket_size"),
            fsdp,
            "under --use-torch-fsdp2, which always overlaps, layer by layer",
        ),
        (
            ("ddp_bucket_size",),
            not fsdp and not overlaps,
            "without --overlap-grad-reduce: everything is reduced at once",
        ),
        (
            ("recompute_method", "recompute_num_layers", "recompute_modules"),
            policy is None,
            "without --recompute-granularity: nothing is recomputed",
        ),
        (
            ("recompute_modules",),
            granularity == "full",
            "with --recompute-granularity full, which rebuilds whole layers",
        ),
    ):
        why |= dict.fromkeys(names, reason) if has_none else {}
    for name in fields:
        if name in why and (name in changed or name in given):
            yield True, f"{flag_of(name)} has no effect {why[name]}"


def _of_settings(config: RunConfig) -> Rows:
    model, data, parallel, training = config.model, config.data, config.parallel, config.training
    window, chunk = model.window_size, training.loss_chunk_size
    tokens = data.seq_length // parallel.context_parallel_size * training.micro_batch_size
    documents = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
    of_documents = [flag(name) for name in documents if getattr(data, name)]
    yield (
        not model.add_bias_linear and model.activation == "gelu" and model.bias_gelu_fusion,
        "GELU has its tanh form; Megatron computes the exact one if the linear layers have no "
        "bias: --no-bias-gelu-fusion",
    )
    yield (
        parallel.context_parallel_size > 1
        and model.attention_backend == "unfused"
        and parallel.cp_comm_type == "p2p",
        "--cp-comm-type p2p has no effect on unfused attention, which gathers keys and values",
    )
    yield (
        chunk and chunk >= tokens,
        f"--loss-chunk-size {chunk} takes all {tokens} tokens of a micro-batch at once: their "
        "logits are not kept, but exist",
    )
    yield (
        window is not None and reach(window, data.seq_length) is None,
        f"--window-size {spelled(window or 0)} limits nothing: --seq-length {data.seq_length} is "
        "not longer",
    )
    yield (
        data.mock_data and of_documents,
        f"--mock-data packs no documents: {', '.join(of_documents)} find end-of-document "
        "tokens in its samples by chance only",
    )


def _of_recompute(config: RunConfig) -> Rows:
    model, recompute = config.model, config.recompute
    rules = recompute.policy.rules
    actions = [rule.action for rule in rules]
    modules = sorted({region for action in actions for region in action.regions})
    has_tail = any(action.unit or action.ops for action in actions) or any_skips_tail(modules)
    # With attention dropout a CPU has no flash kernel and builds the scores; CUDA does not. This
    # notice is for regions without effect on both. `_of_placement` has the other case.
    always_flash = not any(map(model.builds_scores, ("cpu", "cuda")))
    for region in without_effect(modules, builds_scores=not always_flash):
        yield (
            True,
            f"--recompute-modules {region} saves next to nothing under --attention-backend "
            f"{model.attention_backend}: flash attention rebuilds its scores in backward by itself",
        )
    for region in modules:
        yield (
            model.norms_after and REGIONS[region].needs_norms_before,
            f"--recompute-modules {region} has no effect under --norm-position after: no "
            "operation keeps the output of such a norm",
        )
    for part in NORM_PARTS:
        yield (
            model.norms_after and any(part in parts_of(rule.store) for rule in rules),
            f"{part} in host memory has no effect under --norm-position after: no norm reads the "
            "input of attention or of the MLP",
        )
    for region, parent in dict.fromkeys(pair for one in actions for pair in nested(one.regions)):
        yield (
            True,
            f"--recompute-modules {region} adds nothing to {parent}, which it is a part of",
        )
    yield from _of_operators(
        config, {parse_entry(text).name for action in actions for text in action.ops}
    )
    yield (
        not recompute.recompute_tail_skip and not has_tail,
        "--no-recompute-tail-skip has no effect: nothing is recomputed that ends in a matmul",
    )
    yield (
        recompute.recompute_verify and has_tail and recompute.recompute_tail_skip,
        "--recompute-verify turns the tail skip off: it compares the whole of every replay",
    )
    yield (
        config.compiles_layers and model.hidden_dropout + model.attention_dropout > 0.0,
        "--activation-memory-budget is a share of what each compiled graph keeps, and every "
        "dropout ends a graph",
    )
    count, longest = recompute.recompute_num_layers, max(config.stage_lengths())
    yield (
        recompute.recompute_granularity == "full" and (count or 1) > longest,
        f"--recompute-num-layers {count} is more than the {longest} layers of a stage",
    )
    num_kept = recompute.num_microbatches_with_partial_activation_checkpoints
    if num_kept is not None:
        # One data-parallel rank has the most micro-batches. More ranks have fewer each.
        has_batch = config.training.global_batch_size is not None
        most = config.training.most_microbatches(1) if has_batch else 1
        yield (
            num_kept >= config.most_in_flight(most),
            f"--num-microbatches-with-partial-activation-checkpoints {num_kept} is not below the "
            f"micro-batches of a step, {most} at most, so nothing is recomputed",
        )
    if recompute.recompute_policy is not None and not recompute.is_to_be_chosen:
        for warning in check_policy_reaches(recompute.policy, config.stage_lengths()):
            yield True, warning


def _of_operators(config: RunConfig, names: set[str]) -> Rows:
    model, parallel = config.model, config.parallel
    over_ranks, alone = parallel.context_parallel_size > 1, parallel.tensor_model_parallel_size == 1
    for name, keeps_nothing, reason in (
        ("attention", model.always_unfused, "attention is unfused and builds its scores"),
        (
            "attention",
            not model.always_unfused and model.attention_dropout > 0.0,
            "--attention-dropout draws random numbers, so that attention has to run again",
        ),
        (
            "collective",
            alone and not (over_ranks and model.always_unfused),
            "--tensor-model-parallel-size is 1, and what context-parallel ranks exchange is part "
            "of their attention",
        ),
        ("max", True, "no layer of this model computes one"),
    ):
        yield (
            name in names and keeps_nothing,
            f"--recompute-policy ops({name}) keeps nothing: {reason}",
        )


def _of_placement(config: RunConfig, device: str, is_alone: bool) -> Rows:
    model, profiling = config.model, config.profiling
    modules = {region for rule in config.recompute.policy.rules for region in rule.action.regions}
    for region in without_effect(sorted(modules), builds_scores=model.builds_scores(device)):
        yield (
            model.builds_scores("cpu"),  # else all devices behave alike: `_of_recompute`
            f"--recompute-modules {region} saves next to nothing on {device}: flash attention "
            "runs there, and rebuilds its scores in backward by itself",
        )
    yield (
        device != "cuda" and profiling.profile and not profiling.use_pytorch_profiler,
        f"--profile has no effect on {device}: Nsight Systems profiles CUDA; "
        "--use-pytorch-profiler works here, too",
    )
    yield (
        device != "cuda" and profiling.record_memory_history,
        f"--record-memory-history has no effect on {device}: it records CUDA's allocations; "
        "--memory-timeline FILE works here, too",
    )
    for name in (
        *("overlap_grad_reduce", "overlap_param_gather", "grad_reduce_in_bf16"),
        *("use_distributed_optimizer", "use_torch_fsdp2"),
    ):
        yield (
            is_alone and getattr(config.data_parallel, name),
            f"{flag(name)} has no effect at data-parallel size 1: nothing is shared out or summed",
        )


def _of_log(config: RunConfig, world_size: int, is_alone: bool) -> Rows:
    parallel, fsdp = config.parallel, config.data_parallel.use_torch_fsdp2
    yield (
        config.training.check_weight_hash_across_dp_replicas_interval is not None
        and (is_alone or fsdp),
        "--check-weight-hash-across-dp-replicas-interval compares nothing over data-parallel "
        f"ranks: {'there is one' if is_alone else '--use-torch-fsdp2 keeps one copy'}. It compares "
        "weights that tensor-parallel ranks or the ends of the pipeline hold alike",
    )
    yield (
        config.logging.log_straggler and world_size == parallel.pipeline_model_parallel_size,
        "--log-straggler names nobody: it compares the ranks of a pipeline stage, and each has one",
    )
    yield (
        config.training.loss_chunk_size is None and config.loss_chunk_size is not None,
        f"loss: {config.loss_chunk_size} tokens have logits at a time, which takes less memory "
        "and about the same time (--loss-chunk-size 0: all at once)",
    )
