"""One flipped bit anywhere in the newest step, or a broken pointer: reported, and the run goes on
from the good step before it, to the bytes of a run that nothing happened to. Never anything
else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_lite.checkpointing.load import load_checkpoint
from megatron_lite.checkpointing.manifest import MANIFEST, MOST_BYTES
from megatron_lite.checkpointing.start import candidates, find_start, newest_good_step, step_fault
from megatron_lite.checkpointing.step_files import LATEST
from megatron_lite.config.checks import InputError
from megatron_lite.config.run import RunConfig
from megatron_lite.parallel.state import parallel_state
from megatron_lite.training.build_trainer import build_trainer
from tests.support.checkpoints import flip_bit, sign
from tests.support.pairs import sampled
from tests.support.ranks import run_ranks
from tests.support.runs import rows, run_to_end, step_bytes, tiny_run

LAST = 6
NEWEST = "iter_0000004"


def config_of(
    folder: Path, *, tp_size: int = 1, stop: int | None = None, **checkpoint: object
) -> RunConfig:
    where = dict(save=str(folder), save_interval=2, **({} if stop else {"load": str(folder)}))
    return tiny_run(
        tp_size=tp_size,
        training=dict(train_iters=LAST, eval_iters=0, exit_interval=stop),
        metrics=folder.with_name("rows"),
        checkpoint={**where, **checkpoint},
    )


def train(rank: int, world_size: int, config: RunConfig) -> str:
    try:
        run_to_end(config)
    except InputError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 2 and 4, of one rank."""
    folder = tmp_path_factory.mktemp("begun") / "steps"
    run_to_end(config_of(folder, stop=4))
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, begun: Path) -> Path:
    """The whole run's, with all its rows."""
    folder = tmp_path_factory.mktemp("whole") / "steps"
    run_to_end(config_of(folder, stop=LAST))
    return folder


def copy_of(begun: Path, folder: Path) -> Path:
    shutil.copytree(begun, folder)
    shutil.copy(begun.with_name("rows"), folder.with_name("rows"))
    return folder


def ends_as(whole: Path, folder: Path) -> bool:
    """In weights, states and every logged loss."""
    return step_bytes(folder, LAST) == step_bytes(whole, LAST) != {} and rows(
        folder.with_name("rows")
    ) == rows(whole.with_name("rows"))


FILES = [
    "config.json",
    "metadata.json",
    "parameters_pp00.json",
    "model_pp00_tp00of01.safetensors",
    "optimizer_pp00_tp00of01.safetensors",
    "rng_00000.safetensors",
]


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_is_named_and_the_step_before_is_used(
    tmp_path: Path, begun: Path, whole: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of(begun, tmp_path / "steps")
    path = folder / NEWEST / file
    flip_bit(path, path.stat().st_size * 5)  # in its middle
    run_to_end(config_of(folder))
    printed = capsys.readouterr().out
    assert f"warning: {path}: its checksum is not the one in {MANIFEST}" in printed
    assert "going on from the newest good checkpoint instead, iter_0000002" in printed
    assert ends_as(whole, folder)
    assert step_fault(folder / NEWEST) is None  # replaced by the run


@pytest.mark.parametrize("how", ["truncated", "longer", "missing", "empty"])
@pytest.mark.parametrize("file", ["optimizer_pp00_tp00of01.safetensors", MANIFEST])
def test_a_file_of_another_size_is_named_too(
    tmp_path: Path,
    begun: Path,
    whole: Path,
    file: str,
    how: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = copy_of(begun, tmp_path / "steps")
    path = folder / NEWEST / file
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes({"truncated": data[:-7], "longer": data + b"x", "empty": b""}[how])
    run_to_end(config_of(folder))
    assert f"warning: {path}: " in capsys.readouterr().out
    assert ends_as(whole, folder)


@pytest.mark.long
def test_on_two_ranks_both_go_back_whichever_reads_the_damage(tmp_path: Path) -> None:
    """Ranks share the reading: each file is damaged once."""
    whole, begun = tmp_path / "whole" / "steps", tmp_path / "begun" / "steps"
    for folder in (whole, begun):
        folder.parent.mkdir()
    run_ranks(train, 2, config_of(whole, tp_size=2, stop=LAST), detail=False)
    run_ranks(train, 2, config_of(begun, tp_size=2, stop=4), detail=False)
    files = sorted(path.name for path in (begun / NEWEST).glob("*.safetensors"))
    assert len(files) == 6
    for file in sampled(files, every=2):
        folder = tmp_path / file / "steps"
        folder.parent.mkdir()
        copy_of(begun, folder)
        flip_bit(folder / NEWEST / file, 8 * 100 + 3)
        assert run_ranks(train, 2, config_of(folder, tp_size=2), detail=False) == ["", ""]
        assert ends_as(whole, folder), file


POINTERS = [
    pytest.param("", id="zero bytes"),
    "x4",
    "14",
    "7",
    "-1",
    "4\0",
    "latest",
    "4" * 40,
    None,
]


@pytest.mark.parametrize("text", POINTERS)
def test_a_broken_pointer_is_named_and_the_newest_good_step_is_used(
    tmp_path: Path, begun: Path, whole: Path, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of(begun, tmp_path / "steps")
    (folder / LATEST).unlink() if text is None else (folder / LATEST).write_text(text)
    run_to_end(config_of(folder, allow_fresh_start=True))
    printed = capsys.readouterr().out
    assert (
        f"warning: {folder / LATEST}: " in printed
        and f"loaded the checkpoint of iteration 4 from {folder}" in printed
    )
    assert ends_as(whole, folder) and (folder / LATEST).read_text() == str(LAST)


def test_a_pointer_to_an_earlier_step_is_followed_and_the_later_one_is_out_of_the_way(
    tmp_path: Path, begun: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By hand, or by a flipped bit. A later step of another course is never taken for this
    run's."""
    folder = copy_of(begun, tmp_path / "steps")
    (folder / LATEST).write_text("2")
    run_to_end(config_of(folder, save_interval=3))
    printed = capsys.readouterr().out
    assert f"later than the checkpoint that {LATEST} names, and not used: {NEWEST}" in printed
    assert f"is now {NEWEST}.superseded" in printed
    assert sorted(path.name for path in folder.glob("iter_*")) == [
        "iter_0000002",
        "iter_0000003",
        f"{NEWEST}.superseded",
        "iter_0000006",
    ]
    assert ends_as(whole, folder)


@pytest.mark.parametrize("victim", [f"{NEWEST}/model_pp00_tp00of01.safetensors", LATEST])
def test_without_fallback_damage_is_an_error_and_nothing_is_touched(
    tmp_path: Path, begun: Path, victim: str
) -> None:
    folder = copy_of(begun, tmp_path / "steps")
    flip_bit(folder / victim, 6)
    before = {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock.json"
    }
    with pytest.raises(
        InputError,
        match=f"(?s)no good checkpoint: .*leave out --no-load-fallback.*{Path(victim).name}",
    ):
        run_to_end(config_of(folder, no_load_fallback=True))
    assert {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock.json"
    } == before


@pytest.mark.parametrize("pointer", ["4", "", None])
def test_where_every_step_is_damaged_nothing_starts_from_scratch(
    tmp_path: Path, begun: Path, pointer: str | None
) -> None:
    folder = copy_of(begun, tmp_path / "steps")
    for step in ("iter_0000002", NEWEST):
        flip_bit(folder / step / FILES[3], 5000)
    (folder / LATEST).unlink() if pointer is None else (folder / LATEST).write_text(pointer)
    with pytest.raises(
        InputError, match=r"(?s)no good checkpoint: restore.*iter_0000004/model.*iter_0000002/model"
    ):
        run_to_end(config_of(folder, allow_fresh_start=True))


def test_a_pointer_without_any_step_is_an_error(tmp_path: Path) -> None:
    (tmp_path / LATEST).write_text("4")
    with pytest.raises(
        InputError, match="iter_0000004 does not exist, and there is no checkpoint to use instead"
    ):
        run_to_end(tiny_run(checkpoint=dict(load=str(tmp_path), allow_fresh_start=True)))


def test_a_step_that_was_renamed_or_lacks_a_listed_file_is_damaged(
    tmp_path: Path, begun: Path
) -> None:
    folder = copy_of(begun, tmp_path / "steps")
    shutil.copytree(folder / NEWEST, folder / "iter_0000005")
    assert "is that of iteration 4" in str(step_fault(folder / "iter_0000005"))
    (folder / NEWEST / FILES[5]).unlink()
    sign(folder / NEWEST)
    assert "rng_00000.safetensors is not in the manifest" in str(step_fault(folder / NEWEST))


def test_texts_that_are_too_long_or_too_deep_are_damage_and_do_no_harm(
    tmp_path: Path, begun: Path
) -> None:
    folder = copy_of(begun, tmp_path / "steps")
    path = folder / NEWEST / MANIFEST
    outside = json.dumps(
        {"format": 3, "iteration": 4, "files": {"../x": {"bytes": 1, "sha256": "0" * 64}}}
    )
    for text in (
        "[" * 100_000,
        '{"a":' * 100_000,
        "9" * 5000,
        outside,
        '{"format": 2}',
        "[]",
        "\xff",
    ):
        path.write_text(text)
        assert str(path) in str(step_fault(folder / NEWEST))
    with path.open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    assert f"longer than {MOST_BYTES} bytes" in str(step_fault(folder / NEWEST))


def test_a_step_of_an_earlier_format_says_so(tmp_path: Path, begun: Path) -> None:
    folder = copy_of(begun, tmp_path / "steps")
    (folder / NEWEST / MANIFEST).unlink()
    path = folder / NEWEST / "metadata.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    assert "format 2, but this version reads format 3" in str(step_fault(folder / NEWEST))


def state_of(folder: Path) -> dict[str, Tensor]:
    """All that a run would begin with."""
    config = config_of(folder, save=None, save_interval=None)
    with parallel_state(config.parallel, seed=1) as parallel:
        start = find_start(config.checkpoint, parallel)
        trainer = build_trainer(config, parallel)
        load_checkpoint(start, config, parallel, trainer.model, trainer.optimizer)
        states = {
            f"{name}/{key}": value
            for name, of in trainer.optimizer.states.items()
            for key, value in of.items()
        }
        return {
            **{name: value.detach() for name, value in trainer.model.named_parameters()},
            **states,
            **parallel.rng.snapshot().states,
        }


@pytest.fixture(scope="module")
def good(begun: Path) -> dict[str, dict[str, Tensor]]:
    """The state of either step, by its name."""
    newest = state_of(begun)
    (begun / LATEST).write_text("2")
    before = state_of(begun)
    (begun / LATEST).write_text("4")
    return {NEWEST: newest, "iter_0000002": before}


@settings(max_examples=settings.default.max_examples // 2, derandomize=True)
@given(data=st.data())
def test_any_flipped_bit_leaves_the_newest_step_or_the_one_before_it(
    tmp_path: Path, begun: Path, good: dict[str, dict[str, Tensor]], data: st.DataObject
) -> None:
    """In any file of the newest step, or in the pointer: what is loaded is one of the two, in every
    bit."""
    folder = tmp_path / "steps"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(begun, folder)
    file = data.draw(
        st.sampled_from([*(f"{NEWEST}/{name}" for name in (*FILES, MANIFEST)), LATEST]),
        label="file",
    )
    flip_bit(
        folder / file,
        data.draw(st.integers(0, 8 * (folder / file).stat().st_size - 1), label="bit"),
    )
    step = newest_good_step(folder, candidates(folder), step_fault, fallback=True).step.name
    loaded = state_of(folder)
    assert loaded.keys() == good[step].keys()
    assert all(loaded[name].equal(value) for name, value in good[step].items())
    if file.endswith(".safetensors"):
        assert step == "iter_0000002"
