"""A mixture-of-experts layer in odd routings and in replays."""

from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.model.experts import MixtureOfExperts
from megatron_lite.model.router import Router, _sinkhorn
from megatron_lite.recompute.region_runner import Choices, Regions
from megatron_lite.recompute.schedule import plan_stage
from megatron_lite.tensor_parallel.grouped_linear import GroupedLinear
from megatron_lite.tensor_parallel.initialize import initialize_parameters_
from megatron_lite.tensor_parallel.rank_context import RankContext
from tests.support.equality import variant_config
from tests.support.models import build_tiny_model, sample_tokens, tp_state, with_new_streams

S, B, H = 5, 3, 16
DEEPSEEK = dict(
    moe_router_topk=4,
    moe_ffn_hidden_size=12,
    moe_router_score_function="sigmoid",
    moe_router_num_groups=4,
    moe_router_group_topk=2,
    moe_router_topk_scaling_factor=2.5,
    moe_router_enable_expert_bias=True,
    moe_shared_expert_intermediate_size=24,
)


def config_of(**overrides):
    return ModelConfig(
        **{
            **dict(
                num_layers=1,
                hidden_size=H,
                num_attention_heads=2,
                max_position_embeddings=S,
                ffn_hidden_size=32,
                swiglu=True,
                add_bias_linear=False,
                init_method_std=0.5,
                num_experts=8,
            ),
            **overrides,
        }
    )


@contextmanager
def layer_of(config, dtype=torch.float64):
    with tp_state(1) as parallel:
        context = RankContext.of(parallel, sequence_parallel=False, params_dtype=dtype)
        layer = MixtureOfExperts(config, context)
        initialize_parameters_(layer, parallel, seed=3)
        yield layer, regions_of(parallel.rng)


def regions_of(rng):
    return Regions(
        rebuilt=frozenset(),
        rng=rng,
        layer=0,
        skip_region_tails=False,
        verify=False,
        choices=Choices(is_replayed=True),
    )


def grouped(width, dtype):
    """Four experts of this width, without bias. Their weights are drawn."""
    context = RankContext(rng=None, device="cpu", params_dtype=dtype)
    layer = GroupedLinear(4, width, 2 * width, tp_dim=1, bias=False, init_std=1.0, context=context)
    torch.nn.init.normal_(layer.weight)
    return layer


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 6])  # 6: rows that torch's grouped product refuses
def test_grouped_products_are_those_of_each_group(dtype, width):
    rows = torch.randn(9, width, dtype=dtype, requires_grad=True)
    layer = grouped(width, dtype)
    weight, ends = layer.weight, torch.tensor([2, 2, 9, 9], dtype=torch.int32)
    output = layer(rows, ends)
    output.sum().backward()  # an expanded gradient
    wide, matrices = rows.detach().double(), weight.detach().double()
    expected = torch.cat([wide[:2] @ matrices[0].t(), wide[2:] @ matrices[2].t()])
    assert torch.allclose(
        output.double(), expected, rtol=2e-2, atol=dtype == torch.bfloat16 and 0.1
    )
    assert weight.grad is not None and rows.grad is not None
    sums = torch.stack([wide[:2].sum(0), wide.new_zeros(width), wide[2:].sum(0), wide[:0].sum(0)])
    assert torch.allclose(
        weight.grad.double(), sums.unsqueeze(1).expand(-1, 2 * width, -1), rtol=3e-2, atol=3e-2
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dry_run_has_the_shapes_of_grouped_products(dtype):
    with FakeTensorMode():
        rows = torch.empty(9, 16, dtype=dtype, requires_grad=True)
        layer = grouped(16, dtype)
        output = layer(rows, torch.empty(4, dtype=torch.int32))
        output.sum().backward()
    assert output.shape == (9, 32) and rows.grad is not None and layer.weight.grad is not None
    assert (rows.grad.shape, layer.weight.grad.shape) == (rows.shape, layer.weight.shape)


def test_a_skipped_step_moves_no_bias():
    with layer_of(config_of(**DEEPSEEK)) as (layer, regions):
        layer(torch.randn(S, B, H, dtype=torch.float64), regions)
        for skipped in (1.0, 0.0):
            layer.router.update_bias(torch.tensor(skipped))
            assert layer.router.expert_bias.any() == (not skipped)


def test_an_expert_that_no_token_wants_ends_sinkhorn_too():
    """Rounding alone moves its factor in every round."""
    logits = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)) - torch.tensor(
        [0, 0, 0, 20]
    )
    assert _sinkhorn(logits).argmax(1).bincount(minlength=4).tolist() == [2, 2, 2, 2]


ODD = {
    "mixtral": dict(
        add_bias_linear=True,
        moe_input_jitter_eps=0.3,
        moe_expert_capacity_factor=0.7,
        moe_router_load_balancing_type=("global_aux_loss", "seq_aux_loss"),
        moe_aux_loss_coeff=(0.1, 0.2),
    ),
    "deepseek": dict(moe_input_jitter_eps=0.3, moe_expert_capacity_factor=1.1),
}
POLICIES = ("*:full/2", "*:moe", "*:shared_experts", "*:moe_act+shared_experts+layernorm")
POLICIES += ("*:ops(matmul)", "*:full, verified")


@pytest.mark.runs(daily=4, ci=4)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("variant", ["mixtral", "deepseek"])
def test_a_replay_sends_every_token_to_the_same_experts(policy, variant, after, monkeypatch):
    """The router draws noise that no stream repeats, as a kernel that breaks ties in any order."""
    noise = torch.Generator().manual_seed(5)
    plain = Router._choice

    def noisy(self, logits, columns):
        return plain(self, logits + torch.randn(logits.shape, generator=noise), columns)

    monkeypatch.setattr(Router, "_choice", noisy)
    outcomes = []
    with tp_state(1) as parallel:
        config = variant_config(
            variant,
            hidden_dropout=0.1,
            norm_position="after" if after else "before",
            **ODD[variant],
        )
        policy, _, verified = policy.partition(",")
        for text in ("*:none", policy):
            recompute = RecomputeConfig(recompute_policy=text, recompute_verify=bool(verified))
            noise.manual_seed(5)
            fresh = with_new_streams(parallel)
            plan = plan_stage(recompute, 2, 0)
            model = build_tiny_model(config, fresh, plan=plan, dtype=torch.float32)
            tokens, labels = sample_tokens()
            loss = model(tokens, labels).mean()
            loss.backward()
            outcomes.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *outcomes))


def test_bad_settings_are_named():
    for settings, words in (
        (
            dict(**DEEPSEEK, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True),
            "excludes --moe-router-enable-expert-bias",
        ),
        (dict(moe_router_num_groups=3, moe_router_group_topk=1), "must form equal groups"),
        (dict(moe_router_group_topk=4), "needs --moe-router-num-groups"),
    ):
        with pytest.raises(ValueError, match=words.replace("(", r"\(")):
            config_of(**settings)
