"""Checkpoints: complete or absent, readable at any tensor-parallel size, and clear where they do
not fit."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_lite.checkpointing import step_files as files
from megatron_lite.checkpointing import write
from megatron_lite.checkpointing.load import load_checkpoint
from megatron_lite.checkpointing.lock import LOCK
from megatron_lite.config.checks import InputError
from megatron_lite.config.logging_settings import LOG_FILE
from megatron_lite.config.run import RunConfig
from megatron_lite.training.step import TrainingError
from tests.support.checkpoints import sign
from tests.support.models import whole_tensor
from tests.support.pairs import only
from tests.support.ranks import run_ranks
from tests.support.runs import run_to_end, step_bytes, tiny_run, with_checkpoint

MODELS = [
    dict(),
    dict(
        swiglu=True,
        ffn_hidden_size=24,
        group_query_attention=True,
        num_query_groups=4,
        qk_layernorm=True,
        position_embedding_type="rope",
        untie_embeddings_and_output_weights=True,
        normalization="RMSNorm",
    ),
]


def _train_and_save(rank: int, world_size: int, config: RunConfig) -> dict[str, Tensor]:
    return _whole_state(run_to_end(config))


def _load_without_training(rank: int, world_size: int, config: RunConfig) -> dict[str, Tensor]:
    from megatron_lite.parallel.state import parallel_state
    from megatron_lite.training.build_trainer import build_trainer

    with parallel_state(config.parallel, seed=1) as parallel:
        trainer = build_trainer(config, parallel)
        load_checkpoint(trainer.start, config, parallel, trainer.model, trainer.optimizer)
        return _whole_state(trainer)


def _whole_state(trainer) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    """Weights and optimizer states as unsharded tensors."""
    whole = {}
    for name, parameter in trainer.model.named_parameters():
        whole[name] = whole_tensor(parameter, parameter, trainer.parallel)
        for key, value in trainer.optimizer.states[name].items():
            whole[f"{name}/{key}"] = whole_tensor(value, parameter, trainer.parallel)
    whole["updates"] = torch.tensor(trainer.optimizer.num_updates)
    return whole


@pytest.mark.parametrize("model", only(MODELS, 1), ids=["gpt", "llama"])
def test_a_checkpoint_loads_bit_for_bit_at_every_tp_size(
    tmp_path: Path, model: dict[str, object]
) -> None:
    config = tiny_run(
        tp_size=2,
        model=model,
        training=dict(train_iters=3, bf16=True),
        checkpoint=dict(save=str(tmp_path)),
    )
    saved = run_ranks(_train_and_save, 2, config, detail=False)[0]
    assert any(key.endswith("/master") for key in saved) and saved["updates"] == 3
    for tp_size in (1, 2, 4):
        other = with_checkpoint(
            replace(config, parallel=replace(config.parallel, tensor_model_parallel_size=tp_size)),
            load=str(tmp_path),
        )
        loaded = run_ranks(_load_without_training, tp_size, other, detail=False)[0]
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[key], saved[key]) for key in saved), tp_size


def test_a_missing_checkpoint_is_an_error_unless_allowed(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"no checkpoint there.*--allow-fresh-start"):
        run_to_end(tiny_run(checkpoint=dict(load=missing)))
    assert (
        run_to_end(
            tiny_run(checkpoint=dict(load=missing, allow_fresh_start=True))
        ).progress.iteration
        == 20
    )


@pytest.mark.parametrize("exists", [True, False])
def test_a_run_that_saves_where_it_loads_starts_afresh_in_an_empty_directory(
    tmp_path: Path, exists: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "checkpoints"
    if exists:
        root.mkdir()
    config = tiny_run(training=dict(train_iters=1), checkpoint=dict(save=str(root), load=str(root)))
    assert run_to_end(config).progress.iteration == 1
    assert f"--load {root}: no checkpoint there, starting from scratch" in capsys.readouterr().out
    later = replace(config, training=replace(config.training, train_iters=2))
    assert run_to_end(later).progress.iteration == 2
    assert "no checkpoint there" not in capsys.readouterr().out


def test_another_architecture_is_refused_with_the_differing_fields(tmp_path: Path) -> None:
    run_to_end(tiny_run(training=dict(train_iters=1), checkpoint=dict(save=str(tmp_path))))
    with pytest.raises(InputError, match=r"num_layers +2 +3\n +normalization +LayerNorm +RMSNorm$"):
        run_to_end(
            tiny_run(
                model=dict(num_layers=3, normalization="RMSNorm", hidden_dropout=0.0),
                checkpoint=dict(load=str(tmp_path)),
            )
        )


def test_finetune_takes_the_weights_alone(tmp_path: Path) -> None:
    first = run_to_end(tiny_run(training=dict(train_iters=2), checkpoint=dict(save=str(tmp_path))))
    trainer = run_to_end(
        tiny_run(training=dict(train_iters=0), checkpoint=dict(load=str(tmp_path), finetune=True))
    )
    assert trainer.progress.iteration == 0 and trainer.optimizer.num_updates == 0
    for mine, theirs in zip(trainer.model.parameters(), first.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_no_load_optim_keeps_progress_but_not_moments(tmp_path: Path) -> None:
    run_to_end(tiny_run(training=dict(train_iters=2), checkpoint=dict(save=str(tmp_path))))
    trainer = run_to_end(
        tiny_run(
            training=dict(train_iters=2), checkpoint=dict(load=str(tmp_path), no_load_optim=True)
        )
    )
    assert trainer.progress.iteration == 2 and trainer.optimizer.num_updates == 0


@pytest.mark.parametrize(
    "victim",
    [
        "config.json",
        "metadata.json",
        "parameters_pp00.json",
        "model_pp00_tp00of01.safetensors",
        "optimizer_pp00_tp00of01.safetensors",
        "rng_00000.safetensors",
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, victim: str) -> None:
    run_to_end(tiny_run(training=dict(train_iters=1), checkpoint=dict(save=str(tmp_path))))
    path = tmp_path / "iter_0000001" / victim
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(InputError, match=victim):
        run_to_end(tiny_run(checkpoint=dict(load=str(tmp_path))))


def test_an_interrupted_save_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_to_end(tiny_run(training=dict(train_iters=2), checkpoint=dict(save=str(tmp_path))))
    before = step_bytes(tmp_path, 2)
    monkeypatch.setattr(write, "publish_step", _fail)
    with pytest.raises(InputError, match=r"could not be written.*disk full"):
        run_to_end(
            tiny_run(
                training=dict(train_iters=3),
                checkpoint=dict(save=str(tmp_path), load=str(tmp_path)),
            )
        )
    monkeypatch.undo()
    assert (tmp_path / files.LATEST).read_text() == "2" and step_bytes(tmp_path, 2) == before
    trainer = run_to_end(
        tiny_run(
            training=dict(train_iters=3), checkpoint=dict(save=str(tmp_path), load=str(tmp_path))
        )
    )
    assert trainer.progress.iteration == 3 and not list(tmp_path.glob("*.tmp*"))


def test_a_fresh_run_does_not_mix_with_anothers_checkpoints(tmp_path: Path) -> None:
    run_to_end(tiny_run(training=dict(train_iters=1), checkpoint=dict(save=str(tmp_path))))
    before = step_bytes(tmp_path, 1)
    with pytest.raises(
        InputError,
        match=r"holds a checkpoint already \(iter_0000001\): continue from it with --load",
    ):
        run_to_end(
            tiny_run(training=dict(train_iters=1, seed=9), checkpoint=dict(save=str(tmp_path)))
        )
    assert step_bytes(tmp_path, 1) == before


def test_a_directory_in_other_words_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "steps")
    for iterations, save, load in (
        (1, "steps", None),
        (2, "steps/", "./steps"),
        (3, "link", "steps"),
    ):
        where = dict(save=f"{tmp_path}/{save}", load=None if load is None else f"{tmp_path}/{load}")
        assert (
            run_to_end(
                tiny_run(training=dict(train_iters=iterations), checkpoint=where)
            ).progress.iteration
            == iterations
        )
    assert (tmp_path / "steps" / files.LATEST).read_text() == "3"


def _save_the_same_step_again(folder: Path, seed: int) -> None:
    run_to_end(
        tiny_run(
            training=dict(train_iters=1, seed=seed),
            checkpoint=dict(save=str(folder), load=str(folder), finetune=True),
        )
    )


def test_a_kill_while_a_step_is_replaced_leaves_the_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_to_end(tiny_run(training=dict(train_iters=1), checkpoint=dict(save=str(tmp_path))))
    replace_file = os.replace

    def killed_before_the_new_step_appears(source: Path, target: Path) -> None:
        if source.name.startswith("iter_0000001.tmp"):
            raise OSError("killed")
        replace_file(source, target)

    monkeypatch.setattr(os, "replace", killed_before_the_new_step_appears)
    with pytest.raises(InputError, match="killed"):
        _save_the_same_step_again(tmp_path, seed=2)
    monkeypatch.undo()
    assert not (tmp_path / "iter_0000001").exists()
    trainer = run_to_end(
        tiny_run(
            training=dict(train_iters=2), checkpoint=dict(load=str(tmp_path), save=str(tmp_path))
        )
    )
    assert trainer.progress.iteration == 2


def test_a_bf16_checkpoint_continues_in_float32_from_its_master_weights(tmp_path: Path) -> None:
    rounded = run_to_end(
        tiny_run(training=dict(train_iters=3, bf16=True), checkpoint=dict(save=str(tmp_path)))
    )
    trainer = run_to_end(
        tiny_run(training=dict(train_iters=3), checkpoint=dict(load=str(tmp_path)))
    )
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, rounded.optimizer.states[name]["master"]), name


def test_a_float32_checkpoint_gives_bf16_masters_that_were_never_rounded(tmp_path: Path) -> None:
    exact = run_to_end(tiny_run(training=dict(train_iters=3), checkpoint=dict(save=str(tmp_path))))
    trainer = run_to_end(
        tiny_run(training=dict(train_iters=3, bf16=True), checkpoint=dict(load=str(tmp_path)))
    )
    for name, parameter in exact.model.named_parameters():
        assert torch.equal(trainer.optimizer.states[name]["master"], parameter), name


@pytest.mark.parametrize("kind", ["model", "optimizer"])
def test_a_shard_of_another_model_is_an_error(tmp_path: Path, kind: str) -> None:
    for name, size in (("mine", 32), ("other", 16)):
        run_to_end(
            tiny_run(
                model=dict(hidden_size=size),
                training=dict(train_iters=1),
                checkpoint=dict(save=str(tmp_path / name)),
            )
        )
    file = f"iter_0000001/{kind}_pp00_tp00of01.safetensors"
    (tmp_path / "mine" / file).write_bytes((tmp_path / "other" / file).read_bytes())
    sign(tmp_path / "mine" / "iter_0000001")
    with pytest.raises(InputError, match="iter_0000001"):
        run_to_end(tiny_run(checkpoint=dict(load=str(tmp_path / "mine"))))


def test_a_save_directory_that_cannot_be_written_is_found_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="--save .* cannot be written"):
        run_to_end(
            tiny_run(training=dict(train_iters=10**6), checkpoint=dict(save=str(tmp_path / "file")))
        )


@pytest.mark.parametrize("length", [dict(train_iters=10), dict(train_iters=None, train_samples=40)])
def test_a_run_goes_on_with_another_batch_size(
    tmp_path: Path, length: dict[str, int | None]
) -> None:
    """5 iterations of 8 samples, then 4 a time: to 10 iterations, or to 40 samples; data and
    schedule reach as far."""
    long = {key: value and value * 2 for key, value in length.items()}
    run_to_end(
        tiny_run(
            training=dict(**long, global_batch_size=8, exit_interval=2),
            checkpoint=dict(save=str(tmp_path / "a")),
        )
    )
    trainer = run_to_end(
        tiny_run(
            training=dict(**long, global_batch_size=4), checkpoint=dict(load=str(tmp_path / "a"))
        )
    )
    iterations = 20 if "train_samples" not in length else 2 + (80 - 16) // 4
    assert (trainer.progress.iteration, trainer.progress.consumed_samples) == (
        iterations,
        16 + (iterations - 2) * 4,
    )


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="a weight is not finite, so no checkpoint is written"):
        run_to_end(
            tiny_run(
                training=dict(train_iters=1),
                checkpoint=dict(save=str(tmp_path)),
                learning_rate=1e38,
            )
        )
    assert not (tmp_path / files.LATEST).exists()


def test_settings_that_changed_since_the_checkpoint_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_to_end(tiny_run(training=dict(train_iters=2), checkpoint=dict(save=str(tmp_path))))
    capsys.readouterr()
    run_to_end(
        tiny_run(
            training=dict(train_iters=1, seed=9, eval_iters=2), checkpoint=dict(load=str(tmp_path))
        )
    )
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line.startswith("changed")] == [
        "changed since the checkpoint: --train-iters 2 -> 1",
        "changed since the checkpoint: --seed 1234 -> 9",
    ]
    assert "nothing to train: iteration 2 is the end of the run or past it (1)" in printed


@pytest.mark.parametrize(
    ("file", "edit"),
    [
        ("metadata.json", {"tp_size": "x"}),
        ("metadata.json", {"tp_size": None}),
        ("metadata.json", {"tp_size": 0}),
        ("metadata.json", {"pp_size": 0}),
        ("metadata.json", {"progress": {"iteration": "x"}}),
        ("metadata.json", {"progress": {"iteration": 1, "spare": 2}}),
        ("metadata.json", {"format": 99}),
        ("parameters_pp00.json", {"decoder.final_layernorm.weight": []}),
    ],
)
def test_metadata_with_other_contents_is_named(
    tmp_path: Path, file: str, edit: dict[str, object]
) -> None:
    run_to_end(tiny_run(training=dict(train_iters=1), checkpoint=dict(save=str(tmp_path))))
    path = tmp_path / "iter_0000001" / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **edit}))
    sign(path.parent)
    with pytest.raises(InputError, match=file):
        run_to_end(tiny_run(checkpoint=dict(load=str(tmp_path))))


def test_saving_over_an_existing_step_replaces_it(tmp_path: Path) -> None:
    run_to_end(tiny_run(training=dict(train_iters=1), checkpoint=dict(save=str(tmp_path))))
    _save_the_same_step_again(tmp_path, seed=2)
    assert (
        json.loads((tmp_path / "iter_0000001" / "config.json").read_text())["training"]["seed"] == 2
    )
    assert {path.name for path in tmp_path.iterdir()} == {
        *("iter_0000001", files.LATEST, LOCK, LOG_FILE)
    }


def _save_with_one_failing_rank(rank: int, world_size: int, folder: Path) -> str:
    if rank == 1:
        write.save_file = _fail
    try:
        run_to_end(
            tiny_run(tp_size=2, training=dict(train_iters=1), checkpoint=dict(save=str(folder)))
        )
    except InputError as error:
        return str(error)
    return "saved"


def test_all_ranks_learn_that_one_could_not_write(tmp_path: Path) -> None:
    messages = run_ranks(_save_with_one_failing_rank, 2, tmp_path)
    assert messages[0] == messages[1]
    assert (
        f"--save {tmp_path}: the checkpoint of iteration 1 could not be written by rank 1: "
        "disk full."
    ) in messages[0]
    assert not (tmp_path / files.LATEST).exists()


def _fail(*_: object) -> None:
    raise OSError("disk full")


def test_vocabulary_padding_is_not_stored(tmp_path: Path) -> None:
    """So that a checkpoint of TP 2 (padded to 128 rows) is that of TP 1 (padded to 64 x 2) or any
    other."""
    run_to_end(tiny_run(training=dict(train_iters=1), checkpoint=dict(save=str(tmp_path))))
    from safetensors.torch import load_file

    weights = load_file(tmp_path / "iter_0000001" / "model_pp00_tp00of01.safetensors")
    assert weights["embedding.word_embeddings.weight"].shape == (99, 32)
