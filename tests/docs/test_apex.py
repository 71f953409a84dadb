"""docs/performance.md: every flag, symbol and line of the log that it names is real."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from arguments import build_parser, supported_flags
from megatron_lite.parallel.apex import INSTALL
from tests.support import apex
from tests.support.runs import run_to_end, tiny_run
from tests.support.torch_features import NEEDS_GRAD_DTYPE

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "performance.md").read_text(encoding="utf-8")
OF_PIP = {"--config-settings", "--no-build-isolation", "--build-option", "--cpp_ext", "--cuda_ext"}


def test_every_flag_exists() -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", TEXT)) - OF_PIP
    assert len(named) > 8 and named <= set(supported_flags(build_parser()))


def test_every_symbol_is_in_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    apex.install(monkeypatch)
    for module, symbol in (
        ("fused_weight_gradient_mlp_cuda", "wgrad_gemm_accum_fp32"),
        ("apex.optimizers", "FusedAdam"),
        ("amp_C", "multi_tensor_adam_capturable"),
        ("apex.normalization.fused_layer_norm", "FusedLayerNormAffineFunction"),
        ("apex.normalization.fused_layer_norm", "FusedRMSNormAffineFunction"),
    ):
        assert module in TEXT and symbol in TEXT and hasattr(sys.modules[module], symbol)


@NEEDS_GRAD_DTYPE
def test_the_line_of_the_log_is_the_programs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    apex.install(monkeypatch)
    run_to_end(tiny_run(training=dict(bf16=True, train_iters=1, eval_iters=0)))
    (line,) = (one for one in capsys.readouterr().out.splitlines() if one.startswith("weight grad"))
    assert line.replace(": 9 weights", ": 49 weights") in TEXT


def test_the_command_that_installs_is_that_of_the_error() -> None:
    command = "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation ."
    assert command in TEXT and command in INSTALL
