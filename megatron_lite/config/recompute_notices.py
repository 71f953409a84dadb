"""The notices about recompute settings that are legal and have no effect, or less than their name
promises. Each notice is one line.
"""

from __future__ import annotations

from collections.abc import Collection

from megatron_lite.config.checks import flag
from megatron_lite.config.host_parts import NORM_PARTS, parts_of
from megatron_lite.config.operators import GROUPS, parse_entry
from megatron_lite.config.policy_reach import check_policy_reaches
from megatron_lite.config.regions import REGIONS, any_skips_tail, nested, without_effect
from megatron_lite.config.run import RunConfig

OWN_ATTENTION = "megatron_lite.context_parallel_attention.default"


def recompute_notices(config: RunConfig) -> list[str]:
    """Returns the notices that follow from the configuration alone."""
    recompute, notices = config.recompute, []
    actions = [rule.action for rule in recompute.policy.rules]
    modules = sorted({region for action in actions for region in action.regions})
    # With attention dropout a CPU has no flash kernel and builds the scores; CUDA does not. This
    # notice is for regions without effect on both. `recompute_notices_on` has the other case.
    for region in without_effect(
        modules, builds_scores=any(map(config.model.builds_scores, ("cpu", "cuda")))
    ):
        notices.append(
            f"--recompute-modules {region} saves next to nothing under --attention-backend "
            f"{config.model.attention_backend}: flash attention rebuilds its scores in "
            "backward by itself"
        )
    if config.model.norms_after:
        notices += [
            f"--recompute-modules {region} has no effect under --norm-position after: no "
            "operation keeps the output of such a norm"
            for region in modules
            if REGIONS[region].needs_norms_before
        ]
        named = {part for rule in recompute.policy.rules for part in parts_of(rule.store)}
        notices += [
            f"{part} in host memory has no effect under --norm-position after: no norm reads the "
            "input of attention or of the MLP"
            for part in NORM_PARTS
            if part in named
        ]
    for region, parent in dict.fromkeys(
        pair for action in actions for pair in nested(action.regions)
    ):
        notices.append(
            f"--recompute-modules {region} adds nothing to {parent}, which it is a part of"
        )
    notices += _operators_without_effect(
        config, {parse_entry(text).name for action in actions for text in action.ops}
    )
    has_tail = any(action.unit or action.ops for action in actions) or any_skips_tail(modules)
    if not recompute.recompute_tail_skip and not has_tail:
        notices.append(
            "--no-recompute-tail-skip has no effect: nothing is recomputed that ends in a matmul"
        )
    if recompute.recompute_verify and has_tail and recompute.recompute_tail_skip:
        notices.append(
            "--recompute-verify turns the tail skip off: it compares the whole of every replay"
        )
    if (
        recompute.activation_memory_budget is not None
        and config.model.hidden_dropout + config.model.attention_dropout > 0.0
    ):
        notices.append(
            "--activation-memory-budget is a share of what each compiled graph keeps, and "
            "every dropout ends a graph"
        )
    if recompute.recompute_policy is not None and not recompute.is_to_be_chosen:
        notices += check_policy_reaches(recompute.policy, config.stage_lengths())
    return [*notices, *_longer_than_a_stage(config), *_partial_checkpointing_without_effect(config)]


def unread_notices(config: RunConfig, given: Collection[str]) -> list[str]:
    """Returns a notice for each recompute setting of the command line that nothing reads.

    given: the fields that the command line sets.
    """
    granularity = config.recompute.recompute_granularity
    if config.recompute.recompute_policy is not None or granularity == "selective":
        return []  # the configuration refuses what they do not read
    unread, reason = {
        None: (
            ("recompute_method", "recompute_num_layers", "recompute_modules"),
            "without --recompute-granularity: nothing is recomputed",
        ),
        "full": (
            ("recompute_modules",),
            "with --recompute-granularity full, which rebuilds whole layers",
        ),
    }[granularity]
    return [f"{flag(name)} has no effect {reason}" for name in unread if name in given]


def recompute_notices_on(config: RunConfig, device: str) -> list[str]:
    """Returns the notices that depend on the device, "cpu" or "cuda".

    The run knows the device. The parser of the command line does not.
    """
    modules = sorted(
        {region for rule in config.recompute.policy.rules for region in rule.action.regions}
    )
    if not config.model.builds_scores("cpu"):
        return []  # all devices behave alike, and `recompute_notices` has the notice
    return [
        f"--recompute-modules {region} saves next to nothing on "
        f"{'CUDA' if device == 'cuda' else 'a CPU'}: flash attention runs there, and rebuilds its "
        "scores in backward by itself"
        for region in without_effect(modules, builds_scores=config.model.builds_scores(device))
    ]


def _longer_than_a_stage(config: RunConfig) -> list[str]:
    count, longest = config.recompute.recompute_num_layers, max(config.stage_lengths())
    ends = {"block": "all of them are recomputed", "uniform": "each stage is one unit"}
    end = ends.get(config.recompute.recompute_method or "")
    if end is None or count is None or count <= longest:
        return []
    return [f"--recompute-num-layers {count} is more than the {longest} layers of a stage: {end}"]


def _partial_checkpointing_without_effect(config: RunConfig) -> list[str]:
    num_kept = config.recompute.num_microbatches_with_partial_activation_checkpoints
    if num_kept is None:
        return []
    # One data-parallel rank has the most micro-batches. More ranks have fewer each.
    most = (
        config.training.most_microbatches(1) if config.training.global_batch_size is not None else 1
    )
    if num_kept < config.most_in_flight(most):
        return []
    return [
        f"{flag('num_microbatches_with_partial_activation_checkpoints')} {num_kept}: a step has at "
        f"most {most} micro-batch{'es' if most > 1 else ''} (--global-batch-size over "
        "--micro-batch-size), so all of them keep everything and nothing is recomputed"
    ]


def _operators_without_effect(config: RunConfig, names: set[str]) -> list[str]:
    no_attention = ""
    if config.model.always_unfused:
        no_attention = "attention is unfused and builds its scores"
    elif config.model.attention_dropout > 0.0:
        no_attention = (
            "--attention-dropout draws random numbers, so that attention has to run again"
        )
    reasons = {
        "attention": no_attention,
        "collective": _no_collective(config),
        "max": "no layer of this model computes one",
    }
    kernels = set(GROUPS["attention"]) - {OWN_ATTENTION}
    if config.parallel.context_parallel_size > 1:
        reasons |= dict.fromkeys(
            kernels, f"over context-parallel ranks attention is one operator, {OWN_ATTENTION}"
        )
    else:
        reasons[OWN_ATTENTION] = "--context-parallel-size is 1"
    return [
        f"--recompute-policy ops({name}) keeps nothing: {reason}"
        for name, reason in reasons.items()
        if reason and name in names
    ]


def _no_collective(config: RunConfig) -> str:
    """Returns why no layer issues a collective that can be kept, or "" if layers issue one."""
    parallel = config.parallel
    if parallel.tensor_model_parallel_size > 1 or (
        parallel.context_parallel_size > 1 and config.model.always_unfused
    ):
        return ""
    if parallel.context_parallel_size > 1:
        return (
            "--tensor-model-parallel-size is 1, and what context-parallel ranks exchange is "
            "part of their attention"
        )
    return "--tensor-model-parallel-size is 1"
