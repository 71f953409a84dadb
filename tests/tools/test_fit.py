"""`megatron-lite fit` against the real step, and its faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron_lite.__main__ import main
from megatron_lite.api import fit_memory_
from megatron_lite.plan.hardware import load_hardware
from megatron_lite.tools.fake_fit import add_adapters_, fit_config

LLAMA: dict[str, Any] = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=200, num_hidden_layers=5,
    hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
)  # fmt: skip
T5: dict[str, Any] = dict(
    model_type="t5", architectures=["T5ForConditionalGeneration"], vocab_size=200, num_layers=4,
    d_model=64, d_kv=16, d_ff=128, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0,
)  # fmt: skip


@pytest.mark.parametrize(("config", "rank"), [(LLAMA, 0), (LLAMA, 4), (T5, 0)])
def test_fake_tensors_give_the_peak_of_the_real_step(config: dict[str, Any], rank: int) -> None:
    machine = load_hardware("h100")
    parsed = transformers.AutoConfig.for_model(**config)
    model = getattr(transformers, config["architectures"][0])(parsed).train()
    if rank:
        add_adapters_(model, rank)
    ids = torch.arange(256).reshape(2, 128) % 200

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    settings: Any = dict(
        seq_length=128, micro_batch_size=2, dtype="fp32", lora_rank=rank,
    )  # fmt: skip
    whole = fit_memory_(model, None, step=step, optimizer=torch.optim.AdamW)
    whole.remove()
    fake = fit_config(config, machine, None, **settings)
    rel = 0.01 if config is T5 else 0.001
    assert fake.measured == pytest.approx(whole.measured, rel=rel)
    budget = int(0.95 * fake.measured)
    fitted = fit_config(config, machine, budget, **settings)
    assert fitted.measured <= budget
    # the states of random generators, 5 KB a layer, are 2.4 % of so small a T5
    assert fitted.plan.peak == pytest.approx(fitted.measured, rel=0.03 if config is T5 else 0.01)


def test_the_command_prints_the_verdict_and_the_lines_to_paste(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    words = ["fit", "--hf-config", str(tmp_path), "--gpu", "h100-80gb", "--seq-length", "64"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert text.startswith("fits 76.6") and "MemoryBudgetCallback(" in text
    assert 'apply_policy_(model, layers_fqn="model.layers", policy="*:none")' in text


@pytest.mark.parametrize(
    ("words", "config", "text"),
    [
        (["--memory-budget", "1KiB"], LLAMA, "no policy fits. The smallest reachable peak is"),
        (["--gpu", "h900"], LLAMA, "no machine is called 'h900'"),
        (["--trainable", "lora:x"], LLAMA, "--trainable 'lora:x': give all, or lora:16"),
        (["--micro-batch-size", "0"], LLAMA, "--micro-batch-size must be at least 1 (got 0)"),
        (["--seq-length", "0"], LLAMA, "--seq-length must be at least 1 (got 0)"),
        ([], {}, "model_type is missing"),
        ([], {**LLAMA, "model_type": "unheard"}, "transformers cannot build this model"),
        ([], {**LLAMA, "architectures": ["logging"]}, "'logging' is no model of transformers"),
    ],
)
def test_a_fault_ends_with_status_2_and_its_reason(
    words: list[str],
    config: dict[str, Any],
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    given = ["fit", "--hf-config", str(path), "--gpu", "h100", "--seq-length", "16", *words]
    assert main(given) == 2
    error = capsys.readouterr().err
    assert text in error and len(error.splitlines()) == 1
