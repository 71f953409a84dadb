"""The notices about a run: one list of rows (kind, condition, sentence), each about a setting that
is legal and has no effect, or less effect than its name promises.

`RunNotices` (training/run_notices.py) shares them out between the terminal and the log.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain
from typing import NamedTuple

from megatron_lite.config.checks import flag
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
from megatron_lite.config.run_flags import flag_of, run_fields, topics
from megatron_lite.config.setting import condition

Rows = Iterator[tuple[str, object, str]]


class Here(NamedTuple):
    """What only a process with torch knows about this machine.

    torch_lacks: torch's version and the names that it lacks. apex: a line about the apex that is
    installed here. multiplies_16_bits: whether 16-bit products have instructions of their own.
    """

    torch_lacks: str = ""
    apex: str | None = None
    multiplies_16_bits: bool = True


UNKNOWN = Here()


def notices(
    config: RunConfig,
    about: str,
    *,
    given: Collection[str] = (),
    device: str = "cpu",
    world_size: int = 1,
    here: Here = UNKNOWN,
) -> list[str]:
    """Returns the notices of one kind.

    about: "settings": those that follow from the configuration alone, with those of "recompute".
        "recompute": those about recomputation, which the report of --explain-recompute has too.
        "placement": those that depend on the device and on the number of ranks.
        "log": those that only the log has: kernels, checks that have nothing to compare, defaults.
    given: the fields that the command line sets, for "settings".
    device, world_size, here: "cpu" or "cuda", the number of ranks and the machine, for "placement"
        and "log". Raises ValueError if the number is not a multiple of the ranks of one model.
    """
    kinds = {"settings": ("settings", "recompute")}.get(about, (about,))
    if about in ("placement", "log"):
        rows = _of_ranks(config, device, world_size, here)
    else:
        rows = chain(_unread(config, given), _of_run(config), _of_recompute(config))
    return [sentence for kind, holds, sentence in rows if kind in kinds and holds]


def _unread(config: RunConfig, given: Collection[str]) -> Rows:
    """Yields the fields that are set and that nothing reads. A field is set if the command line
    gives it, or if it does not have its default."""
    data_parallel, scale = config.data_parallel, config.loss_scaling.loss_scale
    rows = {
        "fp32_residual_connection": (
            config.training.precision == "fp32",
            "without --bf16 or --fp16: all of the run is in float32",
        ),
        **dict.fromkeys(
            ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
            (scale is not None and config.training.fp16, f"with --loss-scale {scale}, a constant"),
        ),
        **dict.fromkeys(
            ("overlap_grad_reduce", "ddp_bucket_size"),
            (
                data_parallel.use_torch_fsdp2,
                "under --use-torch-fsdp2, which always overlaps, layer by layer",
            ),
        ),
    }
    values = {
        name: value for topic in topics() for name, value in vars(getattr(config, topic)).items()
    }
    for name, one in run_fields().items():
        is_unread, why = rows.get(name, (False, ""))
        if not is_unread and one.facts.without:
            needed = condition(one.facts.without, values)
            is_unread, why = not needed.holds, f"without {needed.text}"
            why += "" if one.facts.needs else one.facts.reason
        is_set = name in given or values[name] != one.default
        yield "settings", is_unread and is_set, f"{flag_of(name)} has no effect {why}"


def _of_run(config: RunConfig) -> Rows:
    model, data, parallel, training = config.model, config.data, config.parallel, config.training
    window, chunk = model.window_size, training.loss_chunk_size
    tokens = data.seq_length // parallel.context_parallel_size * training.micro_batch_size
    documents = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
    of_documents = [flag(name) for name in documents if getattr(data, name)]
    yield (
        "settings",
        not model.add_bias_linear and model.activation == "gelu" and model.bias_gelu_fusion,
        "GELU has its tanh form; Megatron computes the exact one if the linear layers have no "
        "bias: --no-bias-gelu-fusion",
    )
    yield (
        "settings",
        parallel.context_parallel_size > 1
        and model.attention_backend == "unfused"
        and parallel.cp_comm_type == "p2p",
        "--cp-comm-type p2p has no effect on unfused attention, which gathers keys and values",
    )
    yield (
        "settings",
        chunk and chunk >= tokens,
        f"--loss-chunk-size {chunk} takes all {tokens} tokens of a micro-batch at once: their "
        "logits are not kept, but exist",
    )
    yield (
        "settings",
        window is not None and reach(window, data.seq_length) is None,
        f"--window-size {spelled(window or 0)} limits nothing: --seq-length {data.seq_length} is "
        "not longer",
    )
    yield (
        "settings",
        data.mock_data and of_documents,
        f"--mock-data packs no documents: {', '.join(of_documents)} find end-of-document "
        "tokens in its samples by chance only",
    )


def _of_recompute(config: RunConfig) -> Rows:
    model, parallel, recompute = config.model, config.parallel, config.recompute
    rules = recompute.policy.rules
    actions = [rule.action for rule in rules]
    modules = sorted({region for action in actions for region in action.regions})
    has_tail = any(action.unit or action.ops for action in actions) or any_skips_tail(modules)
    # With attention dropout a CPU has no flash kernel and builds the scores; CUDA does not. This
    # notice is for regions without effect on both. `_of_ranks` has the other case.
    always_flash = not any(map(model.builds_scores, ("cpu", "cuda")))
    about: list[tuple[object, str]] = [
        (
            True,
            f"--recompute-modules {region} saves next to nothing under --attention-backend "
            f"{model.attention_backend}: flash attention rebuilds its scores in backward by itself",
        )
        for region in without_effect(modules, builds_scores=not always_flash)
    ]
    about += [
        (
            any(action.router for action in actions),
            "--recompute-policy +router has no effect: these layers have no router",
        )
    ]
    about += [
        (
            model.norms_after and REGIONS[region].needs_norms_before,
            f"--recompute-modules {region} has no effect under --norm-position after: no "
            "operation keeps the output of such a norm",
        )
        for region in modules
    ]
    about += [
        (
            model.norms_after and any(part in parts_of(rule.store) for rule in rules),
            f"{part} in host memory has no effect under --norm-position after: no norm reads the "
            "input of attention or of the MLP",
        )
        for part in NORM_PARTS
    ]
    about += [
        (True, f"--recompute-modules {region} adds nothing to {parent}, which it is a part of")
        for region, parent in dict.fromkeys(pair for one in actions for pair in nested(one.regions))
    ]
    names = {parse_entry(text).name for action in actions for text in action.ops}
    sends_attention = parallel.context_parallel_size > 1 and model.always_unfused
    about += [
        (name in names and keeps_nothing, f"--recompute-policy ops({name}) keeps nothing: {reason}")
        for name, keeps_nothing, reason in (
            ("attention", model.always_unfused, "attention is unfused and builds its scores"),
            (
                "attention",
                not model.always_unfused and model.attention_dropout > 0.0,
                "--attention-dropout draws random numbers, so that attention has to run again",
            ),
            (
                "collective",
                parallel.tensor_model_parallel_size == 1 and not sends_attention,
                "--tensor-model-parallel-size is 1, and what context-parallel ranks exchange is "
                "part of their attention",
            ),
            ("max", True, "no layer of this model computes one"),
        )
    ]
    count, longest = recompute.recompute_num_layers, max(config.stage_lengths())
    num_kept = recompute.num_microbatches_with_partial_activation_checkpoints
    # One data-parallel rank has the most micro-batches. More ranks have fewer each.
    has_batch = config.training.global_batch_size is not None
    most = config.training.most_microbatches(1) if has_batch else 1
    about += [
        (
            not recompute.recompute_tail_skip and not has_tail,
            "--no-recompute-tail-skip has no effect: nothing is recomputed that ends in a matmul",
        ),
        (
            recompute.recompute_verify and has_tail and recompute.recompute_tail_skip,
            "--recompute-verify turns the tail skip off: it compares the whole of every replay",
        ),
        (
            config.compiles_layers and model.hidden_dropout + model.attention_dropout > 0.0,
            "--activation-memory-budget is a share of what each compiled graph keeps, and every "
            "dropout ends a graph",
        ),
        (
            recompute.recompute_granularity == "full" and (count or 1) > longest,
            f"--recompute-num-layers {count} is more than the {longest} layers of a stage",
        ),
        (
            num_kept is not None and num_kept >= config.most_in_flight(most),
            f"--num-microbatches-with-partial-activation-checkpoints {num_kept} is not below the "
            f"micro-batches of a step, {most} at most, so nothing is recomputed",
        ),
    ]
    if recompute.recompute_policy is not None and not recompute.is_to_be_chosen:
        reached = check_policy_reaches(recompute.policy, config.stage_lengths())
        about += [(True, warning) for warning in reached]
    for holds, sentence in about:
        yield "recompute", holds, sentence


def _of_ranks(config: RunConfig, device: str, world_size: int, here: Here) -> Rows:
    model, parallel, profiling = config.model, config.parallel, config.profiling
    data_parallel, precision = config.data_parallel, config.training.precision
    modules = {region for rule in config.recompute.policy.rules for region in rule.action.regions}
    # the ranks that hold the same parameters and compute different tokens
    is_alone = parallel.data_parallel_size(world_size) * parallel.context_parallel_size == 1
    for region in without_effect(sorted(modules), builds_scores=model.builds_scores(device)):
        yield (
            "placement",
            model.builds_scores("cpu"),  # else all devices behave alike: `_of_recompute`
            f"--recompute-modules {region} saves next to nothing on {device}: flash attention "
            "runs there, and rebuilds its scores in backward by itself",
        )
    yield (
        "placement",
        device != "cuda" and profiling.profile and not profiling.use_pytorch_profiler,
        f"--profile has no effect on {device}: Nsight Systems profiles CUDA; "
        "--use-pytorch-profiler works here, too",
    )
    yield (
        "placement",
        device != "cuda" and profiling.record_memory_history,
        f"--record-memory-history has no effect on {device}: it records CUDA's allocations; "
        "--memory-timeline FILE works here, too",
    )
    for name in (
        *("overlap_grad_reduce", "overlap_param_gather", "grad_reduce_in_bf16"),
        *("use_distributed_optimizer", "use_torch_fsdp2"),
    ):
        yield (
            "placement",
            is_alone and getattr(data_parallel, name),
            f"{flag(name)} has no effect at data-parallel size 1: nothing is shared out or summed",
        )
    yield "log", here.torch_lacks, f"{here.torch_lacks}: what needs them raises an error"
    yield (
        "log",
        config.recompute.recompute_verify
        and device != "cpu"
        and not config.training.deterministic_mode,
        "--recompute-verify compares what replays rebuild. It cannot compare gradients here: "
        "without --deterministic-mode the backward kernels of a GPU do not repeat their own bits",
    )
    yield (
        "log",
        device == "cpu" and precision != "fp32" and not here.multiplies_16_bits,
        f"--{precision} on this CPU: its torch has only slow loops for products of 16 bits, which "
        f"take up to a hundred times as long as those of float32. Leave --{precision} out here",
    )
    yield "log", here.apex, str(here.apex)
    fsdp = data_parallel.use_torch_fsdp2
    yield (
        "log",
        config.training.check_weight_hash_across_dp_replicas_interval is not None
        and (is_alone or fsdp),
        "--check-weight-hash-across-dp-replicas-interval compares nothing over data-parallel "
        f"ranks: {'there is one' if is_alone else '--use-torch-fsdp2 keeps one copy'}. It compares "
        "weights that tensor-parallel ranks or the ends of the pipeline hold alike",
    )
    yield (
        "log",
        config.logging.log_straggler and world_size == parallel.pipeline_model_parallel_size,
        "--log-straggler names nobody: it compares the ranks of a pipeline stage, and each has one",
    )
    yield (
        "log",
        config.training.loss_chunk_size is None and config.loss_chunk_size is not None,
        f"loss: {config.loss_chunk_size} tokens have logits at a time, which takes less memory "
        "and about the same time (--loss-chunk-size 0: all at once)",
    )
