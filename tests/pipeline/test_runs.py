"""Whole runs as a pipeline, through the trainer: losses, checkpoints, resuming, what is logged and
what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from arguments import parse_args
from megatron_lite.checkpointing.load import load_checkpoint
from megatron_lite.config.checks import InputError
from megatron_lite.config.data_parallel import DataParallelConfig
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.memory.explain.recompute_report import explain
from megatron_lite.memory.explain.report_lines import WIDTH
from megatron_lite.memory.explain.report_text import report_text
from megatron_lite.memory.predict.pipeline_memory import rank_memory, ranks_memory, ticks
from megatron_lite.parallel.parameter_spec import spec_of
from megatron_lite.parallel.state import parallel_state
from megatron_lite.training.build_trainer import build_stages, build_trainer
from tests.support.models import whole_tensors
from tests.support.ranks import run_ranks
from tests.support.runs import rows, run_to_end, step_bytes, tiny_run, with_checkpoint

NO_DROPOUT = dict(num_layers=4, hidden_dropout=0.0, attention_dropout=0.0)


def in_layout(config: RunConfig, **sizes: object) -> RunConfig:
    return replace(config, parallel=ParallelConfig(distributed_backend="gloo", **sizes))


PIPELINE = dict(pipeline_model_parallel_size=2)
INTERLEAVED = dict(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2)


def _run(rank: int, world_size: int, config: RunConfig) -> None:
    run_to_end(config)


FSDP = dict(use_torch_fsdp2=True)
WAYS = {
    "fsdp": (PIPELINE, FSDP, "*:none"),
    "fsdp, interleaved": (INTERLEAVED, FSDP, "*:none"),
    "fsdp, full": (INTERLEAVED, FSDP, "*:full"),
    "fsdp, pointwise": (INTERLEAVED, FSDP, "*:pointwise+mlp"),
    "fsdp, no reshard": (PIPELINE, dict(FSDP, torch_fsdp2_reshard_after_forward=False), "*:none"),
    "fsdp, memory-efficient": (
        INTERLEAVED,
        dict(FSDP, fsdp_memory_efficient_wrapping=True),
        "*:none",
    ),
}


@pytest.mark.parametrize("untied", [False, pytest.param(True, marks=pytest.mark.long)])
def test_stages_that_data_parallel_ranks_share_out_train_alike(tmp_path: Path, untied: bool):
    """FSDP2 in a pipeline, with untied embeddings in every way. Among each other the recompute
    policies log the same digits."""
    config = tiny_run(
        model=dict(NO_DROPOUT, untie_embeddings_and_output_weights=untied),
        training=dict(train_iters=4),
    )

    def logged(
        name: str, ranks: int, sizes: dict[str, object], flags: dict[str, bool], policy: str
    ) -> list[dict[str, object]]:
        run = replace(
            in_layout(config, **sizes),
            data_parallel=DataParallelConfig(**flags),
            recompute=RecomputeConfig(recompute_policy=policy),
            logging=replace(config.logging, metrics_jsonl=str(tmp_path / name)),
        )
        run_ranks(_run, ranks, run, detail=False)
        return rows(tmp_path / name)

    expected = logged("alone", 1, {}, {}, "*:none")
    got = {
        name: logged(name, 4, *way)
        for name, way in WAYS.items()
        if untied or name in ("fsdp, interleaved", "fsdp, full", "fsdp, no reshard")
    }
    for name, found in got.items():
        for key, tolerance in (("lm_loss", 1e-5), ("grad_norm", 1e-4)):
            assert [row[key] for row in found] == pytest.approx(
                [row[key] for row in expected], rel=tolerance
            ), name
        assert all(
            row["activation_bytes_predicted"] == row["activation_bytes_measured"] for row in found
        ), name
    for name in {"fsdp, full", "fsdp, pointwise"} & got.keys():
        assert [(row["lm_loss"], row["grad_norm"]) for row in got[name]] == [
            (row["lm_loss"], row["grad_norm"]) for row in got["fsdp, interleaved"]
        ]


def _state(rank: int, world_size: int, config: RunConfig, train: bool) -> dict[str, Tensor]:
    """Whole weights and optimizer states of this rank's stages, but for what it holds a copy of."""
    with parallel_state(config.parallel, seed=1) as parallel:
        trainer = build_trainer(config, parallel)
        if train:
            trainer.run()
        else:
            load_checkpoint(trainer.start, config, parallel, trainer.model, trainer.optimizer)
        held = {
            f"{name}/{key}": (value, spec_of(parameter))
            for name, parameter in trainer.model.named_parameters()
            for key, value in {"weight": parameter, **trainer.optimizer.states[name]}.items()
        }
        return whole_tensors(
            {name: value for name, (value, _) in held.items()},
            {name: spec for name, (_, spec) in held.items()},
            parallel,
        )


@pytest.mark.parametrize("untied", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_checkpoint_loads_bit_for_bit_in_every_layout(tmp_path: Path, untied: bool):
    config = tiny_run(
        model=dict(num_layers=4, untie_embeddings_and_output_weights=untied),
        training=dict(train_iters=2, bf16=True),
        checkpoint=dict(save=str(tmp_path)),
    )
    of_ranks = run_ranks(
        _state,
        4,
        in_layout(config, **INTERLEAVED, tensor_model_parallel_size=2),
        True,
        detail=False,
    )
    saved = {name: value for one in of_ranks for name, value in one.items()}
    for one in of_ranks:  # the copies of a tied embedding are alike
        assert all(torch.equal(value, saved[name]) for name, value in one.items())
    load = with_checkpoint(config, load=str(tmp_path))
    for ranks, sizes in (
        (1, {}),
        (2, dict(tensor_model_parallel_size=2)),
        (4, dict(pipeline_model_parallel_size=4)),
        (2, dict(PIPELINE, decoder_first_pipeline_num_layers=1)),
    ):
        loaded = run_ranks(_state, ranks, in_layout(load, **sizes), False, detail=False)
        assert {name for one in loaded for name in one} == saved.keys()
        assert all(
            torch.equal(value, saved[name]) for one in loaded for name, value in one.items()
        ), sizes


def test_a_pipeline_that_stops_and_resumes_leaves_the_bytes_of_one_that_does_not(tmp_path: Path):
    """With dropout, tied embeddings and whole layers recomputed."""
    config = replace(
        in_layout(tiny_run(model=dict(num_layers=4), training=dict(train_iters=6)), **INTERLEAVED),
        recompute=RecomputeConfig(recompute_policy="*:full"),
    )
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    run_ranks(_run, 2, with_checkpoint(config, save=whole), detail=False)
    half = replace(config, training=replace(config.training, exit_interval=3))
    run_ranks(_run, 2, with_checkpoint(half, save=parts), detail=False)
    run_ranks(_run, 2, with_checkpoint(config, save=parts, load=parts), detail=False)
    expected = step_bytes(Path(whole), 6)
    assert len(expected) == 6 and step_bytes(Path(parts), 6) == expected


def test_micro_batches_that_do_not_fit_the_interleaved_order_are_one_error():
    config = in_layout(
        tiny_run(model=dict(num_layers=4), training=dict(global_batch_size=3)), **INTERLEAVED
    )

    def work(rank, world_size):
        with pytest.raises(
            InputError,
            match="3 micro-batches per step are not a multiple of --pipeline-model-parallel-size 2",
        ):
            run_to_end(config)
        return True

    assert run_ranks(work, 2) == [True, True]


SIZES = (
    "--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 "
    "--micro-batch-size 1 --vocab-size 99 "
)
KEPT = "--num-microbatches-with-partial-activation-checkpoints 1 "


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            KEPT + "--recompute-policy *:full",
            (
                "needs --pipeline-model-parallel-size > 1 (got 1): one micro-batch is in flight at "
                "a time"
            ),
        ),
        (KEPT + "--pipeline-model-parallel-size 2", "and nothing is recomputed"),
        (
            KEPT.replace("1", "2") + "--pipeline-model-parallel-size 2 --recompute-policy *:full",
            "checkpoints 2: at most 2 forwards are in flight at once, on the first pipeline "
            "rank, so every micro-batch would keep "
            "everything and nothing would be recomputed: give at most 1, or leave the "
            "recomputation out",
        ),
        (
            KEPT.replace("1", "5")
            + "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
            "--recompute-policy "
            "*:full",
            "at most 5 forwards are in flight at once",
        ),
        (
            "--pipeline-model-parallel-size 2 --recompute-policy stage2/*:full",
            "stage 2 does not exist: the stages are 0 to 1",
        ),
        (
            "--recompute-policy stage1/*:full",
            "stage 1 does not exist: without a pipeline the model is one stage",
        ),
        ("--recompute-policy every-9+8:full", "every-9+8 names no layer: the layers are 0 to 7"),
        ("--recompute-policy *:full;0:none", "the rule 0:none never applies"),
        (
            "--torch-compile --activation-memory-budget 0.5 --recompute-verify",
            "--recompute-verify has nothing to compare under --torch-compile",
        ),
        (
            "--pipeline-model-parallel-size 2 --memory-timeline t.json",
            "--memory-timeline records the forward and backward of one",
        ),
        (
            "--pipeline-model-parallel-size 3",
            "--num-layers 8 is not divisible by --pipeline-model-parallel-size (3)",
        ),
        (
            "--pipeline-model-parallel-size 2 --recompute-policy 4:full",
            "layer 4 does not exist: the layers of a stage are 0 to 3",
        ),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused_at_once(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_args((SIZES + words).split())
    assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "--pipeline-model-parallel-size 4 --recompute-granularity full --recompute-method block",
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4 "
            "--recompute-activations"
        ),
        (
            "--pipeline-model-parallel-size 8 --tensor-model-parallel-size 2 --sequence-parallel "
            "--recompute-policy stage0/*:full;*:mlp"
        ),
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
            "--recompute-policy *:full "
        )
        + KEPT,
    ],
)
def test_the_report_of_a_pipeline_fits_its_columns_and_has_every_rank(words):
    config = parse_args((SIZES + words).split()).config
    report = explain(config, "cuda")
    text = report_text(report)
    assert all(len(line) <= WIDTH for line in text.splitlines())
    assert f"pipeline-parallel {config.parallel.pipeline_model_parallel_size}" in text
    assert report.ranks == ranks_memory(config, "cuda")
    fullest = report.ranks[report.rank]
    assert (
        report.own.peak.held_bytes
        == fullest.peak_bytes
        == max(rank.peak_bytes for rank in report.ranks)
    )
    assert f"on pipeline rank {fullest.rank}, which holds most of {len(report.ranks)}\n" in text
    assert f"Notes, on pipeline rank {fullest.rank}\n" in text or not report.notes
    parts = sum(part.kept_bytes for part in (report.embedding, report.rotary_tables, report.head))
    assert report.own.kept_bytes == parts + sum(
        group.count * group.kept_bytes for group in report.layer_groups
    )
    assert {stage for group in report.layer_groups for stage in group.stages} == {
        stage.number for stage in fullest.stages
    }
    assert bool(report.embedding.kept) == (fullest.rank == 0)
    assert bool(report.head.kept) == (fullest.rank == len(report.ranks) - 1)
    layers = [
        layer
        for rank in report.ranks
        for stage in rank.stages
        for layer in range(stage.first_layer, stage.first_layer + stage.num_layers)
    ]
    assert sorted(layers) == [*range(8)]


def test_the_report_follows_the_micro_batches_of_the_run():
    """3 stages and 1, 2, 3 or more micro-batches: no more than that many are in flight on the first
    rank."""
    words = (
        SIZES.replace("--num-layers 8", "--num-layers 6")
        + "--pipeline-model-parallel-size 3 --global-batch-size "
    )
    for batch, dp_size, in_flight in (
        (1, 1, [1, 1, 1]),
        (2, 1, [2, 2, 1]),
        (3, 1, [3, 2, 1]),
        (12, 1, [3, 2, 1]),
        (12, 6, [2, 2, 1]),
    ):
        report = explain(parse_args((words + str(batch)).split()).config, "cpu", dp_size=dp_size)
        assert [
            rank.in_flight for rank in report.ranks
        ] == in_flight and report.num_microbatches == batch // dp_size
        assert report.ranks[0].held_bytes == in_flight[0] * report.ranks[0].kept_bytes
    assert "each of one stage, of the 2 micro-batches of a step." in " ".join(
        report_text(report).split()
    )
    with pytest.raises(
        ValueError, match="12 is not divisible by --micro-batch-size 1 x data-parallel size 5"
    ):
        explain(parse_args((words + "12").split()).config, "cpu", dp_size=5)


@pytest.mark.parametrize(("num_chunks", "num_kept"), [(1, 2), (2, 6), (3, 8)])
def test_a_rank_never_holds_more_than_with_the_micro_batches_that_are_priced(num_kept, num_chunks):
    words = (
        SIZES.replace("--num-layers 8", "--num-layers 18")
        + "--pipeline-model-parallel-size 3 --recompute-policy *:full "
        + KEPT.replace("1 ", f"{num_kept} ")
    )
    words += f"--num-virtual-stages-per-pipeline-rank {num_chunks} " if num_chunks > 1 else ""
    config = parse_args((words + "--global-batch-size 120").split()).config
    for rank in range(3):
        longest = max(
            tick.kept_bytes for tick in ticks(config, "cpu", rank=rank, num_microbatches=120)
        )
        assert rank_memory(config, "cpu", rank).held_bytes == longest


def test_block_counts_the_layers_of_each_virtual_stage():
    config = parse_args(
        (SIZES + "--recompute-method block --recompute-granularity full").split()
    ).config
    config = in_layout(config, **INTERLEAVED)

    def work(rank, world_size):
        with parallel_state(config.parallel, seed=1) as parallel:
            return [
                ([*dict(chunk.decoder.layers.named_children())], str(chunk.decoder.plan))
                for chunk in build_stages(config, parallel)
            ]

    policy = "0:full; 1:none"
    assert run_ranks(work, 2) == [
        [(["0", "1"], policy), (["4", "5"], policy)],
        [(["2", "3"], policy), (["6", "7"], policy)],
    ]
