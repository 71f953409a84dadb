"""Layers of other kinds (compiled, scripted, wrapped by accelerate) and ways to differentiate."""

import sys
from _thread import start_new_thread
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial, update_wrapper
from threading import Event, current_thread

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from megatron_lite.recompute.apply import remove_policy_
from megatron_lite.recompute.hooked import Turns
from tests.support.odd_layers import EACH_KIND, Block, InOrder, Model, assert_equal, batches, put
from tests.support.torch_features import HAS_GRAD_DTYPE


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.batch_norm = nn.LayerNorm(6), nn.BatchNorm1d(6)
        self.linear = nn.Linear(6, 6)

    def forward(self, hidden):
        return self.linear(self.batch_norm(self.norm(hidden)))


def left_in(model):
    """Returns the gradients and the buffers."""
    return [*(each.grad for each in model.parameters()), *model.buffers()]


def gradients(model, given):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.zero_grad()
    for _ in range(3):
        model(given).square().sum().backward()
    found = [each.clone() for each in left_in(model)]
    model.load_state_dict(state)
    return found


def assert_right(model, policy, given, then=lambda model: None):
    expected = gradients(model, given)
    put(model, policy)
    then(model)
    assert_equal(gradients(model, given), expected)
    assert remove_policy_(model) == 2 and remove_policy_(model) == 0
    assert_equal(gradients(model, given), expected)


@pytest.mark.parametrize("policy", EACH_KIND)
def test_lazy_layers_train_as_without_a_policy(policy):
    def steps(policy):
        torch.manual_seed(1)
        model = InOrder(lambda: nn.Sequential(Normed(), nn.LazyLinear(6), nn.LazyBatchNorm1d()))
        put(model, policy)
        for _ in range(3):
            model(batches()[0]).square().sum().backward()
        return left_in(model)

    assert_equal(steps(policy), steps("*:none"))


class Branches(Normed):
    def forward(self, hidden):
        either = [lambda one: self.linear(one).sin()] * 2
        return torch.cond(hidden.sum() > 0, *either, (super().forward(hidden),))


@pytest.mark.runs
@pytest.mark.parametrize("policy", EACH_KIND)
def test_layers_that_are_compiled_modules_train_as_without_a_policy(policy):
    if "ops" in policy and not HAS_GRAD_DTYPE:
        pytest.skip("torch.cond of this torch refuses modes")
    for kind in (Branches, lambda: torch.compile(Normed(), backend="aot_eager")):
        assert_right(InOrder(kind), policy, batches()[0].requires_grad_())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, hidden):
        q, k, v = self.qkv(hidden).view(2, 5, 2, 12).transpose(1, 2).chunk(3, -1)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        return attended.transpose(1, 2).reshape(2, 5, 8)


def test_a_choice_of_attention_kernels_around_the_forward_is_that_of_the_replay():
    class Chosen(InOrder):
        def forward(self, hidden):
            with sdpa_kernel(SDPBackend.MATH):
                return super().forward(hidden)

    assert_right(Chosen(Attention), "*:full", torch.randn(2, 5, 8))


@pytest.mark.parametrize("policy", EACH_KIND)
def test_forward_mode_differentiation_is_that_of_the_plain_model(policy):
    """The tangent of the loss is differentiated once more, backward."""

    def derivatives():
        hidden = batches()[0].clone().requires_grad_()
        with forward_ad.dual_level():
            result = model(forward_ad.make_dual(hidden, torch.ones_like(hidden)))
            tangent = forward_ad.unpack_dual(result).tangent
            found = torch.autograd.grad(
                tangent.sum() + result.sum(), [hidden, *model.parameters()], allow_unused=True
            )
        functional = torch.func.jvp(model, (hidden.detach(),), (torch.ones_like(hidden),))[1]
        return [tangent.detach(), *found, functional.detach()]

    model = InOrder(Normed).eval()
    expected = derivatives()
    put(model, policy)
    with pytest.warns(UserWarning, match="jvp"):
        found = derivatives()
    assert_equal(found, expected)


@pytest.mark.parametrize("policy", EACH_KIND)
def test_a_frozen_layer_has_the_kernel_that_it_has_without_a_policy(policy):
    """One for inference alone, which takes nested tensors."""
    layer = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval().requires_grad_(False)
    mask = torch.ones(2, 5).triu(3).bool()
    masked = partial(model, torch.randn(2, 5, 6), src_key_padding_mask=mask)
    expected = masked()
    put(model, policy)
    assert_equal([masked(), masked()], [expected] * 2)
    with pytest.raises(AttributeError, match=r"layers.0 has .* call remove_policy_\(model\) first"):
        torch.jit.script(model)


def summed(model, given):
    return model(given).square().sum()


def under_func(model):
    given, weights = batches()[0], {name: each.detach() for name, each in model.named_parameters()}

    def loss(weights, given):
        return torch.func.functional_call(model, weights, (given,)).square().sum()

    each = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, given[:, None])
    return [*each.values(), torch.func.jacrev(partial(summed, model))(given)]


class Inner(Normed):
    def forward(self, hidden):
        return hidden + torch.func.grad(lambda one: self.linear(one).square().sum())(hidden)


@pytest.mark.parametrize("policy", EACH_KIND)
def test_a_gradient_inside_a_layer_is_refused_with_the_reason(policy):
    model = InOrder(Inner)
    put(model, policy)
    with pytest.raises(RuntimeError, match=r"runs torch.func.grad or its like.* out of the policy"):
        model(batches()[0])


def under_vmap(model):
    torch.vmap(partial(summed, model))(torch.stack(batches()[:2])).sum().backward()


def traced(model):
    summed(torch.jit.trace(model, batches()[0], check_trace=False), batches()[1]).backward()


def in_one_graph(model):
    one = batches()[0]
    return make_fx(lambda x: torch.autograd.grad(summed(model, x), [*model.parameters()]))(one)(one)


def inside_a_checkpoint(model):
    """Which runs the layers again in the middle of their own replays."""
    model.train()
    given = batches()[0].requires_grad_()
    checkpoint(partial(summed, model), given, use_reentrant=False).backward()


def with_other_threads_in_backward(model):
    threads, result = torch.get_num_threads(), summed(model.train(), torch.randn(999, 6))
    try:
        torch.set_num_threads(threads + 1)
        result.backward()
    finally:
        torch.set_num_threads(threads)


def under_a_default_device(model):
    with torch.device("cpu"):
        result = summed(model.train(), batches()[0])
    result.backward()


def without_values_first(model):
    """A call on fake tensors, or of a copy on the meta device, teaches nothing about the next."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        summed(model.train(), torch.empty(4, 6)).backward()
    summed(deepcopy(model).to("meta"), torch.empty(4, 6, device="meta")).backward()
    model.zero_grad()
    for given in batches()[:2]:
        summed(model, given).backward()


@pytest.mark.runs(daily=3, ci=9)
@pytest.mark.filterwarnings("ignore:Under a transform of torch", "ignore::DeprecationWarning")
@pytest.mark.parametrize("policy", EACH_KIND)
@pytest.mark.parametrize(
    "way",
    [
        under_func,
        under_vmap,
        traced,
        in_one_graph,
        inside_a_checkpoint,
        with_other_threads_in_backward,
        under_a_default_device,
        without_values_first,
    ],
)
def test_the_way_of_a_call_changes_no_bit(way, policy):
    found = []
    for each in ("*:none", policy):
        torch.manual_seed(1)
        model = InOrder(Normed).eval()
        put(model, each)
        found.append([*(way(model) or ()), *left_in(model)])
    assert_equal(*found)


def hooked_like_accelerate(model):
    def forward(module, *args, **kwargs):
        return module._old_forward(*args, **kwargs)

    for layer in model.layers:
        layer._old_forward = layer.forward
        layer.forward = update_wrapper(partial(forward, layer), layer.forward)
    with pytest.raises(ValueError, match="have a recompute policy already"):
        put(model, "*:full")


def test_a_policy_is_found_and_removed_under_another_librarys_wrapper():
    assert_right(InOrder(Normed), "*:full", batches()[0], hooked_like_accelerate)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *parts):
        ctx.save_for_backward(*(part * 1.0 for part in parts))
        return sum(parts)

    @staticmethod
    def backward(ctx, grad):
        return tuple(grad * ctx.saved_tensors[number] for number in range(4))


def test_a_function_that_reads_its_saved_tensors_again_costs_no_replay_each(capsys):
    class Sums(Block):
        def forward(self, hidden):
            print(1)  # no replay undoes it
            hidden = self.body(hidden)
            return _Sum.apply(hidden, 2 * hidden, 3 * hidden, 4 * hidden)

    model = Model(Sums)
    put(model, "*:full")
    counts = []
    for _ in range(3):
        model(batches()[0]).backward()
        counts.append(len(capsys.readouterr().out.split()))
    assert counts == [3 + 2 * 3, 3 + 3, 3 + 3]  # the first one finds out


def test_a_thread_of_autograd_needs_no_turn_though_it_has_written_to_a_log():
    turns, is_through = Turns(), Event()

    def work():
        current_thread()  # as a log does
        with turns.taken():
            is_through.set()

    with turns.taken():
        start_new_thread(work, ())
        assert is_through.wait(10.0)


@pytest.mark.parametrize("policy", ["*:full", "*:none@host"])
def test_threads_take_turns(policy, request):
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)

    def losses(model):
        def train(batch):
            for _ in range(50):
                found = torch.autograd.grad(model(batch), [*model.parameters()])
            return torch.stack([each.norm() for each in found])

        with ThreadPoolExecutor(3) as pool:
            return [*pool.map(train, batches())]

    torch.manual_seed(3)
    model = Model(Block).eval()
    expected = losses(model)
    put(model, policy)
    assert_equal(losses(model), expected)
