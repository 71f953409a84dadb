"""Parts of a layer in host memory: which tensors go there, and Megatron's flags for it."""

from itertools import product

import pytest
import torch

from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.regions import PARTS
from megatron_lite.memory.measure.meter import kept_for_backward
from tests.support.equality import VARIANTS, variant_config
from tests.support.models import build_tiny_model, plan_of, sample_tokens, tp_state
from tests.support.pairs import sampled
from tests.support.storages import bytes_by_label


@pytest.mark.parametrize(
    "flags, policy",
    [
        (dict(cpu_offloading_num_layers=0), "*:none"),
        (dict(cpu_offloading_num_layers=1), "0:none@host; *:none"),
        (dict(cpu_offloading_num_layers=5), "0-4:none@host; *:none"),
        (
            dict(
                fine_grained_activation_offloading=True, offload_modules=("mlp_norm", "core_attn")
            ),
            "*:none@host(core_attn+mlp_norm)",
        ),
        (dict(offload_modules=("core_attn",)), "*:none"),
    ],
)
def test_megatrons_flags_are_policies(flags, policy):
    assert str(RecomputeConfig(**flags).policy) == policy


@pytest.mark.parametrize(
    "variant, parts",
    [
        ("gpt2", ("core_attn",)),
        ("llama", tuple(PARTS)),
        *(
            pytest.param(variant, (part,), marks=pytest.mark.long)
            for variant, part in sampled(product(VARIANTS, PARTS), every=3)
        ),
    ],
)
def test_a_part_moves_what_its_module_saves_first_and_nothing_else(variant, parts):
    """By the meter of saved tensors, which labels each storage with the first module that saved
    it."""
    with tp_state(1) as parallel:
        model = build_tiny_model(variant_config(variant), parallel)
        tokens, labels = sample_tokens(0)
        kept = {}
        for policy in ("*:none", f"*:none@host({'+'.join(parts)})"):
            model.decoder.plan = plan_of(policy, 2)
            with kept_for_backward(exclude=model.parameters(), model=model) as meter:
                loss = model(tokens, labels).mean()
            kept[policy] = (bytes_by_label(meter), model.decoder.stores.host_bytes)
            del loss
        (plain, nothing), (with_parts, on_host) = kept.values()
        modules = {f"decoder.layers.{layer}.{PARTS[part]}" for layer in (0, 1) for part in parts}
        assert nothing == 0 and on_host == sum(plain.get(name, 0) for name in modules)
        stay = {name: size for name, size in plain.items() if name not in modules}
        assert {name: size for name, size in with_parts.items() if size} == stay
        assert torch.is_grad_enabled() and model.decoder.stores.host_bytes == 0
