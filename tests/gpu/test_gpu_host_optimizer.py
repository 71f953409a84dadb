"""Optimizer states on the host of a GPU, where copies take their time, and rounded states.

Written like test_gpu.py, for `run.py`. On the CPU the tests that take a `device` try themselves.
"""

from unittest.mock import patch

import torch

from megatron_lite.config import optimizer_settings
from megatron_lite.config.optimizer_settings import OptimizerConfig
from megatron_lite.optim import layouts
from megatron_lite.optim.host_link import HostLink
from megatron_lite.optim.optimizer import Optimizer
from tests.gpu.test_gpu import on
from tests.support.models import build_tiny_model, sample_tokens, tiny_config

ROUNDED = dict(use_precision_aware_optimizer=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="fp16")


class SlowLink(HostLink):
    """Every copy begins half a millisecond late: what does not wait for it reads or writes too
    early."""

    def _copy(self, side, target, source):
        if self._device.type == "cuda":
            with torch.cuda.stream(side):
                torch.cuda._sleep(1_000_000)  # clock cycles
        return super()._copy(side, target, source)


def train(device, *, part=2**24, link=HostLink, **settings):
    """Four steps of a bf16 model, whose gradients are the same random ones whatever it computes.
    Returns weights and states, on the CPU."""
    with patch.object(optimizer_settings, "PART", part), patch.object(layouts, "HostLink", link):
        parallel = on(device)
        model = build_tiny_model(tiny_config(num_layers=3), parallel, dtype=torch.bfloat16)
        optimizer = Optimizer(model, OptimizerConfig(clip_grad=0.5, **settings), parallel)
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(5)
            optimizer.set_weight(name, torch.randn(parameter.shape, generator=generator).to(device))
        tokens, labels = (one.to(device) for one in sample_tokens(1))
        for number in range(4):
            optimizer.zero_grad()
            model(tokens, labels).mean().backward()
            optimizer.layout.gradients.reduce_()
            generator = torch.Generator().manual_seed(number)
            for grad in optimizer.layout.gradients.grads.values():
                grad.copy_(torch.randn(grad.shape, generator=generator))
            optimizer.step(0.01)
        optimizer.finish()
        held = {name: parameter.detach() for name, parameter in model.named_parameters()}
        for name in [*held]:
            for key, state in optimizer.whole_states(name).items():
                held[f"{name}/{key}"] = state
        return {name: one.float().cpu() for name, one in held.items()}, optimizer


def check_alike(found, expected, rounded):
    for name, value in expected.items():
        # bfloat16 weights, and moments in 16 bits, may be rounded the other way, which masters show
        coarse = rounded or "/" not in name
        tolerance = dict(rtol=2e-2, atol=1e-3) if coarse else dict(rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[name], value, **tolerance, msg=name)


def test_a_late_copy_changes_no_bit(device):
    """In parts of 64 elements: every buffer is used many times in a step."""
    for overlaps in (True, False):
        for more in ({}, ROUNDED, dict(optimizer="sgd"), dict(optimizer_offload_fraction=0.5)):
            settings = dict(
                optimizer_cpu_offload=True, overlap_cpu_optimizer_d2h_h2d=overlaps, **more
            )
            expected, _ = train(device, part=64, **settings)
            found, _ = train(device, part=64, link=SlowLink, **settings)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(found[name], value), (name, settings)


def test_the_host_updates_as_the_device_does(device):
    for more in ({}, ROUNDED, dict(optimizer="sgd"), dict(optimizer="muon")):
        expected, _ = train(device, **more)
        found, optimizer = train(
            device, optimizer_cpu_offload=True, overlap_cpu_optimizer_d2h_h2d=True, **more
        )
        check_alike(found, expected, "exp_avg_dtype" in more)
        assert all(one.device.type == "cpu" for one in optimizer.host_tensors())
        if device.type == "cuda":
            assert all(one.is_pinned() for one in optimizer._rule.link.buffers)


def test_rounded_states_are_those_of_a_cpu(cuda):
    for more in (ROUNDED, dict(ROUNDED, main_grads_dtype="bf16", main_params_dtype="fp16")):
        found, _ = train(cuda, **more)
        expected, _ = train(torch.device("cpu"), **more)
        check_alike(found, expected, True)


def test_offloaded_states_take_no_memory_of_the_gpu(cuda):
    """By the bytes of masters and moments that the model has."""
    held = []
    for offloads in (False, True):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(cuda)
        results, optimizer = train(cuda, optimizer_cpu_offload=offloads)
        held.append(torch.cuda.memory_allocated(cuda) - before)
        elements = sum(one.numel() for name, one in results.items() if "/" not in name)
        del optimizer
    # 12 bytes for each element, as far as the allocator's 512 bytes a tensor tell
    assert held[0] - held[1] >= 12 * elements
