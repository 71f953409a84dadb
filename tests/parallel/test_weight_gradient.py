"""Weight gradients summed by a kernel, for which a stand-in with the functions of apex's extension module is used."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.optim.grad_buffer import GradBuffer
from megatron_lite.parallel.rng import RngStreams
from megatron_lite.parallel.weight_gradient import accumulate_with_, apex_kernel, description
from megatron_lite.recompute.schedule import plan_stage
from megatron_lite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron_lite.training import build
from tests.support.equality import difference, variant_config
from tests.support.models import build_tiny_model, sample_tokens, tp_state
from tests.support.ranks import run_ranks
from tests.support.runs import rows, run_to_end, tiny_run

MODULE = "fused_weight_gradient_mlp_cuda"


class StandIn:
    """What apex's kernel does, and what it asks of its operands without checking it."""

    def __init__(self) -> None:
        self.calls = 0

    def wgrad_gemm_accum_fp32(self, input_2d: Tensor, grad_output_2d: Tensor, main_grad: Tensor) -> None:
        assert all(operand.dim() == 2 and operand.is_contiguous() for operand in (input_2d, grad_output_2d, main_grad))
        assert input_2d.dtype == grad_output_2d.dtype != main_grad.dtype == torch.float32
        main_grad.addmm_(grad_output_2d.t().float(), input_2d.float())
        self.calls += 1


def linear_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    return {f"{name}.weight": module.weight for name, module in model.named_modules()
            if isinstance(module, (ColumnParallelLinear, RowParallelLinear))}


def summed_by(kernel: StandIn | None, name: str, world_size: int, *, sequence_parallel: bool, dtype: torch.dtype,
              policy: str = "*:none", micro_batches: int = 3) -> dict[str, Tensor]:
    """This rank's gradients after some micro-batches, of a model with dropout."""
    config = variant_config(name, hidden_dropout=0.1)
    plan = plan_stage(RecomputeConfig(recompute_policy=policy), config.num_layers)
    with tp_state(world_size) as parallel:
        parallel = replace(parallel, rng=RngStreams(parallel.device, seed=7, tp_rank=parallel.tp_rank))
        model = build_tiny_model(config, parallel, sequence_parallel=sequence_parallel, dtype=dtype, plan=plan)
        parameters = dict(model.named_parameters())
        buffer = GradBuffer(parameters, parallel)
        if kernel is not None:
            accumulate_with_(kernel.wgrad_gemm_accum_fp32, [(weight, buffer.grads[key])
                                                            for key, weight in linear_weights(model).items()])
        for _ in range(2):  # what the first step leaves must not count in the second
            buffer.forget()
            for number in range(micro_batches):
                model.loss(*sample_tokens(number)).mean().backward()
            buffer.reduce_()
        if kernel is not None:
            assert kernel.calls == 2 * micro_batches * len(linear_weights(model))
    return {key: grad.clone() for key, grad in buffer.grads.items()}


@pytest.mark.parametrize("name", ["gpt2", "llama"])  # tied and untied output weights
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tp_size", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_gradients_are_those_without_the_kernel_but_for_one_rounding(tp_size: int, sequence_parallel: bool,
                                                                     dtype: torch.dtype, name: str) -> None:
    def work(rank: int, world_size: int) -> list[dict[str, Tensor]]:
        return [summed_by(kernel, name, world_size, sequence_parallel=sequence_parallel, dtype=dtype)
                for kernel in (None, StandIn())]

    for plain, fused in [work(0, 1)] if tp_size == 1 else run_ranks(work, tp_size):
        rounding = torch.finfo(dtype).eps
        for key, grad in plain.items():
            by_kernel = key.endswith("weight") and ("linear" in key or "output_layer" in key)
            assert 0.0 < difference(grad, fused[key]) < rounding if by_kernel else torch.equal(fused[key], grad), key


def test_the_sum_is_that_of_unrounded_products() -> None:
    """The gradient of one column-parallel matmul, over two micro-batches, by hand. Its operands are parts of larger tensors."""
    generator = torch.Generator().manual_seed(2)
    with tp_state(1) as parallel:
        model = build_tiny_model(variant_config("llama"), parallel, dtype=torch.float16)
        layer = model.decoder.layers[0].mlp.linear_fc1
        buffer = GradBuffer({"weight": layer.weight}, parallel)
        accumulate_with_(StandIn().wgrad_gemm_accum_fp32, [(layer.weight, buffer.grads["weight"])])
        expected = torch.zeros_like(buffer.grads["weight"])
        buffer.grads["weight"].fill_(9.0)  # of an earlier step
        for _ in range(2):
            x, grad = (torch.randn(5, 3, 2 * size, generator=generator).half()[..., :size] for size in layer.weight.shape[::-1])
            layer(x).backward(grad)
            expected.addmm_(grad.flatten(0, 1).t().float(), x.flatten(0, 1).float())
    assert layer.weight.grad is not None and layer.weight.grad.data_ptr() == buffer.grads["weight"].data_ptr()
    assert torch.equal(buffer.grads["weight"], expected)


@pytest.mark.parametrize("policy", ["*:full/2", "*:core_attn+layernorm+mlp", "*:ops(matmul)"])
def test_no_recompute_policy_changes_a_bit_of_what_the_kernel_sums(policy: str) -> None:
    plain, recomputed = (summed_by(StandIn(), "gpt2", 1, sequence_parallel=False, dtype=torch.bfloat16, policy=each)
                         for each in ("*:none", policy))
    assert all(torch.equal(grad, recomputed[key]) for key, grad in plain.items())


def test_hooks_that_wait_for_a_gradient_run_once_for_each() -> None:
    with tp_state(1) as parallel:
        model = build_tiny_model(variant_config("gpt2"), parallel, dtype=torch.bfloat16)
        buffer = GradBuffer(dict(model.named_parameters()), parallel)
        weights = linear_weights(model)
        accumulate_with_(StandIn().wgrad_gemm_accum_fp32, [(weight, buffer.grads[key]) for key, weight in weights.items()])
        arrived: list[int] = []
        for weight in weights.values():
            weight.register_post_accumulate_grad_hook(lambda owner: arrived.append(id(owner)))
        for number in (1, 2):
            model.loss(*sample_tokens(number)).mean().backward()
            assert sorted(arrived) == sorted(number * [id(weight) for weight in weights.values()])


def test_the_extension_module_of_apex_is_looked_for_on_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(wgrad_gemm_accum_fp32=print))
    assert apex_kernel(torch.device("cuda", 0)) is print and apex_kernel(torch.device("cpu")) is None
    monkeypatch.setitem(sys.modules, MODULE, None)  # as if it were not installed
    assert apex_kernel(torch.device("cuda", 0)) is None


@pytest.mark.parametrize(("training", "fused"), [
    (dict(bf16=True), True), (dict(fp16=True), True), ({}, False),
    (dict(bf16=True, gradient_accumulation_fusion=False), False)])
def test_a_run_uses_the_kernel_where_it_may_and_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                                        training: dict[str, bool], fused: bool) -> None:
    kernel = StandIn()
    monkeypatch.setattr(build, "apex_kernel", lambda device: kernel.wgrad_gemm_accum_fp32)
    run_to_end(tiny_run(training=dict(train_iters=1, eval_iters=0, **training)))
    assert kernel.calls == (4 * 2 * 4 if fused else 0)  # micro-batches, layers, weights of a layer
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("gradients")]
    assert said == [line for line in [description(torch.float16 if training else torch.float32, fused=fused)] if line]


def test_a_run_with_the_kernel_learns_as_one_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_to_end(tiny_run(training=dict(bf16=True), metrics=tmp_path / "plain"))
    monkeypatch.setattr(build, "apex_kernel", lambda device: StandIn().wgrad_gemm_accum_fp32)
    run_to_end(tiny_run(training=dict(bf16=True), metrics=tmp_path / "fused"))
    plain, fused = ([row["lm_loss"] for row in rows(tmp_path / name)] for name in ("plain", "fused"))
    assert plain != fused and fused == pytest.approx(plain, rel=0.01)


def test_the_log_says_how_gradients_are_summed() -> None:
    assert description(torch.float32, fused=False) is None
    assert "apex's kernel" in str(description(torch.bfloat16, fused=True))
    assert "autograd (grad_dtype)" in str(description(torch.bfloat16, fused=False))
