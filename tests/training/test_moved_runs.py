"""A run that continues on another kind of processor is told that its low bits can change."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.checkpointing.metadata import Metadata
from megatron_lite.checkpointing.step_files import METADATA, step_directory
from megatron_lite.config.checks import InputError
from megatron_lite.training import loop, processor
from tests.support.runs import run_to_end, tiny_run

ELSEWHERE = "GenuineIntel CPU with AVX2, 1 thread a rank, torch 2.13.0"


def _run(folder: Path, *, iterations: int = 2, load: bool = False, **checkpoint: Any) -> None:
    chosen = dict(save=str(folder), load=str(folder) if load else None, **checkpoint)
    run_to_end(tiny_run(training=dict(train_iters=iterations, eval_iters=0), checkpoint=chosen))


def _told(output: str) -> list[str]:
    return [line for line in output.splitlines() if "the checkpoint was computed on" in line]


def test_a_run_on_the_same_processor_is_told_nothing_and_one_on_another_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(tmp_path)
    kept = Metadata.read(step_directory(tmp_path, 2)).computed_on
    assert kept == loop.described(torch.device("cpu"))
    _run(tmp_path, iterations=3, load=True)
    assert _told(capsys.readouterr().out) == []
    monkeypatch.setattr(loop, "described", lambda *_: ELSEWHERE)
    _run(tmp_path, iterations=4, load=True)
    (line,) = _told(capsys.readouterr().out)
    assert kept in line and ELSEWHERE in line
    assert Metadata.read(step_directory(tmp_path, 4)).computed_on == ELSEWHERE


def test_a_run_that_starts_anew_from_the_weights_is_told_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(tmp_path)
    monkeypatch.setattr(loop, "described", lambda *_: ELSEWHERE)
    _run(tmp_path, load=True, finetune=True)
    assert _told(capsys.readouterr().out) == []


def test_the_description_has_the_threads_and_the_versions_of_torch_and_of_the_bits() -> None:
    """It also is one line that a checkpoint can hold."""
    cpu, threads = torch.device("cpu"), torch.get_num_threads()
    ending = f", torch {torch.__version__}, bits {processor.BITS}"
    assert loop.described(cpu).endswith(ending)
    try:
        torch.set_num_threads(3)
        assert ", 3 threads a rank, " in loop.described(cpu)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("stored", [None, 3, "two\nlines", "\x1b[2J", "x" * 401])
def test_a_damaged_description_is_refused(tmp_path: Path, stored: object) -> None:
    _run(tmp_path)
    step = step_directory(tmp_path, 2)
    values = json.loads((step / METADATA).read_text())
    (step / METADATA).write_text(json.dumps({**values, "computed_on": stored}))
    with pytest.raises(InputError, match="computed_on must be one line of text"):
        Metadata.read(step)


def test_a_checkpoint_without_a_description_is_loaded_in_silence(tmp_path: Path) -> None:
    _run(tmp_path)
    step = step_directory(tmp_path, 2)
    values = json.loads((step / METADATA).read_text())
    del values["computed_on"]
    (step / METADATA).write_text(json.dumps(values))
    assert Metadata.read(step).computed_on == ""
    assert loop.moved_notices("", ELSEWHERE) == ()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_16_bit_run_on_a_cpu_without_16_bit_products_is_told_to_use_float32(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for has_products in (True, False):
        monkeypatch.setattr(processor, "_multiplies_16_bits", lambda _, answer=has_products: answer)
        lines = processor.slow_precision_notices(precision, torch.device("cpu"))
        assert len(lines) == (precision != "fp32" and not has_products)
        assert all(f"Leave --{precision} out" in line for line in lines)
        assert processor.slow_precision_notices(precision, torch.device("cuda")) == ()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the limit is one of x86 processors")
def test_onednn_tells_which_16_bit_products_it_has() -> None:
    """Its limit of instructions is read when torch starts, so a child asks."""
    code = (
        "from megatron_lite.training.processor import slow_precision_notices as told; import torch;"
        "print(*(len(told(kind, torch.device('cpu'))) for kind in ('fp32', 'bf16', 'fp16')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": "SSE41"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["0", "1", "1"], done
