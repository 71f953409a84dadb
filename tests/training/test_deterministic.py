"""--deterministic-mode: no run reads uninitialised memory; the kernels of attention."""

from types import SimpleNamespace

import pytest
import torch

from megatron_lite.config.checks import InputError
from megatron_lite.training import deterministic
from tests.support.changes import with_settings
from tests.support.runs import rows, run_to_end, step_bytes, tiny_run


@pytest.fixture(autouse=True)
def torchs_settings():
    fills = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills


@pytest.mark.runs(daily=2, ci=3)
@pytest.mark.parametrize("policy", ["*:none", "*:full", "*:core_attn+layernorm+mlp+dropout"])
@pytest.mark.parametrize("training", [dict(bf16=True), dict(loss_chunk_size=7)])
def test_no_figure_depends_on_memory_that_nothing_has_written(
    tmp_path, monkeypatch, training, policy
):
    """torch fills new tensors with NaN and the largest integers in the first run, and the run turns
    that off in the second."""

    def run(name):
        run_to_end(
            tiny_run(
                metrics=tmp_path / name,
                deterministic_mode=True,
                train_iters=2,
                **training,
                save=str(tmp_path / f"c{name}"),
                recompute_policy=policy,
            )
        )
        return step_bytes(tmp_path / f"c{name}", 2)

    plain = run("plain")
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert torch.are_deterministic_algorithms_enabled()
    with monkeypatch.context() as patch:
        patch.setattr(torch.utils, "deterministic", SimpleNamespace(fill_uninitialized_memory=True))
        torch._C._set_deterministic_fill_uninitialized_memory(True)
        assert torch.empty(3).isnan().all()
        weights = run("poisoned")
    assert weights == plain
    assert rows(tmp_path / "poisoned") == rows(tmp_path / "plain")


def test_a_kernel_that_promises_nothing_is_refused_and_the_price_is_said(monkeypatch):
    times = iter([3.0, 2.0])
    monkeypatch.setattr(deterministic, "_attention", lambda *_: None)
    monkeypatch.setattr(deterministic, "_milliseconds", lambda _: next(times))
    rank = SimpleNamespace(device=torch.device("cuda"))
    config = tiny_run(training=dict(deterministic_mode=True))
    (said,) = deterministic.cost_of_determinism(None, config, rank)
    assert "embedding" in said and "3.00 ms, and 2.00 ms without --deterministic" in said
    fused = with_settings(config, attention_backend="fused")
    with pytest.raises(InputError, match="fused: --deterministic-mode needs .*-backend auto"):
        deterministic.use_asked_attention_(None, fused, rank)


@pytest.mark.parametrize("installed", ["FA3", "FA4", ""])
def test_flash_is_the_newest_flash_attention_that_runs(monkeypatch, installed):
    """The other one is installed too, and its kernels are not for this GPU."""
    active = []

    def activate(name):
        if not installed:
            raise ModuleNotFoundError("flash_attn_interface")
        active.append(name)

    def run():
        if (active and active != [installed]) or config.model.kv_channels == 4:
            raise RuntimeError("no such kernel\nhere")
        return torch.ones(())

    registry = SimpleNamespace(
        activate_flash_attention_impl=activate,
        restore_flash_attention_impl=lambda **_: active.clear(),
    )
    monkeypatch.setattr(deterministic, "registry", registry)
    monkeypatch.setattr(deterministic, "_attention", lambda *_: run)
    rank = SimpleNamespace(gathered=lambda own: [own], together=lambda _, check: check())
    flash = dict(attention_backend="flash", attention_dropout=0.0)
    config = tiny_run(**flash, bf16=True)
    said = deterministic.use_asked_attention_(None, config, rank)
    assert active == [installed] * bool(installed)
    assert said == [f"--attention-backend flash is {installed} of torch's registry"] * len(active)
    config = tiny_run(**flash, kv_channels=4, bf16=True)
    with pytest.raises(
        InputError, match=r"flash has no kernel .* \(no such kernel\): give .* auto"
    ):
        deterministic.use_asked_attention_(None, config, rank)
    assert active == []
