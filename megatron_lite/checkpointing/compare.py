"""Compares a run with the checkpoint that it goes on from.

A difference in the model, the update rule or the data raises InputError (the `check_same_...`
functions). A difference in another setting that decides the run's course is allowed, and
`changed_settings` lists it for the log. All other differences are allowed and not listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megatron_lite.config.checks import InputError, flag
from megatron_lite.config.run import RunConfig

LONGEST_SHOWN = 200


def check_same_model(ours: RunConfig, saved: RunConfig, *, where: str) -> None:
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
        "norm_impl",
    }
    mine, theirs = asdict(ours.model), asdict(saved.model)
    mine["vocabulary"] = ours.tokenizer.true_vocab_size
    theirs["vocabulary"] = saved.tokenizer.true_vocab_size
    differing = {
        name: (theirs[name], mine[name])
        for name in mine
        if name not in free and mine[name] != theirs[name]
    }
    if differing:
        raise InputError(
            f"{where} holds another model. Give the flags of its model, or another --load, or none "
            f"to start from scratch:{_table(differing)}"
        )


def check_same_update_rule(ours: RunConfig, saved: RunConfig, *, where: str) -> None:
    """Raises InputError if the saved optimizer states belong to another update rule."""
    mine, theirs = ours.optimizer.optimizer, saved.optimizer.optimizer
    if mine != theirs:
        raise InputError(
            f"{where} holds the optimizer states of --optimizer {theirs}, from which --optimizer "
            f"{mine} cannot go on: give --optimizer {theirs}, or --no-load-optim to start the "
            "states from zero, or --finetune to take the weights alone"
        )


def check_same_data(ours: Mapping[str, Any], saved: Mapping[str, Any], *, where: str) -> None:
    """Raises InputError unless both runs read the same documents, split and cut alike.

    The error holds a table of the differing fields. The paths of the files do not count. --seed and
    the length of the run do not count either, because they decide only the order of the samples.
    """
    differing = {
        name: (saved.get(name), ours.get(name))
        for name in sorted({*ours, *saved})
        if ours.get(name) != saved.get(name)
    }
    if differing:
        raise InputError(
            f"{where} was trained on other data, and its position there means nothing here. Give "
            f"its data, or --allow-changed-data to go on with this one:{_table(differing)}"
        )


def changed_settings(ours: RunConfig, saved: RunConfig) -> list[str]:
    """Returns a line for each changed setting that decides the run's course.

    Settings about storage, logging, evaluation and the length of one start do not count.
    """
    free = {
        "exit_interval",
        "exit_duration_in_mins",
        "exit_signal_handler",
        "exit_signal",
        "eval_interval",
        "eval_iters",
        "data_cache_path",
        "max_skipped_updates",
        "check_weight_hash_across_dp_replicas_interval",
        "use_checkpoint_opt_param_scheduler",
        "override_opt_param_scheduler",
    }
    topics = ["training", "data", "tokenizer", "optimizer", "loss_scaling", "lr_schedule"]
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
    if ours.model.norm_impl != saved.model.norm_impl:
        lines.append(
            f"changed since the checkpoint: --norm-impl {saved.model.norm_impl} -> "
            f"{ours.model.norm_impl}"
        )
    return lines


def _table(differing: Mapping[str, tuple[Any, Any]]) -> str:
    rows = "".join(
        f"\n  {name:40} {_shown(theirs):>20} {_shown(mine):>20}"
        for name, (theirs, mine) in differing.items()
    )
    return f"\n  {'field':40} {'checkpoint':>20} {'this run':>20}{rows}"


def _shown(value: Any) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + ".."
