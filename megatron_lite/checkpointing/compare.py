"""What may differ between a run and the checkpoint that it goes on from: nothing, anything, or anything that is then told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megatron_lite.config.checks import InputError, flag
from megatron_lite.config.run import RunConfig


def check_same_model(ours: RunConfig, saved: RunConfig, *, where: str) -> None:
    """InputError with a table of the differing fields, unless weights of `saved` fit into a model of `ours`.

    Dropout, the attention backend and the spread of initial weights may differ: they do not change what a weight means.
    """
    free = {"hidden_dropout", "attention_dropout", "attention_backend", "attention_softmax_in_fp32", "init_method_std"}
    mine, theirs = asdict(ours.model), asdict(saved.model)
    mine["vocabulary"], theirs["vocabulary"] = ours.tokenizer.true_vocab_size, saved.tokenizer.true_vocab_size
    differing = {name: (theirs[name], mine[name]) for name in mine if name not in free and mine[name] != theirs[name]}
    if differing:
        raise InputError(f"{where} holds another model:{_table(differing)}")


def check_same_data(ours: Mapping[str, Any], saved: Mapping[str, Any], *, where: str) -> None:
    """InputError with a table of what differs, unless both runs read the same documents, split and cut alike.

    Where the files lie does not count. --seed and the length of the run do not either: they decide the order alone.
    """
    differing = {name: (saved.get(name), ours.get(name)) for name in sorted({*ours, *saved}) if ours.get(name) != saved.get(name)}
    if differing:
        raise InputError(f"{where} was trained on other data, and its position there means nothing here. Give its data, or "
                         f"--allow-changed-data to go on with this one:{_table(differing)}")


def changed_settings(ours: RunConfig, saved: RunConfig) -> list[str]:
    """A line for each setting that decides the run's course and differs from the checkpoint's. Where a run is stored, logged and
    evaluated does not count, nor how long one start of it lasts."""
    free = {"exit_interval", "exit_duration_in_mins", "exit_signal_handler", "exit_signal", "eval_interval", "eval_iters",
            "data_cache_path", "max_skipped_updates", "check_weight_hash_across_dp_replicas_interval"}
    lines = []
    for topic in ("training", "data", "tokenizer", "optimizer", "loss_scaling", "lr_schedule"):
        mine, theirs = asdict(getattr(ours, topic)), asdict(getattr(saved, topic))
        lines += [f"changed since the checkpoint: {flag(name)} {theirs[name]} -> {mine[name]}" for name in mine
                  if mine[name] != theirs[name] and name not in free]
    return lines


def _table(differing: Mapping[str, tuple[Any, Any]]) -> str:
    rows = "".join(f"\n  {name:40} {_shown(theirs):>20} {_shown(mine):>20}" for name, (theirs, mine) in differing.items())
    return f"\n  {'field':40} {'checkpoint':>20} {'this run':>20}{rows}"


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
