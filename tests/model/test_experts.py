"""A mixture-of-experts layer against other libraries, in odd routings, and in replays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.model.experts import MixtureOfExperts
from megatron_lite.model.router import Router
from megatron_lite.parallel.rng import RngStreams
from megatron_lite.recompute.region_runner import Regions
from megatron_lite.recompute.schedule import plan_stage
from megatron_lite.tensor_parallel.grouped_linear import grouped_linear
from megatron_lite.tensor_parallel.initialize import initialize_parameters_
from megatron_lite.tensor_parallel.rank_context import RankContext
from tests.support.equality import variant_config
from tests.support.models import build_tiny_model, sample_tokens, tp_state

S, B, H = 5, 3, 16
MIXTRAL = dict(moe_router_topk=2, moe_ffn_hidden_size=24)
QWEN2 = dict(
    moe_router_topk=3,
    moe_ffn_hidden_size=16,
    moe_router_pre_softmax=True,
    moe_shared_expert_intermediate_size=20,
    moe_shared_expert_gate=True,
)
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


def config_of(**overrides: Any) -> ModelConfig:
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
def layer_of(
    config: ModelConfig, dtype: torch.dtype = torch.float64
) -> Iterator[tuple[MixtureOfExperts, Regions]]:
    with tp_state(1) as parallel:
        context = RankContext.of(parallel, sequence_parallel=False, params_dtype=dtype)
        layer = MixtureOfExperts(config, context)
        initialize_parameters_(layer, parallel, seed=3)
        yield layer, regions_of(parallel.rng)


def regions_of(rng: RngStreams) -> Regions:
    return Regions(rebuilt=frozenset(), rng=rng, layer=0, skip_region_tails=False, verify=False)


def mixtral_block(**_: Any) -> nn.Module:
    from transformers.models.mixtral import modeling_mixtral as theirs

    config = theirs.MixtralConfig(
        hidden_size=H, intermediate_size=24, num_local_experts=8, num_experts_per_tok=2
    )
    config._experts_implementation = "eager"
    return theirs.MixtralSparseMoeBlock(config)


def qwen2_block() -> nn.Module:
    from transformers.models.qwen2_moe import modeling_qwen2_moe as theirs

    config = theirs.Qwen2MoeConfig(
        hidden_size=H,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=20,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=False,
    )
    config._experts_implementation = "eager"
    return theirs.Qwen2MoeSparseMoeBlock(config)


def deepseek_block() -> nn.Module:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    config = theirs.DeepseekV3Config(
        hidden_size=H,
        moe_intermediate_size=12,
        n_routed_experts=8,
        num_local_experts=8,
        n_shared_experts=2,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )
    config._experts_implementation = "eager"
    return theirs.DeepseekV3MoE(config)


def copied(ours: MixtureOfExperts, theirs: nn.Module) -> dict[str, list[tuple[str, int]]]:
    """Copies our weights into theirs. Returns which of theirs ours consists of, by our name."""
    shared = "shared_expert" if hasattr(theirs, "shared_expert") else "shared_experts"
    names: dict[str, list[str]] = {
        "router.weight": ["gate.weight"],
        "router.expert_bias": ["gate.e_score_correction_bias"],
        "experts.linear_fc1.weight": ["experts.gate_up_proj"],
        "experts.linear_fc2.weight": ["experts.down_proj"],
        "shared_experts.gate_weight": ["shared_expert_gate.weight"],
        "shared_experts.linear_fc1.weight": [
            f"{shared}.gate_proj.weight",
            f"{shared}.up_proj.weight",
        ],
        "shared_experts.linear_fc2.weight": [f"{shared}.down_proj.weight"],
    }
    state = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
    mine = {**dict(ours.named_parameters()), **dict(ours.named_buffers())}
    found = {name: names[name] for name in mine if name in names}
    with torch.no_grad():
        for name, others in found.items():
            parts = mine[name].chunk(len(others))
            for other, part in zip(others, parts, strict=True):
                state[other].copy_(part)
    assert {other for each in found.values() for other in each} == set(state)
    return found


@pytest.mark.parametrize(
    ("block", "settings"),
    [(mixtral_block, MIXTRAL), (qwen2_block, QWEN2), (deepseek_block, DEEPSEEK)],
    ids=["mixtral", "qwen2-moe", "deepseek-v3"],
)
def test_a_layer_computes_what_transformers_computes(block: Any, settings: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    # their routers compute in float32 in any case
    with layer_of(config_of(**settings, moe_router_dtype="fp32"), torch.float32) as (ours, regions):
        if ours.router.expert_bias is not None:
            ours.router.expert_bias.copy_(torch.linspace(-0.2, 0.2, 8))
        theirs = block()
        names = copied(ours, theirs)
        x = torch.randn(S, B, H, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        output, expected = ours(x, regions), theirs(y)
        factor = torch.randn(S, B, H)
        (output * factor).sum().backward()
        (expected * factor).sum().backward()
        assert torch.allclose(output, expected, atol=1e-5)
        assert x.grad is not None and torch.allclose(x.grad, y.grad, atol=1e-4)
        parameters = dict(theirs.named_parameters())
        for name, parameter in ours.named_parameters():
            grads = [parameters[other].grad for other in names[name]]
            assert torch.allclose(parameter.grad, torch.cat(grads), atol=1e-4), name


def plain_losses(logits: Tensor, config: ModelConfig) -> Tensor:
    """The two losses as their papers have them, of the tokens [s, b] of one micro-batch."""
    probabilities = logits.softmax(-1)
    sequences = [probabilities.flatten(0, 1)]
    if config.moe_router_load_balancing_type == "seq_aux_loss":
        sequences = list(probabilities.unbind(1))
    total = torch.zeros((), dtype=logits.dtype)
    for one in sequences:
        chosen = torch.zeros_like(one).scatter_(-1, one.topk(config.moe_router_topk).indices, 1.0)
        share = chosen.mean(0) / config.moe_router_topk  # f_e
        balance = logits.shape[-1] * (share * one.mean(0)).sum()
        total = total + config.moe_aux_loss_coeff * balance / len(sequences)
    return total + (config.moe_z_loss_coeff or 0.0) * logits.logsumexp(-1).square().mean()


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss", "none"])
def test_backward_adds_the_gradients_of_the_losses(kind: str) -> None:
    config = config_of(
        moe_router_load_balancing_type=kind, moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.2
    )
    with layer_of(config) as (layer, regions):
        router = layer.router
        router.start_step(0.5)
        x = torch.randn(S, B, H, dtype=torch.float64)
        routing = router(x, regions)
        factor = torch.randn_like(routing.weights)
        (routing.weights * factor).sum().backward()
        assert router.weight.grad is not None
        received, router.weight.grad = router.weight.grad, None

        logits = x @ router.weight.t()
        chosen = logits.flatten(0, 1).gather(-1, routing.experts).softmax(-1)
        balanced = config_of(
            moe_router_load_balancing_type=kind,
            moe_aux_loss_coeff=0.0 if kind == "none" else 0.3,
            moe_z_loss_coeff=0.2,
        )
        ((chosen * factor).sum() + 0.5 * plain_losses(logits, balanced)).backward()
        assert torch.allclose(received, router.weight.grad, atol=1e-12)
        losses = router.loss_sums * torch.tensor([balanced.moe_aux_loss_coeff, 0.2])
        assert losses.sum().item() == pytest.approx(plain_losses(logits, balanced).item(), abs=1e-5)


def test_the_balance_of_a_step_is_judged_over_its_micro_batches() -> None:
    config = config_of(moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=0.3)
    with layer_of(config) as (layer, _):
        layer.router.start_step(1.0)
        batches = [torch.randn(S, B, H, dtype=torch.float64) for _ in range(2)]
        seen = [layer.router._chosen(x.flatten(0, 1) @ layer.router.weight.t(), 1) for x in batches]
        both = torch.cat([experts for experts, _ in seen]).flatten().bincount(minlength=8)
        assert torch.equal(seen[1][1][0], both / 2)
        layer.router.start_step(1.0)
        assert layer.router.global_tokens.sum() == 0


def test_the_biases_move_towards_balance_and_only_the_choice_reads_them() -> None:
    with layer_of(config_of(**DEEPSEEK, moe_router_bias_update_rate=0.25)) as (layer, regions):
        router = layer.router
        bias = router.expert_bias
        assert bias is not None
        router.start_step(1.0)
        x = torch.randn(S, B, H, dtype=torch.float64)
        before = router(x, regions)
        counts = before.experts.flatten().bincount(minlength=8)
        assert torch.equal(router.tokens_per_expert, counts.float())
        router.update_bias(None)
        mean = counts.float().mean()
        assert torch.equal(bias, 0.25 * (mean - counts).sign())
        bias.fill_(100.0)  # the same for all: no other choice, and no other weights
        after = router(x, regions_of(regions.rng))
        assert torch.equal(before.experts, after.experts)
        assert torch.equal(before.weights, after.weights)


@pytest.mark.parametrize("topk", [1, 8])
def test_one_expert_or_all_of_them_get_every_token(topk: int) -> None:
    """The others get no row. Their gradients are zeros, not what was in memory."""
    with layer_of(config_of(moe_router_topk=topk, moe_ffn_hidden_size=16), torch.float32) as one:
        layer, regions = one
        with torch.no_grad():
            layer.router.weight.zero_()
            layer.router.weight[5] = 1.0
        x = torch.rand(S, B, H, requires_grad=True)  # positive: expert 5 has the highest score
        layer(x, regions).sum().backward()
        gradient = layer.experts.linear_fc1.weight.grad
        assert gradient is not None
        got = gradient.flatten(1).abs().sum(1) > 0
        assert got.tolist() == [topk == 8 or expert == 5 for expert in range(8)]


def by_hand(layer: MixtureOfExperts, x: Tensor, capacity: int) -> tuple[Tensor, int]:
    """The output token by token, each expert taking so many tokens, and how many are taken."""
    config, experts = layer.config, layer.experts
    assert config.num_experts is not None and experts.linear_fc1.bias is not None
    assert experts.linear_fc2.bias is not None
    tokens, output, count = x.flatten(0, 1), torch.zeros_like(x).flatten(0, 1), 0
    chosen = (tokens @ layer.router.weight.t() + layer.router.bias).topk(config.moe_router_topk)
    weights = chosen.values.softmax(-1)
    for expert in range(config.num_experts):
        places = (chosen.indices == expert).nonzero().tolist()
        wish: list[Any] = [(-weights[t, k].item(), t, k) for t, k in places]
        by_weight = config.moe_token_drop_policy == "probs"
        wish.sort(key=lambda one: one[:2] if by_weight else one[1])
        for _, token, place in wish[:capacity]:
            first = experts.linear_fc1.weight[expert] @ tokens[token]
            gate, up = (first + experts.linear_fc1.bias[expert]).chunk(2)
            second = experts.linear_fc2.weight[expert] @ (nn.functional.silu(gate) * up)
            output[token] += weights[token, place] * (second + experts.linear_fc2.bias[expert])
            count += 1
    return output.view_as(x), count


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize(
    ("topk", "factor", "capacity"),
    [(2, 0.01, 1), (1, 1.0, 2), (3, 1.1, 7), (8, 0.5, 8), (8, 3.0, 15), (1, 100.0, 15)],
)
@pytest.mark.parametrize("one_for_all", [False, True])
def test_an_expert_takes_as_many_tokens_as_its_capacity(
    policy: str, pads: bool, topk: int, factor: float, capacity: int, one_for_all: bool
) -> None:
    """A capacity of 1, experts without tokens, one expert for all, all experts for each token."""
    config = config_of(
        add_bias_linear=True,
        moe_ffn_hidden_size=16,
        moe_router_topk=topk,
        moe_token_drop_policy=policy,
        moe_expert_capacity_factor=factor,
        moe_pad_expert_input_to_capacity=pads,
    )
    with layer_of(config) as (layer, regions):
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_()
            if one_for_all:
                layer.router.weight[5] += 9.0
        x = torch.rand(S, B, H, dtype=torch.float64, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        output, (expected, count) = layer(x, regions), by_hand(layer, y, capacity)
        assert layer.num_rows == (8 * capacity if pads else count,) * 2
        factors = torch.randn_like(output)
        (output * factors).sum().backward()
        found = {name: one.grad for name, one in layer.named_parameters()}
        layer.zero_grad()
        (expected * factors).sum().backward()
        assert torch.allclose(output, expected, atol=1e-12)
        assert x.grad is not None and torch.allclose(x.grad, y.grad, atol=1e-12)
        for name, parameter in layer.named_parameters():
            assert torch.allclose(found[name], parameter.grad, atol=1e-12), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 6])  # 6: rows that torch's grouped product refuses
def test_grouped_products_are_those_of_each_group(dtype: torch.dtype, width: int) -> None:
    rows = torch.randn(9, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, 2 * width, width, dtype=dtype, requires_grad=True)
    ends = torch.tensor([2, 2, 9, 9], dtype=torch.int32)
    output = grouped_linear(rows, weight, ends)
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
def test_a_dry_run_has_the_shapes_of_grouped_products(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        rows = torch.empty(9, 16, dtype=dtype, requires_grad=True)
        weight = torch.empty(4, 32, 16, dtype=dtype, requires_grad=True)
        output = grouped_linear(rows, weight, torch.empty(4, dtype=torch.int32))
        output.sum().backward()
    assert output.shape == (9, 32) and rows.grad is not None and weight.grad is not None
    assert (rows.grad.shape, weight.grad.shape) == (rows.shape, weight.shape)


def test_a_layer_passes_gradcheck() -> None:
    with layer_of(config_of(**MIXTRAL, moe_aux_loss_coeff=0.0)) as (layer, regions):
        x = torch.randn(2, 2, H, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda y: layer(y, regions_of(regions.rng)), (x,))


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
POLICIES = {
    "unit": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2),
    "moe": dict(recompute_granularity="selective", recompute_modules=("moe",)),
    "shared": dict(recompute_granularity="selective", recompute_modules=("shared_experts",)),
    "moe_act": dict(
        recompute_granularity="selective",
        recompute_modules=("moe_act", "shared_experts", "layernorm"),
    ),
    "ops": dict(recompute_policy="*:ops(matmul)"),
    "verified": dict(recompute_policy="*:full", recompute_verify=True),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("variant", ["mixtral", "deepseek"])
def test_a_replay_sends_every_token_to_the_same_experts(
    policy: str, variant: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router draws noise that no stream repeats, as a kernel that breaks ties in any order."""
    noise = torch.Generator().manual_seed(5)
    plain = Router._chosen

    def noisy(self: Router, logits: Tensor, columns: int) -> tuple[Tensor, ...]:
        return plain(self, logits + torch.randn(logits.shape, generator=noise), columns)

    monkeypatch.setattr(Router, "_chosen", noisy)
    outcomes = []
    with tp_state(1) as parallel:
        config = variant_config(
            variant,
            hidden_dropout=0.1,
            norm_position="after" if after else "before",
            **ODD[variant],
        )
        for recompute in (RecomputeConfig(), RecomputeConfig(**POLICIES[policy])):
            noise.manual_seed(5)
            fresh = replace(parallel, rng=RngStreams(parallel.device, seed=7, tp_rank=0))
            plan = plan_stage(recompute, 2, 0)
            model = build_tiny_model(config, fresh, plan=plan, dtype=torch.float32)
            tokens, labels = sample_tokens()
            loss = model.loss(tokens, labels).mean()
            loss.backward()
            outcomes.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *outcomes))


def test_bad_settings_are_named() -> None:
    for settings, words in (
        (dict(moe_router_topk=9), "--moe-router-topk 9 is above --num-experts 8"),
        (dict(moe_layer_freq=(0,)), "gives no layer experts"),
        (
            dict(add_bias_linear=True, moe_shared_expert_intermediate_size=8),
            "--moe-shared-expert-intermediate-size 8 needs --disable-bias-linear",
        ),
        (
            dict(moe_pad_expert_input_to_capacity=True),
            "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor",
        ),
        (
            dict(**DEEPSEEK, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True),
            "excludes --moe-router-enable-expert-bias",
        ),
        (dict(moe_expert_capacity_factor=0.0), "must be above 0.0"),
        (dict(moe_input_jitter_eps=-0.1), "must be above 0.0"),
        (
            dict(moe_router_load_balancing_type=("aux_loss", "seq_aux_loss")),
            "--moe-router-load-balancing-type aux_loss seq_aux_loss with --moe-aux-loss-coeff 0.0: "
            "give each loss once",
        ),
        (dict(moe_router_num_groups=3, moe_router_group_topk=1), "must form equal groups"),
        (dict(moe_router_group_topk=4), "needs --moe-router-num-groups"),
    ):
        with pytest.raises(ValueError, match=words.replace("(", r"\(")):
            config_of(**settings)
