"""Muon: a plain loop in float64 and torch's own Muon are the oracles of its rule. Over TP ranks,
matrices are orthogonalized whole or by block."""

import copy
import math

import pytest
import torch
from torch import nn

from megatron_lite.config.checks import InputError
from megatron_lite.config.optimizer_settings import OptimizerConfig
from megatron_lite.optim.muon_update import STEPS, orthogonalize
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.parameter_spec import ParameterSpec, mark
from tests.support.equality import difference, variant_config
from tests.support.models import build_tiny_model, on_ranks, sample_tokens, tp_state
from tests.support.runs import run_to_end, tiny_run
from tests.support.saves import state_of
from tests.support.torch_features import NEEDS_MUON

RATES = [0.02, 0.01, 0.0, 0.03, 0.02]
SHAPES = {"square": (8, 8), "tall": (32, 8), "wide": (6, 10)}
MATRICES = (
    "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
)
HIGH = dict(optimizer="muon", muon_fp32_matmul_prec="high", weight_decay=0.0, clip_grad=0.0)
QUINTIC = STEPS["quintic"](5)


def update_of(gradient):
    return orthogonalize(gradient, QUINTIC) * math.sqrt(max(gradient.shape))


class Prescribed(nn.Module):
    """Three matrices, and a norm weight, whose gradients do not depend on them: an error of a
    rounding stays one."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        for number, (name, shape) in enumerate({**SHAPES, "norm": (5,)}.items()):
            values = torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(dtype)
            spec = ParameterSpec(global_shape=shape, matrices=(1,) if len(shape) == 2 else ())
            self.register_parameter(name, mark(nn.Parameter(values), spec))

    def loss(self, number):
        generator = torch.Generator().manual_seed(100 + number)
        return sum(
            (
                parameter * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            ).sum()
            for parameter in self.parameters()
        )


def step(model, optimizer, number, rate):
    optimizer.zero_grad()
    model.loss(number).backward()
    optimizer.step(rate)


@NEEDS_MUON
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("weight_decay, momentum, num_steps", [(0.1, 0.95, 5), (0.0, 0.8, 3)])
@pytest.mark.parametrize(
    "mode, extra, adjustment",
    [("shape_scaling", 1.0, "original"), ("spectral", 0.2, "match_rms_adamw")],
)
def test_matrices_follow_torchs_muon(
    nesterov, weight_decay, momentum, num_steps, mode, extra, adjustment
):
    """Momentum to the bit. Weights too where the scale is a power of two; else the product of
    update and scale is rounded before the learning rate multiplies it and not after: two
    roundings of an update of at most 0.03 x 0.2 x sqrt(32)."""
    ours = Prescribed()
    theirs = copy.deepcopy(ours)
    reference = torch.optim.Muon(
        [theirs.get_parameter(name) for name in SHAPES],
        lr=0.0,
        weight_decay=weight_decay,
        momentum=momentum,
        nesterov=nesterov,
        ns_steps=num_steps,
        adjust_lr_fn=adjustment,
    )
    config = OptimizerConfig(
        optimizer="muon",
        clip_grad=0.0,
        weight_decay=weight_decay,
        muon_momentum=momentum,
        muon_nesterov=nesterov,
        muon_num_ns_steps=num_steps,
        muon_coefficient_type="simple",
        muon_scale_mode=mode,
        muon_extra_scale_factor=extra,
    )
    with tp_state(1) as parallel:
        optimizer = Optimizer(ours, config, parallel)
        for number, rate in enumerate(RATES):
            step(ours, optimizer, number, rate)
            theirs.zero_grad()
            theirs.loss(number).backward()
            reference.param_groups[0]["lr"] = rate
            reference.step()
    for name in SHAPES:
        mine, other = ours.get_parameter(name), theirs.get_parameter(name)
        assert optimizer.states[name].keys() == {"momentum_buffer"}
        assert torch.equal(
            optimizer.states[name]["momentum_buffer"], reference.state[other]["momentum_buffer"]
        ), name
        if mode == "shape_scaling":
            assert torch.equal(mine, other), name
        torch.testing.assert_close(mine, other, rtol=2e-7, atol=1e-8, msg=name)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen"])
def test_the_matrices_of_layers_are_muons_and_all_else_is_adamws_to_the_bit(name):
    """After one step from the same weights. Embeddings, output weight, norms, biases: as with
    --optimizer adam."""
    results = {}
    with tp_state(1) as parallel:
        for rule in ("adam", "muon"):
            model = build_tiny_model(variant_config(name), parallel, dtype=torch.float32)
            optimizer = Optimizer(model, OptimizerConfig(optimizer=rule), parallel)
            model(*sample_tokens()).mean().backward()
            optimizer.step(0.01)
            results[rule] = state_of(model, optimizer)
    names = [f"decoder.layers.{layer}.{matrix}" for layer in range(2) for matrix in MATRICES]
    assert {key for key in results["muon"] if key.endswith("momentum_buffer")} == {
        f"{name}/momentum_buffer" for name in names
    }
    for key, value in results["adam"].items():
        if key.partition("/")[0] not in names:
            assert torch.equal(value, results["muon"][key]), key
        elif "/" not in key:
            assert not torch.equal(value, results["muon"][key]), key


@pytest.mark.parametrize("split", [True, False])
def test_query_key_and_value_rows_are_three_matrices_unless_told_otherwise(split):
    """And linear_fc1 is one, [gate; up]. 4 query groups of 2 queries: rows q q k v, q q k v ..
    of 6 channels each."""
    with tp_state(1) as parallel:
        model = build_tiny_model(variant_config("llama"), parallel)
        optimizer = Optimizer(model, OptimizerConfig(**HIGH, muon_split_qkv=split), parallel)
        before = state_of(model, optimizer)
        model(*sample_tokens()).mean().backward()
        optimizer.step(0.01)
    qkv, fc1 = (f"decoder.layers.1.{MATRICES[index]}" for index in (0, 2))
    assert model.get_parameter(fc1).shape == (80, 32) and model.get_parameter(qkv).shape == (96, 32)
    kinds = torch.tensor([0, 0, 1, 2]).repeat(4).repeat_interleave(6)
    three = [(kinds == kind).nonzero().view(-1) for kind in range(3)]
    parts = {fc1: [torch.arange(80)], qkv: three if split else [torch.arange(96)]}
    for name, pieces in parts.items():
        mean = 0.1 * optimizer.layout.gradients.grads[name]
        for rows_of in pieces:
            expected = before[name][rows_of] - 0.01 * update_of(mean[rows_of])
            assert difference(expected, model.get_parameter(name).detach()[rows_of]) < 1e-12, name


MATRIX_SHAPES = [(7, 7), (5, 9), (9, 5), (12, 1)]


def matrix(rows, columns):
    return torch.randn(
        rows, columns, generator=torch.Generator().manual_seed(rows), dtype=torch.float64
    )


def by_svd(value, kind, num_steps):
    """The polynomials applied to singular values: a s + b s^3 + c s^5, step by step."""
    left, singular, right = torch.linalg.svd(
        value / value.square().sum().sqrt(), full_matrices=False
    )
    for a, b, c in STEPS[kind](num_steps):
        singular = a * singular + b * singular**3 + c * singular**5
    return left @ singular.diag() @ right


@pytest.mark.parametrize("shape", MATRIX_SHAPES)
@pytest.mark.parametrize("kind, num_steps", [("simple", 1), ("quintic", 7), ("polar_express", 10)])
def test_every_singular_value_goes_through_the_polynomials(shape, kind, num_steps):
    """Float64; a step may enlarge a rounding error by its slope, at most 8.3."""
    value = matrix(*shape)
    found = orthogonalize(value, STEPS[kind](num_steps))
    torch.testing.assert_close(found, by_svd(value, kind, num_steps), rtol=1e-9, atol=1e-10)


def test_a_matrix_of_zeros_stays_one_and_a_tiny_one_is_scaled_up():
    assert not orthogonalize(torch.zeros(3, 5), QUINTIC).any()
    value = matrix(3, 5)
    torch.testing.assert_close(orthogonalize(value * 1e-6, QUINTIC), orthogonalize(value, QUINTIC))


class Split(nn.Module):
    """A matrix split by rows and one split by columns over 2 ranks."""

    def __init__(self, parallel):
        super().__init__()
        for dim, name in enumerate(("by_rows", "by_columns")):
            shard = matrix(8, 12).chunk(2, dim)[parallel.tp_rank].contiguous()
            spec = ParameterSpec(global_shape=(8, 12), tp_dim=dim, matrices=(1,))
            self.register_parameter(name, mark(nn.Parameter(shard), spec))


@pytest.mark.parametrize("mode", ["duplicated", "blockwise"])
def test_over_tp_ranks_the_whole_matrix_or_each_block_is_orthogonalized(mode):
    """Blocks are matrices of their own, with scales of their own, as in Megatron."""
    config = OptimizerConfig(**HIGH, muon_tp_mode=mode)

    def work(parallel):
        """By name the change of this rank's shard in a step of size 1, whose gradient is the
        weight."""
        model = Split(parallel)
        optimizer = Optimizer(model, config, parallel)
        before = state_of(model, optimizer)
        sum(value.square().sum() / 2 for value in model.parameters()).backward()
        optimizer.step(1.0)
        return {name: before[name] - value.detach() for name, value in model.named_parameters()}

    updates = on_ranks(work, 2, tp_size=2, detail=False)
    for dim, name in enumerate(("by_rows", "by_columns")):
        blocks = matrix(8, 12).chunk(1 if mode == "duplicated" else 2, dim)
        expected = torch.cat([*map(update_of, blocks)], dim)
        found = torch.cat([update[name] for update in updates], dim)
        assert difference(expected, found) < 1e-12, name


@pytest.mark.runs
@pytest.mark.parametrize("saved, loaded", [("adam", "muon"), ("muon", "adam")])
def test_states_of_the_other_rule_are_refused_and_may_be_left_behind(saved, loaded, tmp_path):
    def config_of(rule, **checkpoint):
        return tiny_run(train_iters=2, eval_iters=0, optimizer=rule, **checkpoint)

    run_to_end(config_of(saved, save=tmp_path))
    with pytest.raises(
        InputError,
        match=f"iter_0000002 holds the optimizer states of --optimizer {saved}, from which "
        f"--optimizer {loaded} cannot go on: give --optimizer {saved}, or --no-load-optim",
    ):
        run_to_end(config_of(loaded, load=tmp_path))
    for options in (dict(no_load_optim=True), dict(finetune=True)):
        trainer = run_to_end(config_of(loaded, load=tmp_path, **options))
        assert trainer.optimizer.num_updates == (0 if "no_load_optim" in options else 2)
