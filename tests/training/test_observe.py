"""What a run says of its own memory, and that no policy changes a digit of what it logs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pretrain_gpt
from megatron_lite.config.logging_settings import LoggingConfig
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.memory.measure.timeline import compared, read_timeline
from megatron_lite.model.layer import MLP
from megatron_lite.training.step import TrainingError
from tests.support.commands import MOCK, SMALL_RUN
from tests.support.mutants import replaces
from tests.support.ranks import run_ranks
from tests.support.runs import run_to_end, tiny_run

FULL = dict(recompute_granularity="full")
POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "uniform": dict(**FULL, recompute_method="uniform"),
    "units of 2, split": dict(
        **FULL,
        recompute_method="uniform",
        recompute_num_layers=2,
        distribute_saved_activations=True,
    ),
    "block": dict(**FULL, recompute_method="block", recompute_num_layers=2),
    "block, whole tail": dict(**FULL, recompute_method="block", recompute_tail_skip=False),
    "core_attn": dict(recompute_activations=True),
    "pointwise": dict(
        recompute_granularity="selective",
        recompute_modules=("core_attn", "layernorm", "activation"),
    ),
    "layers on the host": dict(recompute_policy="*:none@host"),
    "split, on the host": dict(
        recompute_policy="*:full@split+host",
        contiguous_saved_activations=True,
        recompute_verify=True,
    ),
    "mlp, verified": dict(
        recompute_granularity="selective",
        recompute_modules=("mlp", "layernorm"),
        recompute_verify=True,
    ),
}


ITERATIONS = 8


def _train_each(rank: int, world_size: int, folder: Path) -> None:
    for name, flags in POLICIES.items():
        config = tiny_run(
            tp_size=world_size,
            metrics=folder / name,
            model=dict(num_layers=3),
            training=dict(train_iters=ITERATIONS, micro_batch_size=2, eval_iters=0),
        )
        run_to_end(replace(config, recompute=RecomputeConfig(**flags)))


@pytest.mark.long
def test_iterations_with_dropout_log_the_same_text_under_every_policy(tmp_path: Path) -> None:
    run_ranks(_train_each, 2, tmp_path, detail=False)
    texts, kept = {}, {}
    for name in POLICIES:
        rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        texts[name] = [(json.dumps(row["lm_loss"]), json.dumps(row["grad_norm"])) for row in rows]
        assert all(
            row["activation_bytes_predicted"] == row["activation_bytes_measured"] for row in rows
        ), name
        assert all(
            row["activation_host_bytes_predicted"] == row["activation_host_bytes_measured"]
            for row in rows
        ), name
        assert (rows[0]["activation_host_bytes_measured"] is not None) == ("on the host" in name)
        kept[name] = rows[0]["activation_bytes_measured"]
    assert len(set(texts["none"])) == ITERATIONS and all(
        text == texts["none"] for text in texts.values()
    )
    assert (
        kept["units of 2, split"]
        < kept["uniform"]
        < kept["block"]
        < kept["none"]
        > kept["pointwise"]
    )
    assert kept["layers on the host"] < kept["split, on the host"] < kept["uniform"]


def _keep_a_tensor(
    monkeypatch: pytest.MonkeyPatch, kept: list[torch.Tensor], *, by_the_graph: bool
) -> None:
    """The MLP's activation keeps 4 bytes per element of its output more than it did: for backward,
    or just so."""

    @replaces("_activate", MLP)
    def wasteful(activate: Any, self: MLP, intermediate: torch.Tensor) -> torch.Tensor:
        output = activate(self, intermediate)
        if by_the_graph:
            return output * torch.ones_like(output)
        kept.append(output.detach().clone())
        return output

    wasteful(monkeypatch)


MLP_BYTES = 2 * 16 * 1 * 4 * 32 * 4  # layers, s, b, f, float32


@pytest.mark.parametrize("verify", [False, True])
def test_bytes_that_were_not_predicted_are_a_warning_and_under_verify_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verify: bool
) -> None:
    _keep_a_tensor(monkeypatch, [], by_the_graph=True)
    config = replace(
        tiny_run(training=dict(train_iters=1)), recompute=RecomputeConfig(recompute_verify=verify)
    )
    message = f"were predicted (+{MLP_BYTES})"  # torch keeps the ones, not the output
    named = (
        "saved but not predicted: layer 0, module decoder.layers.0.mlp: float32 [16, 1, "
        "128], 8,192 bytes"
    )
    if verify:
        with pytest.raises(TrainingError) as raised:
            run_to_end(config)
        assert (
            "--recompute-verify" in str(raised.value)
            and message in str(raised.value)
            and named in str(raised.value)
        )
    else:
        run_to_end(config)
        assert (
            sum(
                line.startswith("warning") and message in line and named in line
                for line in capsys.readouterr().out.splitlines()
            )
            == 1
        )


def test_a_tensor_that_lives_on_beside_the_graph_is_an_error_under_verify(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _keep_a_tensor(monkeypatch, [], by_the_graph=False)
    config = replace(
        tiny_run(training=dict(train_iters=1)), recompute=RecomputeConfig(recompute_verify=True)
    )
    with pytest.raises(TrainingError, match=f"{MLP_BYTES} bytes live on"):
        run_to_end(config)


def _record(rank: int, world_size: int, folder: Path) -> None:
    config = tiny_run(tp_size=world_size, metrics=folder / "metrics", training=dict(train_iters=3))
    run_to_end(
        replace(
            config,
            recompute=RecomputeConfig(**POLICIES["uniform"]),
            logging=LoggingConfig(
                memory_timeline=str(folder / "timeline.json"), metrics_jsonl=str(folder / "metrics")
            ),
        )
    )


def test_a_timeline_of_the_run_is_written_and_changes_nothing(tmp_path: Path) -> None:
    plain, recorded = tmp_path / "plain", tmp_path / "recorded"
    plain.mkdir()
    recorded.mkdir()
    run_ranks(
        lambda rank, size: (
            run_to_end(
                replace(
                    tiny_run(tp_size=size, metrics=plain / "metrics", training=dict(train_iters=3)),
                    recompute=RecomputeConfig(**POLICIES["uniform"]),
                )
            )
            and None
        ),
        2,
    )
    run_ranks(_record, 2, recorded)
    losses = [
        [json.loads(line)["lm_loss"] for line in (folder / "metrics").read_text().splitlines()]
        for folder in (plain, recorded)
    ]
    assert losses[0] == losses[1]
    timeline = read_timeline(str(recorded / "timeline.json"))
    assert timeline.name == "0-1:full" and {event.phase for event in timeline.events} == {
        "forward",
        "replay",
        "backward",
    }
    points = compared(timeline)
    assert len(points) == 2 + 1 + 2 * 2  # each layer's forward, the loss, each replay and backward
    exact = [one for one in points if one.exact]
    assert len(exact) == 5
    assert [one.predicted_bytes for one in exact] == [one.measured_bytes for one in exact]


def test_a_replay_that_differs_ends_the_program_with_one_line_that_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = iter(range(10**6))

    @replaces("_activate", MLP)
    def counting(activate: Any, self: MLP, intermediate: torch.Tensor) -> torch.Tensor:
        return activate(self, intermediate) * (1.0 + next(calls))

    counting(monkeypatch)
    status = pretrain_gpt.main(
        [
            *SMALL_RUN,
            *MOCK,
            "--recompute-granularity",
            "full",
            "--recompute-method",
            "uniform",
            "--recompute-verify",
        ]
    )
    error = capsys.readouterr().err.strip().splitlines()
    assert status == 1 and len(error) == 1
    assert (
        "--recompute-verify: a replay is not what its forward was at layer 1, activation: "
        "tensor 0 [16, 2, 128]"
    ) in error[0]
