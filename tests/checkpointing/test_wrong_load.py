"""A --load that names no checkpoint: the message says what is there, and what to give."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_lite.checkpointing.start import find_step
from megatron_lite.checkpointing.step_files import LATEST
from megatron_lite.config.checks import InputError


def made(root: Path) -> Path:
    (root / "run" / "checkpoint" / "iter_0000020").mkdir(parents=True)
    (root / "run" / "checkpoint" / LATEST).write_text("20")
    (root / "hf").mkdir()
    (root / "hf" / "config.json").write_text("{}")
    (root / "empty").mkdir()
    (root / "file").write_text("x")
    return root


@pytest.mark.parametrize(
    ("load", "answer"),
    [
        ("nowhere", "no such folder: give the folder that --save"),
        ("file", "it is a file: give the folder that --save"),
        ("empty", ": give the folder that --save"),
        ("run", "did you mean --load {root}/run/checkpoint?"),
        ("run/checkpoint/iter_0000020", "iteration 20: give --load {root}/run/checkpoint"),
        ("hf", "convert --from hf --to megatron-lite --load {root}/hf --save NEW_FOLDER"),
    ],
)
def test_the_answer_has_what_to_give(tmp_path: Path, load: str, answer: str) -> None:
    root = made(tmp_path)
    with pytest.raises(InputError) as caught:
        find_step(str(root / load))
    text = str(caught.value)
    assert text.startswith(f"--load {root}/{load}: no checkpoint there (no {LATEST}): ")
    assert answer.format(root=root) in text
