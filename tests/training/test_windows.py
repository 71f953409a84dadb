"""Runs of models whose layers differ: the bytes that they keep, and that a resumed run equals an
uninterrupted one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.config.recompute import RecomputeConfig
from tests.support.pairs import only
from tests.support.runs import rows, run_to_end, tiny_run

ALIKE: dict[str, Any] = dict(num_layers=3, position_embedding_type="rope")
DIFFERING = ALIKE | dict(window_size=(4, 0), window_attn_skip_freq=2, no_rope_freq=(0, 1, 0))
POLICIES = [
    dict(),
    dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2),
    dict(recompute_activations=True),
    dict(recompute_policy="*:ops(matmul,attention)"),
    dict(recompute_policy="*:none@host"),
]


GROUPS = dict(group_query_attention=True, num_query_groups=2)


@pytest.mark.parametrize(
    "attention",
    only(
        [
            dict(attention_dropout=0.0),
            dict(attention_dropout=0.0, qk_layernorm=True, **GROUPS),
            dict(attention_dropout=0.0, attention_backend="unfused"),
            dict(attention_dropout=0.1, **GROUPS),
        ],
        1,
        2,
    ),
    ids=["flash", "flash, groups", "unfused", "dropout, groups"],
)
def test_windows_and_rotation_change_no_byte_of_what_is_predicted_and_measured(
    tmp_path: Path, attention: dict[str, Any]
) -> None:
    """A layer that does not rotate keeps queries and keys as they come, in the same number of
    bytes.

    And no policy changes a digit of the losses.
    """
    losses = []
    for number, policy in enumerate(POLICIES):
        kept = []
        for model in (DIFFERING, ALIKE):
            metrics = tmp_path / f"{number}-{len(model)}.jsonl"
            config = tiny_run(
                metrics=metrics,
                model={**model, **attention},
                training=dict(train_iters=2, eval_iters=0),
            )
            run_to_end(replace(config, recompute=RecomputeConfig(**policy)))
            kept.append(
                [
                    (row["activation_bytes_predicted"], row["activation_bytes_measured"])
                    for row in rows(metrics)
                ]
            )
            if model is DIFFERING:
                losses.append([json.dumps(row["lm_loss"]) for row in rows(metrics)])
        assert kept[0] == kept[1], policy
        assert all(predicted == measured for predicted, measured in kept[0]), policy
    assert all(each == losses[0] for each in losses)
