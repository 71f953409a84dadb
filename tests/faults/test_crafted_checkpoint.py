"""Checkpoints whose checksums are right and whose contents no run has written: each is refused with
one clear error, or the step before it is used. Nothing hangs, nothing ends in a traceback, and
nothing else is loaded than what was saved."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megatron_lite.checkpointing.metadata import MANIFEST, FileRow, Manifest
from megatron_lite.checkpointing.step_files import LATEST
from megatron_lite.config.checks import InputError
from megatron_lite.parallel.state import parallel_state
from megatron_lite.training.build_trainer import build_trainer
from tests.support.checkpoints import sign
from tests.support.runs import run_to_end, tiny_run
from tests.support.saves import loaded_into, same, state_of

NEWEST, BEFORE = "iter_0000002", "iter_0000001"
MODEL, RNG = "model_pp00_tp00of01.safetensors", "rng_00000.safetensors"
LAYOUTS, EMBEDDING = "parameters_pp00.json", "embedding.word_embeddings.weight"
EMPTY = FileRow(0, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")


def config_of(**checkpoint):
    return tiny_run(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        train_iters=2,
        eval_iters=0,
        **checkpoint,
    )


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Steps 1 and 2."""
    folder = tmp_path_factory.mktemp("good") / "steps"
    run_to_end(config_of(save=str(folder), save_interval=1))
    return folder


@pytest.fixture(scope="module")
def load(good):
    """What a run says, and all tensors that it begins with; none where it refuses."""
    config = config_of()
    with parallel_state(config.parallel, seed=1) as parallel:
        trainer = build_trainer(config, parallel)

        def outcome(folder):
            try:
                notices = loaded_into(trainer, parallel, config_of(load=str(folder)))
            except InputError as error:
                return str(error), {}
            state = state_of(trainer.model, trainer.optimizer, **parallel.rng.snapshot().states)
            return "\n".join(notices), state

        yield outcome


@pytest.fixture(scope="module")
def known(good, load, tmp_path_factory):
    """What either step holds."""
    before = shutil.copytree(good, tmp_path_factory.mktemp("before") / "steps")
    (before / LATEST).write_text("1")
    return {NEWEST: load(good)[1], BEFORE: load(before)[1]}


def edit(path, places, value):
    """Gives the value to each place, whose names have spaces between them."""
    found = json.loads(path.read_text())
    for place in places.split(", "):
        *folders, name = place.split()
        holder = found
        for folder in folders:
            holder = holder[folder]
        holder[name] = value
    path.write_text(json.dumps(found))


# file, the places in it, the value there, and what the message names beside the file
CRAFTED = {
    "axes": ("metadata.json", "tp_size, dp_size", 2**20, "tp_size x dp_size"),
    "many ranks": ("metadata.json", "dp_size", 2**20, "describes 1048576 ranks"),
    "layers": ("config.json", "model num_layers", 10**9, "--num-layers"),
    "width": ("config.json", "model hidden_size", 2**40, "weights, but the step holds"),
    "huge": ("config.json", "optimizer adam_eps", 10**400, "cannot be read"),
    "blocks": (LAYOUTS, f"{EMBEDDING} tp_blocks", 0, "(got 0)"),
    "dim": (LAYOUTS, f"{EMBEDDING} tp_dim", -1, "(got -1)"),
    "padding": (LAYOUTS, f"{EMBEDDING} padded_length", 3, "(got 3)"),
    "shape": (LAYOUTS, f"{EMBEDDING} global_shape", [2**40, 2**40], "global_shape"),
    "fraction": ("metadata.json", "progress iteration", 300.9, "got 300.9"),
    "other step": ("metadata.json", "progress iteration", 1, "(got 1)"),
    "samples": ("metadata.json", "progress consumed_samples", 2**70, "64 bits"),
    "infinite": ("metadata.json", "num_updates", float("inf"), "Infinity"),
    "unknown": ("metadata.json", "tp", 1, "unknown field tp"),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_a_value_that_no_run_has_is_named_and_the_step_before_is_used(
    tmp_path, good, load, known, name
):
    folder = shutil.copytree(good, tmp_path / "steps")
    file, places, value, named = CRAFTED[name]
    edit(folder / NEWEST / file, places, value)
    sign(folder / NEWEST)
    text, found = load(folder)
    faults = [line for line in text.splitlines() if "warning" in line and "instead" not in line]
    assert len(faults) == 1, text
    fault = faults[0]
    assert fault.startswith(f"warning: {folder / NEWEST / file}: ") and named in fault
    assert same(found, known[BEFORE])


def to_a_file_elsewhere(path):
    elsewhere = path.parents[2] / "elsewhere"
    elsewhere.write_bytes(b"")
    path.symlink_to(elsewhere)


@pytest.mark.parametrize(
    "how", [lambda path: path.symlink_to("/dev/zero"), os.mkfifo, to_a_file_elsewhere, Path.mkdir]
)
@pytest.mark.parametrize("file", [RNG, MODEL, "config.json", "metadata.json", MANIFEST, LATEST])
def test_what_is_no_regular_file_is_not_read(tmp_path, good, load, file, how, known):
    """A broken pointer changes nothing."""
    folder = shutil.copytree(good, tmp_path / "a" / "steps")
    path = (folder if file == LATEST else folder / NEWEST) / file
    path.unlink()
    if file not in (MANIFEST, LATEST):
        manifest = Manifest.read(folder / NEWEST)
        (folder / NEWEST / MANIFEST).write_text(
            replace(manifest, files={**manifest.files, file: EMPTY}).to_json()
        )
    how(path)
    text, found = load(folder)
    assert f"warning: {path}: is no regular file" in text
    assert same(found, known[NEWEST if file == LATEST else BEFORE])


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda tensor: tensor.to(torch.int32), "(got I32)"),
        (lambda tensor: tensor[:-1].clone(), "(99, 8) that metadata describes (got (98, 8))"),
    ],
)
def test_weights_of_another_kind_or_shape_are_refused(tmp_path, good, load, change, message):
    folder = shutil.copytree(good, tmp_path / "steps")
    path = folder / NEWEST / MODEL
    tensors = load_file(str(path))
    save_file({**tensors, EMBEDDING: change(tensors[EMBEDDING])}, str(path))
    sign(folder / NEWEST)
    text, found = load(folder)
    assert not found and str(path) in text and message in text


def places_in(values, before=()):
    """The way to every value in a JSON text."""
    items = enumerate(values) if isinstance(values, list) else ()
    items = values.items() if isinstance(values, dict) else items
    return [before, *(place for key, value in items for place in places_in(value, (*before, key)))]


WHOLE = st.one_of(st.integers(-3, 9), st.sampled_from([2**20, 2**40, 2**63, 10**30, -(2**63)]))
VALUES = st.one_of(
    WHOLE,
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(max_size=3),
    st.lists(WHOLE, max_size=3),
    st.dictionaries(st.sampled_from(["iteration", "bytes", "x"]), WHOLE, max_size=2),
    st.just("delete"),
)


@settings(max_examples=settings.default.max_examples // 2, derandomize=True)
@given(data=st.data())
def test_any_changed_field_is_refused_or_changes_nothing_that_is_loaded(
    tmp_path, good, load, known, data
):
    """Values of every type and size, and missing ones, at any place of any text."""
    folder = tmp_path / "steps"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder)
    texts = st.sampled_from([MANIFEST, "metadata.json", LAYOUTS, "config.json"])
    path = folder / NEWEST / data.draw(texts)
    values = json.loads(path.read_text())
    *way, last = data.draw(st.sampled_from(places_in(values)[1:]))
    holder = values
    for key in way:
        holder = holder[key]
    holder[last] = data.draw(VALUES)
    if holder[last] == "delete":
        del holder[last]
    path.write_text(json.dumps(values))
    if path.name != MANIFEST:
        sign(folder / NEWEST)
    text, found = load(folder)
    refused = f"warning: {folder / NEWEST}" in text
    assert same(found, known[BEFORE if refused else NEWEST]) if found else str(folder) in text
