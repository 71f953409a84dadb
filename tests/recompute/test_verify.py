"""--recompute-verify: a replay that differs from its forward in whichever way raises an error that
says where; no other does."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.parallel.rng import TENSOR_PARALLEL, RngStreams
from megatron_lite.recompute import checkpoint as engine
from megatron_lite.recompute.checkpoint import Record, checkpoint
from megatron_lite.recompute.phase import is_recomputing
from megatron_lite.recompute.replay import RecomputeMismatch
from megatron_lite.recompute.schedule import plan_stage
from tests.support.models import build_tiny_model, tiny_config, tp_state
from tests.support.planned import NUM_LAYERS, loss_of, planned
from tests.support.ranks import run_ranks

UNITS_OF_TWO = "*:full/2"


def gpt(policy, *, check=True):
    """Returns a GPT of three layers with dropout; its plan verified, or not."""
    recompute = RecomputeConfig(recompute_policy=policy, recompute_verify=check)
    return planned(recompute, hidden_dropout=0.1, attention_dropout=0.1)


def mismatch(model, between=lambda: None):
    """The message of the error that a step raises. between: done after forward."""
    loss = loss_of(model)
    between()
    with pytest.raises(RecomputeMismatch) as caught:
        loss.backward()
    return str(caught.value)


def refused(rng, function, message, place="layer 4, mlp", size=3):
    """Runs a recorded function of a leaf forward and backward. The replay is refused."""
    leaf = torch.ones(size, requires_grad=True)
    output = checkpoint(Record(place, rng).recorded(function), leaf, rng=rng)
    with pytest.raises(RecomputeMismatch, match=message):
        output.sum().backward()


REBUILT = "a replay is not what its forward was at "
HIDDEN, HEADS = [12, 3, 32], [12, 3, 24]


@pytest.mark.parametrize(
    "policy, weight, message",
    [
        (
            "*:layernorm",
            "decoder.layers.1.input_layernorm.weight",
            f"layer 1, layernorm, output: tensor 0 {HIDDEN} differs",
        ),
        (
            "*:mlp",
            "decoder.layers.0.mlp.linear_fc1.bias",
            f"layer 0, mlp, output: tensor 0 {HIDDEN} differs",
        ),
        (
            UNITS_OF_TWO,
            "decoder.layers.1.self_attention.linear_qkv.weight",
            f"layer 1, core_attn: tensor 0 {HEADS} differs",
        ),
        (
            UNITS_OF_TWO,
            "decoder.layers.1.mlp.linear_fc2.weight",
            f"layer 1, mlp: tensor 0 {HIDDEN} differs",
        ),
    ],
)
def test_a_weight_changed_after_forward_is_found_at_the_first_region_that_reads_it(
    policy, weight, message
):
    model = gpt(policy)
    parameter = dict(model.named_parameters())[weight]
    assert mismatch(model, lambda: parameter.data.mul_(1.5)).startswith(REBUILT + message)


def test_a_mask_redrawn_from_other_numbers_is_found(monkeypatch):
    monkeypatch.setattr(RngStreams, "drawn_from", lambda self, state: nullcontext())
    assert mismatch(gpt("*:dropout")).startswith(
        f"{REBUILT}layer 2, dropout, output: tensor 0 {HIDDEN} of torch.bool differs"
    )


def test_a_draw_outside_the_streams_is_found_and_the_streams_are_cleared(rng):
    private = torch.Generator()
    message = r"at layer 4, mlp, output: tensor 0 \[3\] differs .*; no RNG stream differs"
    refused(rng, lambda hidden: hidden * torch.rand(3, generator=private), message)


def test_a_replay_that_draws_more_is_found_though_it_returns_the_same(rng):
    calls = []

    def function(hidden):
        calls.append(1)
        with rng.fork(TENSOR_PARALLEL):
            torch.rand(len(calls))
        return hidden * 2

    message = "the tensors agree; RNG stream tensor_parallel at layer 4, mlp, output stood else"
    refused(rng, function, message)


class _Averaging(nn.Module):
    """Keeps a running mean, which its output depends on: each run changes it."""

    def __init__(self, activate):
        super().__init__()
        self.activate = activate
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, hidden):
        with torch.no_grad():
            self.mean.copy_(0.9 * self.mean + 0.1 * hidden.mean())
        return self.activate(hidden) - self.mean


@pytest.mark.parametrize("policy", ["*:activation", "*:mlp", UNITS_OF_TWO])
def test_a_buffer_that_a_region_changes_is_found(policy):
    model = gpt(policy)
    mlp = model.decoder.layers[1].mlp
    vars(mlp)["_activate"] = _Averaging(mlp._activate)
    assert mismatch(model).startswith(REBUILT + "layer 1, ")


def test_another_shape_or_path_is_found(rng):
    runs = []

    def function(hidden):
        runs.append(1)
        return (hidden * 2)[: 3 - len(runs)]

    message = r"took another path: layer 0, output: tensor 0 \[2\] in forward, .* 0 \[1\] in"
    refused(rng, function, message, "layer 0", size=2)

    def branching(hidden):
        runs.append(1)
        if len(runs) > 3:
            record.see("inside", hidden)
        return hidden * 2

    record = Record("layer 1", rng)
    output = checkpoint(record.recorded(branching), torch.ones(2, requires_grad=True), rng=rng)
    with pytest.raises(RecomputeMismatch, match="another path: layer 1, output.* inside: tensor"):
        output.sum().backward()


def _wrong_gather(rank, world_size):
    start = engine.start_all_gather_first_dim
    recompute = RecomputeConfig(recompute_policy="*:full/2@split", recompute_verify=True)
    plan = plan_stage(recompute, NUM_LAYERS)
    with tp_state(world_size) as parallel, pytest.MonkeyPatch.context() as patch:
        model = build_tiny_model(
            tiny_config(num_layers=NUM_LAYERS), parallel, dtype=torch.float32, plan=plan
        )
        patch.setattr(
            engine,
            "start_all_gather_first_dim",
            lambda shard, group: start(shard.roll(1, 0) if group.rank() else shard, group),
        )
        return mismatch(model)


def test_a_wrong_gather_is_found_at_the_units_input_on_every_rank():
    assert all(
        message.startswith(f"{REBUILT}layer 2, input: tensor 0 {HIDDEN} differs")
        for message in run_ranks(_wrong_gather, 2)
    )


@pytest.mark.runs(ci=3)
@pytest.mark.parametrize(
    "policy", [UNITS_OF_TWO, "*:core_attn+layernorm+activation+dropout", "*:layernorm+mlp"]
)
def test_where_all_is_well_nothing_is_raised_and_no_gradient_changes(policy):
    def grads(policy, check):
        model = gpt(policy, check=check)
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss.backward()
        loss_of(model).backward()  # another micro-batch
        return [parameter.grad for parameter in model.parameters()]

    assert all(map(torch.equal, grads(policy, True), grads("*:none", False)))


LOST = {
    "detached": torch.Tensor.detach,
    "half": lambda tensor: torch.where(tensor > 0, tensor, tensor.detach()),
    "another operation": lambda tensor: tensor * 1,
}


def _lose(model, what, change):
    """Makes a replay of layer 1 build another graph with the same values."""
    layer = model.decoder.layers[1]
    owner, name = {
        "a norm's output": (layer.pre_mlp_layernorm, "normalize"),
        "the activation": (layer.mlp, "_activate"),
        "the residual": (layer, "forward"),
        "a linear layer": (layer.mlp.linear_fc1, "forward"),
    }[what]
    real = getattr(owner, name)

    def lose(tensor):
        return change(tensor) if is_recomputing() else tensor

    def losing(hidden, *rest, **named):
        if what == "the residual":
            return real(lose(hidden), *rest)
        outputs = real(hidden, *rest, **named)
        if isinstance(outputs, tuple):
            return (lose(outputs[0]), *outputs[1:])
        return lose(outputs)

    vars(owner)[name] = losing


@pytest.mark.runs(daily=8, ci=16)
@pytest.mark.parametrize("change", LOST)
@pytest.mark.parametrize(
    "what", ["a norm's output", "the activation", "the residual", "a linear layer"]
)
@pytest.mark.parametrize("policy", [UNITS_OF_TWO, "*:mlp+layernorm", "*:ops(matmul)"])
def test_an_edge_that_only_the_replay_lost_is_found(policy, what, change):
    """The values agree to the bit, and a gradient would be lost in silence."""
    model = gpt(policy)
    _lose(model, what, LOST[change])
    if "mlp" in policy and what == "the residual":
        loss_of(model).backward()  # it is outside of both regions, so no replay runs it
        return
    text = mismatch(model)
    if "ops" in policy:
        assert text.startswith((f"{REBUILT}layer 1, ", "layer 1: "))
        return
    assert ", its graph is not the forward's: " in text
    assert text.startswith((f"{REBUILT}unit of layers 0-1", f"{REBUILT}layer 1, "))
