"""The notices about a run: sentences, each about a setting that is legal and has no effect, or less
effect than its name promises.

There is a function for each kind.
"""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from .checks import flag
from .experts import SINKHORN
from .layer_pattern import reach, spelled
from .optimizer_settings import WARMUPS
from .policy import LayerAction, check_policy_reaches, parse_entry
from .regions import (
    MLP_REGION,
    MOE,
    NORM_PARTS,
    POINTWISE,
    REGIONS,
    nested,
    parts_of,
    without_effect,
)
from .run import RunConfig
from .run_flags import run_fields
from .setting import condition


class Here(NamedTuple):
    """What only a process with torch knows about this machine.

    torch_lacks: torch's version and the names that it lacks.
    multiplies_16_bits: whether 16-bit products have instructions of their own.
    """

    torch_lacks: str = ""
    multiplies_16_bits: bool = True


UNKNOWN = Here()
LOST_IN_BF16 = 2.0**-8  # a share of a number that is rounded away


def notices(
    config: RunConfig,
    about: str,
    *,
    given: Collection[str] = (),
    dp_size: int = 1,
    device: str = "cpu",
    world_size: int = 1,
    here: Here = UNKNOWN,
) -> list[str]:
    """Returns the notices of one kind.

    about: "settings": those that follow from the configuration alone, with those of "recompute".
        "recompute": those about recomputation, which the report of --explain-recompute has too.
        "placement": those that depend on the device and on the number of ranks.
        "formats": those about what 16 bits lose over a step or a run.
        "log": the latter, and those that only the log has: kernels, checks that have nothing to
            compare, defaults.
    given: the fields that the command line sets, for "settings".
    dp_size: the number of data-parallel ranks, for "recompute". More of them have fewer
        micro-batches each.
    device, world_size, here: "cpu" or "cuda", the number of ranks and the machine, for all but
        "settings" and "recompute". Raises ValueError if the number is not a multiple of the ranks
        of one model.
    """
    if about == "settings":
        return [*_unread(config, given), *_of_run(config), *_of_recompute(config)]
    if about == "recompute":
        return list(_of_recompute(config, dp_size))
    # Whether no other rank holds the same parameters and computes different tokens.
    parallel = config.parallel
    is_alone = parallel.data_parallel_size(world_size) * parallel.context_parallel_size == 1
    if about == "placement":
        return list(_of_placement(config, device, is_alone))
    formats = list(_of_formats(config, world_size))
    if about == "formats":
        return formats
    return formats + list(_of_log(config, device, world_size, is_alone, here))


def _unread(config: RunConfig, given: Collection[str]) -> Iterator[str]:
    """Yields the fields that are set and that nothing reads, those with one reason together. A
    field is set if the command line gives it, or if it does not have its default."""
    model, values = config.model, config.values
    if model.builds_scores("cpu"):  # on some device
        values["attention_backend"] = "unfused"
    reasons: dict[str, str] = {}
    if values["lr_decay_style"] == "constant" and not any(values[name] for name in WARMUPS):
        # Otherwise the warm-up must be shorter.
        reasons |= dict.fromkeys(
            ("lr_decay_iters", "lr_decay_samples"), "with --lr-decay-style constant and no warm-up"
        )
    if model.moe_router_load_balancing_type not in ("none", SINKHORN) and not model.balance_losses:
        reasons["moe_router_load_balancing_type"] = "without --moe-aux-loss-coeff above 0"
    if model.multi_latent_attention and "kv_channels" in given:
        heads = f"whose keys have {model.kv_channels} channels"
        reasons["kv_channels"] = f"under --multi-latent-attention, {heads}"
    unread: dict[str, list[str]] = {}
    for name, one in run_fields().items():
        if name not in given and values[name] == one.default:
            continue
        for word, rule in (("without", one.without), ("with", one.unless)):
            text, colon, reason = rule.partition(":")
            if rule and (found := condition(text, values)).holds is (word == "with"):
                reasons[name] = f"{word} {found.text}{colon}{reason}"
        if name in reasons:
            unread.setdefault(reasons[name], []).append(one.flag)
    for why, flags in unread.items():
        yield f"{', '.join(flags)} {'has' if len(flags) == 1 else 'have'} no effect {why}"


def _of_run(config: RunConfig) -> Iterator[str]:
    model, data, parallel, training = config.model, config.data, config.parallel, config.training
    window, chunk = model.window_size, training.loss_chunk_size
    tokens = data.seq_length // parallel.context_parallel_size * training.micro_batch_size
    if not model.add_bias_linear and model.activation == "gelu" and model.bias_gelu_fusion:
        yield (
            "GELU has its tanh form; Megatron computes the exact one if the linear layers have no "
            "bias: --no-bias-gelu-fusion"
        )
    if model.attn_logit_softcapping and model.attention_backend != "unfused":
        yield "--attn-logit-softcapping: attention builds its scores, as no flash kernel caps them"
    gathers = parallel.context_parallel_size > 1 and model.attention_backend == "unfused"
    if gathers and parallel.cp_comm_type == "p2p":
        yield (
            "--cp-comm-type p2p has no effect on unfused attention, which gathers keys and values"
        )
    if chunk and chunk >= tokens:
        yield (
            f"--loss-chunk-size {chunk} takes all {tokens} tokens of a micro-batch at once: their "
            "logits are not kept, but exist"
        )
    if window and reach(window, data.seq_length) is None:
        yield (
            f"--window-size {spelled(window)} limits nothing: --seq-length {data.seq_length} is "
            "not longer"
        )
    if data.mock_data and (given := data.document_flags):
        yield (
            f"--mock-data packs no documents: {', '.join(given)} "
            f"{'finds' if len(given) == 1 else 'find'} end-of-document tokens in its samples by "
            "chance only"
        )


def _of_recompute(config: RunConfig, dp_size: int = 1) -> Iterator[str]:
    model, recompute, parallel = config.model, config.recompute, config.parallel
    rules = recompute.policy.rules
    actions = [rule.action for rule in rules]
    modules = sorted({region for action in actions for region in action.regions})
    yield from _of_regions(config, actions, modules)
    if not model.norms_before:
        for part in NORM_PARTS:
            if any(part in parts_of(rule.store) for rule in rules):
                yield (
                    f"{part} in host memory has no effect under --norm-position after: no norm "
                    "reads the input of attention or of the MLP"
                )
    keep_nothing = {"max": "no layer of this model computes one"}
    if model.always_unfused:
        keep_nothing["attention"] = "attention is unfused and builds its scores"
    elif model.attention_dropout > 0.0:
        keep_nothing["attention"] = (
            "--attention-dropout draws random numbers, so that attention has to run again"
        )
    is_sent = model.always_unfused or "a2a" in parallel.exchanges
    if parallel.tensor_model_parallel_size == 1 and not (
        parallel.context_parallel_size > 1 and is_sent
    ):
        keep_nothing["collective"] = (
            "--tensor-model-parallel-size is 1, and what context-parallel ranks exchange is "
            "part of their attention"
        )
    operators = {parse_entry(text).name for action in actions for text in action.ops}
    for name in sorted(operators & keep_nothing.keys()):
        yield f"--recompute-policy ops({name}) keeps nothing: {keep_nothing[name]}"
    has_tail = any(action.unit or action.ops for action in actions) or any(
        REGIONS[region].skips_tail for region in modules
    )
    if not recompute.recompute_tail_skip and not has_tail:
        yield "--no-recompute-tail-skip has no effect: nothing is recomputed that ends in a matmul"
    if recompute.recompute_verify and has_tail and recompute.recompute_tail_skip:
        yield "--recompute-verify turns the tail skip off: it compares the whole of every replay"
    if config.compiles_layers and model.hidden_dropout + model.attention_dropout > 0.0:
        yield (
            "--activation-memory-budget is a share of what each compiled graph keeps, and every "
            "dropout ends a graph"
        )
    count, longest = recompute.recompute_num_layers, max(config.stage_lengths())
    if recompute.recompute_granularity == "full" and (count or 1) > longest:
        yield f"--recompute-num-layers {count} is more than the {longest} layers of a stage"
    num_kept = recompute.num_microbatches_with_partial_activation_checkpoints
    most = config.training.most_microbatches(dp_size)
    if num_kept and num_kept >= config.most_in_flight(most):
        yield (
            f"--num-microbatches-with-partial-activation-checkpoints {num_kept} is not below the "
            f"micro-batches of a step, {most} at most, so nothing is recomputed"
        )
    if recompute.recompute_policy and not recompute.is_to_be_chosen:
        yield from check_policy_reaches(recompute.policy, config.stage_lengths())


def _of_regions(config: RunConfig, actions: list[LayerAction], modules: list[str]) -> Iterator[str]:
    """Yields the regions of a policy that save nothing. modules: the regions of all actions."""
    model = config.model
    # With attention dropout a CPU has no flash kernel and builds the scores; CUDA does not. This
    # notice is for regions without effect on both. `_of_placement` has the other case.
    always_flash = not any(map(model.builds_scores, ("cpu", "cuda")))
    for region in without_effect(modules, builds_scores=not always_flash):
        yield (
            f"--recompute-modules {region} saves next to nothing under --attention-backend "
            f"{model.attention_backend}: flash attention rebuilds its scores in backward by itself"
        )
    if any(action.router for action in actions) and model.num_experts is None:
        yield "--recompute-policy +router has no effect: these layers have no router"
    if any(action.tiles > 1 for action in actions) and model.num_dense_layers == 0:
        yield "--recompute-policy mlp/N has no effect: every layer has experts"
    for region in modules:
        # `pointwise` names every cheap region, whatever the layers have.
        wanted = REGIONS[region].needs == "experts" and not {*POINTWISE} <= {*modules}
        if wanted and model.num_experts is None:
            yield f"--recompute-modules {region} has no effect without --num-experts"
        if REGIONS[region].needs == "latents" and not model.multi_latent_attention:
            yield f"--recompute-modules {region} has no effect without --multi-latent-attention"
        if region == MLP_REGION and model.num_dense_layers == 0:
            yield f"--recompute-modules {region} has no effect: every layer has experts; use {MOE}"
        if not model.norms_before and REGIONS[region].needs == "norms_before":
            yield (
                f"--recompute-modules {region} has no effect under --norm-position after: no "
                "operation keeps the output of such a norm"
            )
    for region, parent in dict.fromkeys(pair for one in actions for pair in nested(one.regions)):
        yield f"--recompute-modules {region} adds nothing to {parent}, which it is a part of"


def _of_formats(config: RunConfig, world_size: int) -> Iterator[str]:
    optimizer = config.optimizer
    if optimizer.exp_avg_sq_dtype == "bf16" and 1.0 - optimizer.adam_beta2 <= LOST_IN_BF16:
        yield (
            f"--exp-avg-sq-dtype bf16 with --adam-beta2 {optimizer.adam_beta2}: bfloat16 rounds a "
            "decay of 1/256 and less away, so the mean square never falls: give fp16, or a "
            "--adam-beta2 below 0.996"
        )
    schedule = config.batch_schedule(config.parallel.data_parallel_size(world_size))
    number = schedule.num_microbatches(schedule.full)
    if optimizer.main_grads_dtype == "bf16" and number * LOST_IN_BF16 >= 1.0:
        yield (
            f"--main-grads-dtype bf16 adds {number} micro-batches a step, and a sum in bfloat16 "
            "loses what is below 1/256 of it, so that gradients shrink: make micro-batches "
            "larger, or give fp32"
        )


def _of_placement(config: RunConfig, device: str, is_alone: bool) -> Iterator[str]:
    model, profiling = config.model, config.profiling
    modules = {region for rule in config.recompute.policy.rules for region in rule.action.regions}
    if model.builds_scores("cpu"):  # else all devices behave alike: `_of_regions`
        for region in without_effect(sorted(modules), builds_scores=model.builds_scores(device)):
            yield (
                f"--recompute-modules {region} saves next to nothing on {device}: flash attention "
                "runs there, and rebuilds its scores in backward by itself"
            )
    graphs = config.training.cuda_graph_impl
    for name, is_set, why in (
        (
            "--profile",
            profiling.profile and not profiling.use_pytorch_profiler,
            "Nsight Systems profiles CUDA; --use-pytorch-profiler works here, too",
        ),
        (
            "--record-memory-history",
            profiling.record_memory_history,
            "it records CUDA's allocations; --memory-timeline FILE works here, too",
        ),
        (f"--cuda-graph-impl {graphs}", graphs != "none", "it launches the kernels of a GPU"),
    ):
        if is_set and device != "cuda":
            yield f"{name} has no effect on {device}: {why}"
    if model.attention_backend == "fused":
        is_a2a = config.parallel.exchanges == {"a2a"}
        cp_size = 1 if is_a2a else config.parallel.context_parallel_size
        if device != "cuda" or cp_size > 1:
            yield (
                "--attention-backend fused has no effect on "
                f"{f'--context-parallel-size {cp_size}' if cp_size > 1 else device}: torch's flash "
                "kernel runs there, not cuDNN's"
            )
        elif model.window_size or config.data.reset_attention_mask:
            yield (
                "--attention-backend fused has no effect on layers with "
                f"{'a window' if model.window_size else 'documents'}: cuDNN's kernel takes no such "
                "mask here"
            )
    for name in (
        *("overlap_grad_reduce", "overlap_param_gather", "grad_reduce_in_bf16"),
        *("use_distributed_optimizer", "use_torch_fsdp2"),
    ):
        if is_alone and getattr(config.data_parallel, name):
            yield (
                f"{flag(name)} has no effect at data-parallel size 1: nothing is shared out or "
                "summed"
            )


def _of_log(
    config: RunConfig, device: str, world_size: int, is_alone: bool, here: Here
) -> Iterator[str]:
    training, precision = config.training, config.training.precision
    if here.torch_lacks:
        yield f"{here.torch_lacks}: what needs them raises an error"
    if config.optimizer.stochastic_rounding:
        yield (
            "--stochastic-rounding: a main weight is rounded to one of its two neighbours in "
            f"float16, by numbers from --seed {training.seed}, its name, place and update"
        )
    if config.recompute.recompute_verify and device != "cpu" and not training.deterministic_mode:
        yield (
            "--recompute-verify compares what replays rebuild. It cannot compare gradients here: "
            "without --deterministic-mode the backward kernels of a GPU do not repeat their own "
            "bits"
        )
    if device == "cpu" and precision != "fp32" and not here.multiplies_16_bits:
        yield (
            f"--{precision} on this CPU: its torch has only slow loops for products of 16 bits, "
            "which take up to a hundred times as long as those of float32. Leave "
            f"--{precision} out here"
        )
    fsdp = config.data_parallel.use_torch_fsdp2
    fsdp = fsdp and config.parallel.num_distributed_optimizer_instances == 1
    if training.check_weight_hash_across_dp_replicas_interval and (is_alone or fsdp):
        yield (
            "--check-weight-hash-across-dp-replicas-interval compares nothing over data-parallel "
            f"ranks: {'there is one' if is_alone else '--use-torch-fsdp2 keeps one copy'}. It "
            "compares weights that tensor-parallel ranks or the ends of the pipeline hold alike"
        )
    if config.logging.log_straggler and world_size == config.parallel.pipeline_model_parallel_size:
        yield (
            "--log-straggler names nobody: it compares the ranks of a pipeline stage, and each "
            "has one"
        )
    if training.loss_chunk_size is None and config.loss_chunk_size is not None:
        yield (
            f"loss: {config.loss_chunk_size} tokens have logits at a time, which takes less memory "
            "and about the same time (--loss-chunk-size 0: all at once)"
        )
