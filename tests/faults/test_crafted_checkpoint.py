"""Checkpoints whose checksums are right and whose contents no run has written: each is refused with
one clear error, or the step before it is used. Nothing hangs, nothing ends in a traceback, and
nothing else is loaded than what was saved."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_lite.checkpointing.load import load_checkpoint
from megatron_lite.checkpointing.manifest import MANIFEST, FileRow, Manifest
from megatron_lite.checkpointing.start import find_start, step_fault
from megatron_lite.checkpointing.step_files import LATEST
from megatron_lite.config.checks import InputError
from megatron_lite.config.run import RunConfig
from megatron_lite.parallel.state import parallel_state
from megatron_lite.tools import generate
from megatron_lite.training.build_trainer import build_trainer
from tests.support.checkpoints import sign
from tests.support.runs import run_to_end, tiny_run

NEWEST, BEFORE = "iter_0000002", "iter_0000001"
MODEL, RNG = "model_pp00_tp00of01.safetensors", "rng_00000.safetensors"
EMPTY = FileRow(0, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")
Outcome = tuple[str, dict[str, Tensor]]
Load = Callable[[Path], Outcome]


def config_of(**checkpoint: object) -> RunConfig:
    return tiny_run(
        model=dict(num_layers=1, hidden_size=8, num_attention_heads=2),
        training=dict(train_iters=2, eval_iters=0),
        checkpoint=checkpoint,
    )


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2."""
    folder = tmp_path_factory.mktemp("good") / "steps"
    run_to_end(config_of(save=str(folder), save_interval=1))
    return folder


@pytest.fixture(scope="module")
def load(good: Path) -> Iterator[Load]:
    """What a run says, and all tensors that it begins with; none where it refuses."""
    config = config_of()
    with parallel_state(config.parallel, seed=1) as parallel:
        trainer = build_trainer(config, parallel)

        def outcome(folder: Path) -> Outcome:
            run = config_of(load=str(folder))
            try:
                loaded = load_checkpoint(
                    find_start(run.checkpoint, parallel),
                    run,
                    parallel,
                    trainer.model,
                    trainer.optimizer,
                    data=trainer.datasets.identity,
                )
            except InputError as error:
                return str(error), {}
            states = {
                f"{name}/{key}": value
                for name, of in trainer.optimizer.states.items()
                for key, value in of.items()
            }
            tensors = {
                **{name: value.detach() for name, value in trainer.model.named_parameters()},
                **states,
                **parallel.rng.snapshot().states,
            }
            return "\n".join(loaded.notices), {
                name: value.clone() for name, value in tensors.items()
            }

        yield outcome


@pytest.fixture(scope="module")
def known(
    good: Path, load: Load, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Tensor]]:
    """What either step holds."""
    before = shutil.copytree(good, tmp_path_factory.mktemp("before") / "steps")
    (before / LATEST).write_text("1")
    return {NEWEST: load(good)[1], BEFORE: load(before)[1]}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], wanted[name]) for name in wanted
    )


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def in_metadata(**values: Any) -> Callable[[Path], None]:
    return lambda step: edit(step / "metadata.json", lambda found: found.update(values))


def in_progress(**values: Any) -> Callable[[Path], None]:
    return lambda step: edit(step / "metadata.json", lambda found: found["progress"].update(values))


def in_layout(parameter: str, **values: Any) -> Callable[[Path], None]:
    def change(found: Any) -> None:
        next(layout for name, layout in found.items() if parameter in name).update(values)

    return lambda step: edit(step / "parameters_pp00.json", change)


def in_config(topic: str, **values: Any) -> Callable[[Path], None]:
    return lambda step: edit(step / "config.json", lambda found: found[topic].update(values))


SIZES = r"must be a whole number from 1 to"
CRAFTED = [
    (
        "axes",
        in_metadata(tp_size=2**20, dp_size=2**20),
        r"metadata\.json: .*tp_size x dp_size.* must be at most 1048576 \(got",
    ),
    (
        "many ranks",
        in_metadata(dp_size=2**20),
        r"metadata\.json: describes 1048576 ranks, but the manifest lists 6 files",
    ),
    (
        "layers",
        in_config("model", num_layers=10**9),
        r"config\.json: .*num_layers must be a whole number from 1 to .*1000000000",
    ),
    (
        "width",
        in_config("model", hidden_size=2**40),
        r"config\.json: describes a model of \d+ weights, but the step holds",
    ),
    (
        "stages",
        in_config("parallel", pipeline_model_parallel_size=10**9),
        r"pipeline_model_parallel_size must be a whole number",
    ),
    ("huge", in_config("optimizer", adam_eps=10**400), r"config\.json: cannot be read"),
    (
        "no blocks",
        in_layout("linear_qkv.weight", tp_blocks=0),
        rf"parameters_pp00\.json: .*tp_blocks {SIZES} .*\(got 0\)",
    ),
    (
        "negative blocks",
        in_layout("linear_qkv.weight", tp_blocks=-1),
        rf"tp_blocks {SIZES} .*\(got -1\)",
    ),
    (
        "dim",
        in_layout("linear_qkv.weight", tp_dim=7),
        r"tp_dim must be a whole number from 0 to 1 \(got 7\)",
    ),
    ("negative dim", in_layout("linear_qkv.weight", tp_dim=-1), r"tp_dim must be .*\(got -1\)"),
    (
        "padding",
        in_layout("word_embeddings", padded_length=3),
        r"padded_length must be at least 99 .*\(got 3\)",
    ),
    (
        "shape",
        in_layout("linear_qkv.weight", global_shape=[2**40, 2**40]),
        r"global_shape must have at most \d+ elements",
    ),
    (
        "fraction",
        in_progress(iteration=300.9),
        r"iteration must be a whole number from 0 to 999999999 \(got 300\.9\)",
    ),
    ("truth", in_progress(iteration=True), r"iteration must be a whole number .*\(got True\)"),
    (
        "other iteration",
        in_progress(iteration=1),
        r"progress\.iteration must be that of the step, 2 \(got 1\)",
    ),
    (
        "samples",
        in_progress(consumed_samples=2**70),
        r"consumed_samples must be a whole number from 0 to",
    ),
    ("updates", in_metadata(num_updates=float("inf")), r"Infinity is no JSON number"),
    ("unknown field", in_metadata(tp=1), r"metadata\.json has no field 'tp'"),
    (
        "mean",
        in_metadata(mean_loss=dict(mean=1.0, count=3.5)),
        r"count must be a whole number from 0 to 100 \(got 3\.5\)",
    ),
    (
        "scale",
        in_metadata(loss_scale=dict(scale=10**400, good_steps=0, patience=1)),
        r"scale must be a finite number",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"), [row[1:] for row in CRAFTED], ids=[row[0] for row in CRAFTED]
)
def test_a_value_that_no_run_has_is_named_and_the_step_before_is_used(
    tmp_path: Path,
    good: Path,
    load: Load,
    known: dict[str, dict[str, Tensor]],
    change: Callable[[Path], None],
    message: str,
) -> None:
    folder = shutil.copytree(good, tmp_path / "steps")
    change(folder / NEWEST)
    sign(folder / NEWEST)
    text, found = load(folder)
    faults = [line for line in text.splitlines() if "warning" in line and "instead" not in line]
    assert len(faults) == 1, text
    fault = faults[0]
    assert fault.startswith(f"warning: {folder / NEWEST}/")
    with pytest.raises(InputError, match=message):
        raise InputError(fault)
    assert same(found, known[BEFORE])


@pytest.mark.parametrize(
    "value", [float("inf"), float("nan"), 2.5, True, "2", -1, 10**12, None, [2]], ids=str
)
def test_an_iteration_that_is_none_in_the_manifest(
    tmp_path: Path, good: Path, load: Load, value: object, known: dict[str, dict[str, Tensor]]
) -> None:
    folder = shutil.copytree(good, tmp_path / "steps")
    edit(folder / NEWEST / MANIFEST, lambda found: found.update(iteration=value))
    text, found = load(folder)
    assert f"warning: {folder / NEWEST / MANIFEST}: " in text and same(found, known[BEFORE])


def to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def to_a_pipe(path: Path) -> None:
    os.mkfifo(path)


def to_a_file_elsewhere(path: Path) -> None:
    (path.parent.parent / "elsewhere").write_bytes(b"")
    path.symlink_to(path.parent.parent / "elsewhere")


def to_a_folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("how", [to_zeros, to_a_pipe, to_a_file_elsewhere, to_a_folder])
@pytest.mark.parametrize(
    "file", [RNG, MODEL, "config.json", "metadata.json", "parameters_pp00.json", MANIFEST]
)
def test_what_is_no_regular_file_is_not_read(
    tmp_path: Path,
    good: Path,
    load: Load,
    file: str,
    how: Callable[[Path], None],
    known: dict[str, dict[str, Tensor]],
) -> None:
    folder = shutil.copytree(good, tmp_path / "steps")
    path = folder / NEWEST / file
    path.unlink()
    if file != MANIFEST:
        manifest = Manifest.read(folder / NEWEST)
        (folder / NEWEST / MANIFEST).write_text(
            replace(manifest, files={**manifest.files, file: EMPTY}).to_json()
        )
    how(path)
    text, found = load(folder)
    assert f"warning: {path}: is no regular file" in text and same(found, known[BEFORE])


@pytest.mark.parametrize("how", [to_zeros, to_a_pipe])
def test_a_pointer_that_is_no_regular_file_is_a_broken_pointer(
    tmp_path: Path,
    good: Path,
    load: Load,
    known: dict[str, dict[str, Tensor]],
    how: Callable[[Path], None],
) -> None:
    folder = shutil.copytree(good, tmp_path / "steps")
    (folder / LATEST).unlink()
    how(folder / LATEST)
    text, found = load(folder)
    assert f"warning: {folder / LATEST}: is no regular file" in text and same(found, known[NEWEST])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensor: tensor.to(torch.int32),
            r"must hold one of F64, F32, BF16, F16 \(got I32\)",
        ),
        (lambda tensor: tensor.to(torch.bool), r"\(got BOOL\)"),
        (
            lambda tensor: tensor[:-1].clone(),
            r"must have the shape \(99, 8\) that metadata describes \(got \(98, 8\)\)",
        ),
        (lambda tensor: torch.cat([tensor, tensor]), r"\(got \(198, 8\)\)"),
    ],
)
def test_weights_of_another_kind_or_shape_are_refused(
    tmp_path: Path, good: Path, load: Load, change: Callable[[Tensor], Tensor], message: str
) -> None:
    folder = shutil.copytree(good, tmp_path / "steps")
    path = folder / NEWEST / MODEL
    tensors = load_file(str(path))
    name = next(name for name in tensors if "word_embeddings" in name)
    save_file({**tensors, name: change(tensors[name])}, str(path))
    sign(folder / NEWEST)
    text, found = load(folder)
    assert not found and str(path) in text
    with pytest.raises(InputError, match=message):
        raise InputError(text)


def test_sampling_refuses_the_same(
    tmp_path: Path, good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(good, tmp_path / "steps")
    in_config("model", num_layers=10**9)(folder / NEWEST)
    sign(folder / NEWEST)
    arguments = [
        "--load",
        str(folder),
        "--prompt",
        "1",
        "--distributed-backend",
        "gloo",
        "--max-new-tokens",
        "1",
    ]
    assert generate.main(arguments) == 0
    assert "num_layers must be a whole number from 1 to" in capsys.readouterr().err
    assert generate.main([*arguments, "--iteration", "2"]) == 2
    assert "num_layers must be a whole number from 1 to" in capsys.readouterr().err


def places(values: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value in a JSON text."""
    items = (
        values.items()
        if isinstance(values, dict)
        else enumerate(values)
        if isinstance(values, list)
        else ()
    )
    return [before, *(place for key, value in items for place in places(value, (*before, key)))]


WHOLE = st.one_of(
    st.integers(-3, 9), st.sampled_from([2**20, 2**31, 2**40, 2**63, 10**30, -(2**63)])
)
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
TEXTS = [MANIFEST, "metadata.json", "parameters_pp00.json", "config.json"]


@settings(max_examples=settings.default.max_examples // 2, derandomize=True)
@given(data=st.data())
def test_any_changed_field_is_refused_or_changes_nothing_that_is_loaded(
    tmp_path: Path, good: Path, load: Load, known: dict[str, dict[str, Tensor]], data: st.DataObject
) -> None:
    """Values of every type and size, and missing ones, at any place of any text."""
    folder = tmp_path / "steps"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder)
    path = folder / NEWEST / data.draw(st.sampled_from(TEXTS))
    values = json.loads(path.read_text())
    place = data.draw(st.sampled_from(places(values)[1:]))
    holder = values
    for key in place[:-1]:
        holder = holder[key]
    value = data.draw(VALUES)
    if value == "delete":
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    path.write_text(json.dumps(values))
    if path.name != MANIFEST:
        sign(folder / NEWEST)
    text, found = load(folder)
    if not found:
        assert str(folder) in text
    elif f"warning: {folder / NEWEST}" in text:
        assert same(found, known[BEFORE])
    else:
        assert same(found, known[NEWEST])


def test_a_checkpoint_without_the_number_of_its_start_still_loads(
    tmp_path: Path, good: Path, load: Load, known: dict[str, dict[str, Tensor]]
) -> None:
    """As versions before the numbers wrote it."""
    folder = shutil.copytree(good, tmp_path / "steps")
    for step in (NEWEST, BEFORE):
        path = folder / step / MANIFEST
        path.write_text(
            json.dumps(
                {
                    key: value
                    for key, value in json.loads(path.read_text()).items()
                    if key in ("format", "iteration", "files")
                }
            )
        )
        assert step_fault(folder / step) is None
    text, found = load(folder)
    assert "warning" not in text and same(found, known[NEWEST])
    (folder / NEWEST / RNG).write_bytes(b"")
    assert same(load(folder)[1], known[BEFORE])
