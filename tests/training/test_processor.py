"""The choice between MKL and oneDNN: by vendor, flags of the processor and settings of the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.config.optimizer_settings import OptimizerConfig
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.optim import muon_update
from megatron_lite.parallel import cpu_facts
from megatron_lite.parallel.state import parallel_state
from megatron_lite.training import build_trainer, processor
from tests.support.product_sizes import product_sizes
from tests.support.runs import tiny_run
from tests.support.sixteen_bits import multiplies_16_bits

BF16 = "vendor_id: GenuineIntel\nflags: avx512f avx512_bf16\n"
FLAGS = "fpu avx2 avx512f avx512bw avx512dq avx512vl"
AMD = f"processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: {FLAGS}\n\nflags: x\n"


@pytest.fixture
def amd(tmp_path: Path) -> Path:
    return _file(tmp_path, AMD)


def _file(folder: Path, text: str) -> Path:
    path = folder / "cpuinfo"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (AMD, True),
        (AMD * 4000, True),
        (AMD.replace("AuthenticAMD", "GenuineIntel"), False),
        (AMD.replace("avx512f", "avx512"), False),
        # the flags of another processor do not count
        (AMD.replace("avx512f", "") + "vendor_id: AuthenticAMD\nflags: avx512f\n", False),
        ("CPU implementer\t: 0x41\nFeatures\t: fp asimd\n", False),
        ("", False),
        ("\x00\xff:::\n:\n\n\n", False),
    ],
)
def test_the_first_processor_decides(text: str, expected: bool, tmp_path: Path) -> None:
    assert processor.multiplies_faster_by_onednn(_file(tmp_path, text)) is expected


@pytest.mark.parametrize(
    ("family", "threads", "expected"),
    [("25", 1, True), ("25", 2, False), ("26", 1, True), ("26", 2, True)],
)
def test_zen_4_gains_with_one_thread_only(
    family: str, threads: int, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor.torch, "get_num_threads", lambda: threads)
    text = AMD.replace("flags\t", f"cpu family\t: {family}\nflags\t", 1)
    assert processor.multiplies_faster_by_onednn(_file(tmp_path, text)) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BF16, True),
        (BF16.replace("GenuineIntel", "AuthenticAMD"), True),
        (BF16.replace("avx512_bf16", "avx512_bf16 amx_bf16 amx_tile"), False),
        (BF16.replace("avx512_bf16", "avx512_fp16"), False),
        ("Features\t: fp bf16\n", False),
    ],
)
def test_bf16_attention_by_products_gains_from_vectors_and_not_beside_tiles(
    text: str, expected: bool, tmp_path: Path
) -> None:
    assert processor.multiplies_bf16_vectors(_file(tmp_path, text)) is expected


ZEN_3 = "vendor_id: AuthenticAMD\ncpu family: 25\nflags: fpu avx avx2 fma\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ZEN_3, True),
        (ZEN_3.replace("AuthenticAMD", "GenuineIntel"), True),
        (ZEN_3.replace("avx2", "avx2 avx512f"), True),  # Knights Landing has no more
        (ZEN_3.replace("avx2", "avx2 avx512f avx512bw avx512dq avx512vl"), False),
        (ZEN_3.replace("avx2", "avx2 avx_ne_convert"), False),
        (ZEN_3.replace("avx2", "sse4_2"), False),  # not measured
        ("Features\t: fp asimd\n", False),
        ("", False),
    ],
)
def test_16_bit_runs_compute_in_float32_where_torch_has_loops(
    text: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor.torch.backends.mkldnn, "is_available", lambda: True)
    file = _file(tmp_path, text)
    assert cpu_facts.has_avx2_alone(file) is expected
    for precision in ("bf16", "fp16"):
        config = tiny_run(training={precision: True})
        assert processor.uses_onednn(config, "cpu", file) is expected
        assert not processor.uses_onednn(config, "cuda", file)
        off = tiny_run(training={precision: True, "onednn_matmuls": False})
        assert not processor.uses_onednn(off, "cpu", file)
    assert processor.uses_onednn(tiny_run(), "cpu", file) is ("avx512f" in text)


def test_the_log_and_the_checkpoint_tell_of_float32_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    multiplies_16_bits(monkeypatch, False)
    for precision in ("bf16", "fp16"):
        (line,) = processor.products_notices(tiny_run(training={precision: True}), onednn=True)
        assert "in float32" in line and "--no-onednn-matmuls" in line
    assert "products in float32" in processor.described(torch.device("cpu"), onednn=True)
    assert "products by torch" in processor.described(torch.device("cpu"), onednn=False)


@pytest.mark.parametrize("onednn", [False, True])
def test_muon_follows_the_flag_too(onednn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []
    real = muon_update.orthogonalize

    def orthogonalize(matrix: Tensor, steps: Any, *, onednn: bool) -> Tensor:
        chosen.append(onednn)
        return real(matrix, steps, onednn=onednn)

    monkeypatch.setattr(muon_update, "orthogonalize", orthogonalize)
    config = tiny_run(training=dict(onednn_matmuls=onednn))
    config = replace(config, optimizer=OptimizerConfig(optimizer="muon"))
    with parallel_state(config.parallel, seed=1) as parallel:
        trainer = build_trainer.build_trainer(config, parallel)
        trainer.optimizer.step(1e-3)
    assert chosen and set(chosen) == {onednn}


def test_without_a_readable_file_torchs_library_keeps_the_products(tmp_path: Path) -> None:
    assert not processor.multiplies_faster_by_onednn(tmp_path / "none")
    assert not processor.multiplies_faster_by_onednn(tmp_path)


def _compiled() -> RunConfig:
    config = tiny_run(training=dict(torch_compile=True))
    return RunConfig(
        **{
            **{name: getattr(config, name) for name in ("model", "training", "data", "tokenizer")},
            "recompute": RecomputeConfig(activation_memory_budget=0.5),
        }
    )


@pytest.mark.parametrize(
    ("config", "device", "expected"),
    [
        (lambda: tiny_run(), "cpu", True),
        (lambda: tiny_run(), "cuda", False),
        (lambda: tiny_run(training=dict(bf16=True)), "cpu", False),
        (lambda: tiny_run(training=dict(fp16=True)), "cpu", False),
        (lambda: tiny_run(training=dict(onednn_matmuls=False)), "cpu", False),
        (lambda: tiny_run(training=dict(torch_compile=True)), "cpu", True),
        (_compiled, "cpu", False),
    ],
)
def test_a_float32_run_on_a_cpu_uses_onednn_and_others_do_not(
    config: Any, device: str, expected: bool, amd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor.torch.backends.mkldnn, "is_available", lambda: True)
    assert processor.uses_onednn(config(), device, amd) is expected


@pytest.mark.parametrize(
    ("training", "device", "expected"),
    [
        (dict(bf16=True), "cpu", True),
        (dict(bf16=True), "cuda", False),
        (dict(bf16=True, onednn_matmuls=False), "cpu", False),
        (dict(fp16=True), "cpu", False),
        (dict(), "cpu", False),
    ],
)
def test_a_bf16_run_uses_onednn_where_its_attention_gains(
    training: dict[str, Any],
    device: str,
    expected: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processor.torch.backends.mkldnn, "is_available", lambda: True)
    config, file = tiny_run(training=training), _file(tmp_path, BF16)
    assert processor.uses_onednn(config, device, file) is expected


@pytest.mark.parametrize(
    ("seq_length", "model", "lines"),
    [
        (128, dict(), 1),
        (127, dict(), 0),
        (128, dict(attention_backend="unfused"), 0),
        (128, dict(attention_dropout=0.1), 0),
        (128, dict(window_size=(16, 0)), 0),
        (128, dict(window_size=(16, 0), window_attn_skip_freq=2), 1),
    ],
)
def test_the_log_of_a_bf16_run_has_the_choice_if_a_layer_takes_it(
    seq_length: int, model: dict[str, Any], lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiplies_16_bits(monkeypatch, True)
    shape = dict(max_position_embeddings=128, attention_dropout=0.0)
    config = tiny_run(training=dict(bf16=True), model={**shape, **model})
    config = replace(config, data=replace(config.data, seq_length=seq_length))
    found = processor.products_notices(config, onednn=True)
    assert len(found) == lines and all("--no-onednn-matmuls" in line for line in found)
    assert processor.products_notices(config, onednn=False) == ()


@pytest.mark.parametrize("onednn", [False, True])
def test_the_model_gets_the_choice_and_the_log_has_it(
    onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_trainer, "uses_onednn", lambda *_: onednn)
    # 16 tokens, hidden size 32, 128 padded ids and an MLP of 128
    product_sizes(monkeypatch, LEAST_MULTIPLICATIONS=2**16)
    config = tiny_run()
    with parallel_state(config.parallel, seed=1) as parallel:
        trainer = build_trainer.build_trainer(config, parallel)
        assert all(chunk.context.onednn is onednn for chunk in trainer.model)
        lines = [line for line in trainer.notices if "oneDNN" in line]
    if not onednn:
        assert lines == []
        return
    (line,) = lines
    assert "2^16 multiplications" in line
    assert "--no-onednn-matmuls" in line


def test_a_run_without_large_products_has_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processor.products_notices(tiny_run(), onednn=True) == ()
    product_sizes(monkeypatch, LEAST_MULTIPLICATIONS=2**16)
    assert len(processor.products_notices(tiny_run(), onednn=True)) == 1
    product_sizes(monkeypatch, LEAST_MULTIPLICATIONS=2**16 + 1)
    assert processor.products_notices(tiny_run(), onednn=True) == ()
