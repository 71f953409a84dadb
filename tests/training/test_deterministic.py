"""--deterministic-mode: no run reads uninitialised memory; the fastest attention that repeats."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.config.checks import InputError
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.model.attention import CoreAttention
from megatron_lite.training import deterministic
from megatron_lite.training.deterministic import CUDNN, FLASH, Tried, tried
from tests.support.runs import rows, run_to_end, step_bytes, tiny_run

ON_CPU: Any = SimpleNamespace(device=torch.device("cpu"))  # streams, for attention without dropout


@pytest.fixture(autouse=True)
def torchs_settings() -> Iterator[None]:
    fills = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills


@pytest.mark.runs(daily=2, ci=3)
@pytest.mark.parametrize("policy", ["*:none", "*:full", "*:core_attn+layernorm+mlp"])
@pytest.mark.parametrize("training", [dict(bf16=True), dict(loss_chunk_size=7)], ids=str)
def test_no_figure_depends_on_memory_that_nothing_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, training: dict[str, Any], policy: str
) -> None:
    """torch fills new tensors with NaN and the largest integers in the first run, and the run turns
    that off in the second."""

    def run(name: str) -> dict[str, bytes]:
        config = tiny_run(
            metrics=tmp_path / name,
            training=dict(deterministic_mode=True, train_iters=2, **training),
            checkpoint=dict(save=str(tmp_path / f"c{name}")),
        )
        run_to_end(replace(config, recompute=RecomputeConfig(recompute_policy=policy)))
        return step_bytes(tmp_path / f"c{name}", 2)

    plain = run("plain")
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert torch.are_deterministic_algorithms_enabled()
    with monkeypatch.context() as patch:
        poisoned = SimpleNamespace(fill_uninitialized_memory=True)
        patch.setattr(torch.utils, "deterministic", poisoned)
        torch._C._set_deterministic_fill_uninitialized_memory(True)
        assert torch.empty(3).isnan().all()
        weights = run("poisoned")
    assert weights == plain
    assert rows(tmp_path / "poisoned") == rows(tmp_path / "plain")


def attention_of(gradients: Sequence[float]) -> Callable[[], Sequence[Tensor]]:
    """A run of attention whose gradient takes these values in turn."""
    values = itertools.cycle(gradients)
    return lambda: (torch.ones(2), torch.full((2,), next(values)))


def test_a_kernel_repeats_if_all_tries_gave_equal_bits() -> None:
    assert tried(attention_of([1.0]), lambda run: 2.5) == Tried(2.5, repeats=True)
    last = [1.0] * deterministic.TRIES + [1.0 + 2**-23]
    assert tried(attention_of(last), lambda run: 2.5) == Tried(2.5, repeats=False)

    def missing() -> Sequence[Tensor]:
        raise RuntimeError("No available kernel. Aborting execution.")

    assert tried(missing, lambda run: 2.5) == Tried(None)


@pytest.mark.parametrize(
    ("cudnn", "others_agree", "taken", "text"),
    [
        (Tried(1.0, True), True, CUDNN, "1.00 ms, equal bits in 4 tries"),
        (Tried(1.0, True), False, FLASH, "1.00 ms, equal bits in 4 tries"),
        (Tried(1.0, False), True, FLASH, "1.00 ms, does not repeat its bits"),
        (Tried(3.0, True), True, FLASH, "3.00 ms, equal bits in 4 tries"),
        (Tried(None), True, FLASH, "does not run here"),
    ],
)
def test_the_fastest_kernel_that_repeats_on_every_rank_is_taken(
    monkeypatch: pytest.MonkeyPatch, cudnn: Tried, others_agree: bool, taken: str, text: str
) -> None:
    results = iter([Tried(2.0, True), cudnn, Tried(0.5)])  # FlashAttention's first
    monkeypatch.setattr(deterministic, "_values", lambda *_: [])
    monkeypatch.setattr(deterministic, "tried", lambda *_: next(results))
    layer = CoreAttention(tiny_run().model, ON_CPU, layer=0)
    config = tiny_run(model=dict(attention_dropout=0.0), training=dict(deterministic_mode=True))
    rank = SimpleNamespace(device=torch.device("cuda"), all_agree=lambda yes: yes and others_agree)
    forced, said = deterministic.choose_attention_(torch.nn.ModuleList([layer]), config, rank)  # type: ignore[arg-type]
    assert "embedding" in forced and "without --deterministic-mode: 0.50 ms" in said
    assert (layer.kernel is deterministic.cudnn_attention) == (taken == CUDNN)
    assert said.startswith(f"deterministic attention is {taken}'s: ") and text in said
    unfit = tiny_run(training=dict(deterministic_mode=True))  # with dropout
    _, kept = deterministic.choose_attention_(torch.nn.ModuleList(), unfit, rank)  # type: ignore[arg-type]
    assert "--attention-dropout" in kept


@pytest.mark.parametrize("installed", ["FA3", "FA4", ""])
def test_flash_is_the_newest_flash_attention_that_runs(
    monkeypatch: pytest.MonkeyPatch, installed: str
) -> None:
    """The other one is installed too, and its kernels are not for this GPU."""
    active: list[str] = []

    def activate(name: str) -> None:
        if not installed:
            raise ModuleNotFoundError("flash_attn_interface")
        active.append(name)

    def run(layer: CoreAttention, *_: Any) -> Tensor:
        if (active and active != [installed]) or config.model.kv_channels == 4:
            raise RuntimeError("no such kernel\nhere")
        return torch.ones(())

    monkeypatch.setattr(deterministic.registry, "activate_flash_attention_impl", activate)
    monkeypatch.setattr(
        deterministic.registry,
        "restore_flash_attention_impl",
        lambda **_: active.clear(),
        raising=False,
    )
    monkeypatch.setattr(deterministic, "_attention", run)
    monkeypatch.setattr(deterministic, "_values", lambda *_: [])
    layers: Any = torch.nn.ModuleList([CoreAttention(tiny_run().model, ON_CPU, layer=0)])
    rank: Any = SimpleNamespace(all_agree=lambda yes: yes, together=lambda _, check: check())
    flash = dict(attention_backend="flash", attention_dropout=0.0)
    config = tiny_run(model=flash, training=dict(bf16=True))
    said = deterministic.use_asked_attention_(layers, config, rank)
    assert active == [installed] * bool(installed)
    assert said == [f"--attention-backend flash is {installed} of torch's registry"] * len(active)
    config = tiny_run(model=dict(flash, kv_channels=4), training=dict(bf16=True))
    with pytest.raises(
        InputError, match=r"flash has no kernel .* \(no such kernel\): give .* auto"
    ):
        deterministic.use_asked_attention_(layers, config, rank)
    assert active == []


def test_what_is_tried_is_the_models_attention_at_the_runs_shape() -> None:
    config = tiny_run(model=dict(group_query_attention=True, num_query_groups=2))
    rank = SimpleNamespace(device=torch.device("cpu"), tp_size=2)
    values = deterministic._values(config, rank)  # type: ignore[arg-type]
    assert [tuple(one.shape) for one in values] == [(16, 1, heads, 8) for heads in (2, 1, 1, 2)]
    layer, taken = CoreAttention(config.model, ON_CPU, layer=0), list[bool]()
    own = layer.kernel

    def kernel() -> Any:
        taken.append(layer.training)
        return nullcontext()

    output, *gradients = deterministic._attention(layer, values, kernel)
    assert taken == [False] and layer.training and layer.kernel is own
    assert len(gradients) == 3 and torch.equal(output, layer.eval()(*values[:3]))


def test_cudnn_is_asked_for_and_torchs_settings_come_back() -> None:
    torch.use_deterministic_algorithms(True)
    with deterministic.cudnn_attention():
        assert (
            torch.backends.cuda.cudnn_sdp_enabled() and not torch.backends.cuda.math_sdp_enabled()
        )
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.backends.cuda.math_sdp_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.are_deterministic_algorithms_enabled()
