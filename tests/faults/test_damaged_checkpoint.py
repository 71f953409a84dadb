"""One flipped bit anywhere in the newest step, or a broken pointer: reported, and the run goes on
from the good step before it, to the bytes of a run that nothing happened to. Never anything
else."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.checkpointing.metadata import MANIFEST, MOST_BYTES
from megatron_lite.checkpointing.start import candidates, newest_good_step, step_fault
from megatron_lite.checkpointing.step_files import LATEST
from megatron_lite.config.checks import InputError
from tests.support.checkpoints import flip_bit, sign
from tests.support.pairs import sampled
from tests.support.ranks import run_ranks
from tests.support.runs import rows, run_to_end, step_bytes
from tests.support.saves import loaded_state, same, saving_run, train

LAST, NEWEST, BEFORE = 6, "iter_0000004", "iter_0000002"
MODEL, RNG = "model_pp00_tp00of01.safetensors", "rng_00000.safetensors"
OPTIMIZER = "optimizer_pp00_tp00of01.safetensors"
FILES = ["config.json", "metadata.json", "parameters_pp00.json", MODEL, OPTIMIZER, RNG, MANIFEST]


def run_of(folder, **settings):
    settings = {"save_interval": 2, **settings}
    return saving_run(folder, LAST, metrics=folder.with_name("rows"), **settings)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Steps 2 and 4, of one rank."""
    folder = tmp_path_factory.mktemp("begun") / "steps"
    run_to_end(run_of(folder, stop=4, load=False))
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory, begun):
    """The whole run's, with all its rows."""
    folder = tmp_path_factory.mktemp("whole") / "steps"
    run_to_end(run_of(folder, load=False))
    return folder


def copy_of(begun, folder):
    shutil.copytree(begun, folder)
    shutil.copy(begun.with_name("rows"), folder.with_name("rows"))
    return folder


def ends_as(whole, folder):
    """In weights, states and every logged loss."""
    assert rows(folder.with_name("rows")) == rows(whole.with_name("rows"))
    return step_bytes(folder, LAST) == step_bytes(whole, LAST) != {}


@pytest.mark.runs(ci=5)
@pytest.mark.parametrize(
    "file, how",
    [
        (MODEL, "flipped"),
        (RNG, "flipped"),
        ("config.json", "flipped"),
        (OPTIMIZER, "truncated"),
        (OPTIMIZER, "longer"),
        (MANIFEST, "empty"),
        (MANIFEST, "missing"),
    ],
)
def test_damage_is_named_and_the_step_before_is_used(tmp_path, begun, whole, file, how, capsys):
    folder = copy_of(begun, tmp_path / "steps")
    path = folder / NEWEST / file
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "flipped":
        flip_bit(path, len(data) * 5)  # in its middle
    else:
        path.write_bytes({"truncated": data[:-7], "longer": data + b"x", "empty": b""}[how])
    run_to_end(run_of(folder))
    printed = capsys.readouterr().out
    assert f"warning: {path}: " in printed and f"instead, {BEFORE}" in printed
    assert ends_as(whole, folder)
    assert step_fault(folder / NEWEST) is None  # replaced by the run


@pytest.mark.long
def test_on_two_ranks_both_go_back_whichever_reads_the_damage(tmp_path):
    """Ranks share the reading: each file is damaged once."""
    whole, begun = tmp_path / "whole" / "steps", tmp_path / "begun" / "steps"
    for folder, stop in ((whole, LAST), (begun, 4)):
        folder.parent.mkdir()
        run_ranks(train, 2, run_of(folder, tp_size=2, stop=stop, load=False))
    files = sorted(path.name for path in (begun / NEWEST).glob("*.safetensors"))
    assert len(files) == 6
    for file in sampled(files, every=5):
        (tmp_path / file).mkdir()
        folder = copy_of(begun, tmp_path / file / "steps")
        flip_bit(folder / NEWEST / file, 8 * 100 + 3)
        assert run_ranks(train, 2, run_of(folder, tp_size=2)) == ["", ""]
        assert ends_as(whole, folder), file


def set_pointer(folder, text):
    (folder / LATEST).unlink() if text is None else (folder / LATEST).write_text(text)


@pytest.mark.runs(daily=2, ci=4)
@pytest.mark.parametrize("text", ["", "14", "4\0", "latest", None])
def test_a_broken_pointer_is_named_and_the_newest_good_step_is_used(
    tmp_path, begun, whole, text, capsys
):
    folder = copy_of(begun, tmp_path / "steps")
    set_pointer(folder, text)
    run_to_end(run_of(folder, allow_fresh_start=True))
    printed = capsys.readouterr().out
    assert f"warning: {folder / LATEST}: " in printed and "checkpoint of iteration 4" in printed
    assert ends_as(whole, folder) and (folder / LATEST).read_text() == str(LAST)


def test_a_pointer_to_an_earlier_step_is_followed_and_the_later_one_is_out_of_the_way(
    tmp_path, begun, whole, capsys
):
    """By hand, or by a flipped bit. A later step of another course is never taken for this
    run's."""
    folder = copy_of(begun, tmp_path / "steps")
    set_pointer(folder, "2")
    run_to_end(run_of(folder, save_interval=3))
    assert f"not used: {NEWEST}" in capsys.readouterr().out
    found = sorted(path.name for path in folder.glob("iter_*"))
    assert found == [BEFORE, "iter_0000003", f"{NEWEST}.superseded", "iter_0000006"]
    assert ends_as(whole, folder)


@pytest.mark.parametrize("victim", [f"{NEWEST}/{MODEL}", LATEST])
def test_without_fallback_damage_is_an_error_and_nothing_is_touched(tmp_path, begun, victim):
    folder = copy_of(begun, tmp_path / "steps")
    flip_bit(folder / victim, 6)
    files = [path for path in folder.rglob("*.*") if path.is_file() and path.name != "lock.json"]
    before = [path.read_bytes() for path in files]
    with pytest.raises(InputError, match=f"(?s)--no-load-fallback.*{Path(victim).name}"):
        run_to_end(run_of(folder, no_load_fallback=True))
    assert [path.read_bytes() for path in files] == before


@pytest.mark.parametrize("pointer", ["4", "", None])
def test_where_every_step_is_damaged_nothing_starts_from_scratch(tmp_path, begun, pointer):
    folder = copy_of(begun, tmp_path / "steps")
    for step in (BEFORE, NEWEST):
        flip_bit(folder / step / MODEL, 5000)
    set_pointer(folder, pointer)
    config = run_of(folder, allow_fresh_start=True)
    with pytest.raises(InputError, match=rf"(?s)restore.*{NEWEST}/model.*{BEFORE}/model"):
        run_to_end(config)
    for step in (BEFORE, NEWEST):
        shutil.rmtree(folder / step)
    set_pointer(folder, "4")
    with pytest.raises(InputError, match=f"{NEWEST} does not exist"):
        run_to_end(config)


def test_a_step_of_another_name_format_or_shape_of_manifest_is_damaged(tmp_path, begun):
    """Whatever the text: too long, too deep, of another step, without a file, or naming a file
    outside."""
    folder = copy_of(begun, tmp_path / "steps")
    step = folder / NEWEST
    shutil.copytree(step, folder / "iter_0000005")
    assert "is that of iteration 4" in str(step_fault(folder / "iter_0000005"))
    (step / RNG).unlink()
    sign(step)
    assert f"{RNG} is not in the manifest" in str(step_fault(step))
    outside = {"../x": {"bytes": 1, "sha256": "0" * 64}}
    texts = ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, '{"format": 2}', "[]", "\xff"]
    for text in (*texts, json.dumps({"format": 3, "iteration": 4, "files": outside})):
        (step / MANIFEST).write_text(text)
        assert str(step / MANIFEST) in str(step_fault(step))
    with (step / MANIFEST).open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    assert f"longer than {MOST_BYTES} bytes" in str(step_fault(step))


def begins_with(folder):
    return loaded_state(run_of(folder, save=None, save_interval=None))


@pytest.fixture(scope="module")
def good(begun):
    """The state of either step, by its name."""
    states = {}
    for step, pointer in ((BEFORE, "2"), (NEWEST, "4")):
        set_pointer(begun, pointer)
        states[step] = begins_with(begun)
    return states


@settings(max_examples=settings.default.max_examples // 2, derandomize=True)
@given(data=st.data())
def test_any_flipped_bit_leaves_the_newest_step_or_the_one_before_it(tmp_path, begun, good, data):
    """In any file of the newest step, or in the pointer: what is loaded is one of the two, in every
    bit."""
    folder = tmp_path / "steps"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(begun, folder)
    file = data.draw(st.sampled_from([*(f"{NEWEST}/{name}" for name in FILES), LATEST]))
    flip_bit(folder / file, data.draw(st.integers(0, 8 * (folder / file).stat().st_size - 1)))
    step = newest_good_step(folder, candidates(folder), step_fault, fallback=True).step.name
    assert same(begins_with(folder), good[step])
    if file.endswith(".safetensors"):
        assert step == BEFORE
