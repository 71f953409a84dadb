"""Policies that keep the results of operators: exactly the others run again, nothing that cannot be
kept is, and the replay is the forward. Gradients of whole models: test_equality.py. Bytes and
FLOPs: tests/memory/."""

from collections import Counter

import pytest
import torch

from megatron_lite.config.checks import InputError
from megatron_lite.config.policy import GROUPS, IN_GROUPS
from megatron_lite.memory.measure.live_storages import LiveStorages
from megatron_lite.parallel import collectives
from megatron_lite.recompute.hooked import How, rebuild_saved
from megatron_lite.recompute.layer_runner import run_layers
from megatron_lite.recompute.ops import KeptResults, find_operators
from megatron_lite.recompute.phase import is_recomputing
from megatron_lite.recompute.replay import RecomputeMismatch
from megatron_lite.tensor_parallel import grouped_linear  # noqa: F401
from tests.support.collectives import recorded_collectives
from tests.support.dispatch import Dispatches
from tests.support.models import plan_of, tp_state
from tests.support.odd_layers import Block, Model, assert_changes_nothing, step
from tests.support.planned import NUM_LAYERS, loss_of, planned
from tests.support.ranks import RankFailure, run_ranks
from tests.support.storages import addresses

FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def rebuilt(function, *args, **how):
    return rebuild_saved(function, args, {}, How(**how))


class Dispatched(Dispatches):
    """The operators that run, in order, each with whether it is part of a replay."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def saw(self, func, args, kwargs, results):
        self.seen.append((str(func), is_recomputing()))

    def replayed(self, names):
        """How often operators of these names ran in replays."""
        found = Counter(name.split(".")[1] for name, again in self.seen if again)
        return Counter({name: found[name] for name in names if found[name]})


MATMULS = ("addmm", "mm", "baddbmm", "bmm", FLASH)


@pytest.mark.runs(daily=4, ci=8)
@pytest.mark.parametrize(
    "backend, policy, per_layer",
    [
        ("flash", "ops(matmul,attention)", {}),
        ("flash", "ops(matmul)", {FLASH: 1}),
        ("flash", "ops(attention)", {"addmm": 3}),
        ("flash", "ops(matmul/2,attention)", {"addmm": 1}),  # qkv and fc1 are kept, proj is not
        ("flash", "ops(aten.mm.default)", {"addmm": 3, FLASH: 1}),  # a linear with bias is no mm
        ("unfused", "ops(matmul)", {}),
        ("unfused", "ops(attention)", {"addmm": 3, "baddbmm": 1, "bmm": 1}),
        ("unfused", "ops(matmul/2)", {"addmm": 1, "baddbmm": 1}),  # kept: qkv, weights x value, fc1
    ],
)
def test_backward_runs_again_exactly_what_is_not_kept(backend, policy, per_layer):
    """With biases. The last matmul of a layer is never run again: backward does not read its
    result."""
    model = planned(
        f"0,2:{policy};1:none", attention_backend=backend, hidden_dropout=0.1, squared_relu=True
    )
    loss = loss_of(model)
    with Dispatched() as backward:
        loss.backward()
    assert backward.replayed(MATMULS) == Counter(
        {name: 2 * count for name, count in per_layer.items()}
    )
    assert backward.replayed(("native_layer_norm", "relu")) == {"native_layer_norm": 4, "relu": 2}


# Collectives


def collectives_of_a_step(rank, world_size, policy, sequence_parallel):
    """What the replays send, what the layers' forwards dispatch while results may be kept, and what
    is kept of it."""
    watched, kept = [], []
    keeps = KeptResults.keeps

    def noted(self, operator, args, kwargs):
        decision = keeps(self, operator, args, kwargs)
        watched.append(str(operator))
        kept.extend(watched[-1:] * decision)
        return decision

    with tp_state(world_size) as parallel, pytest.MonkeyPatch.context() as patch:
        patch.setattr(KeptResults, "keeps", noted)
        settings = dict(parallel=parallel, sequence_parallel=sequence_parallel, hidden_dropout=0.1)
        loss, loss_again = (loss_of(planned(one, **settings)) for one in (policy, "*:none"))
        with recorded_collectives() as sent:
            loss.backward()
        with recorded_collectives() as expected:
            loss_again.backward()
    return Counter(sent) - Counter(expected), watched, kept


@pytest.mark.runs
@pytest.mark.parametrize(
    "sequence_parallel, again",
    [(False, {"allreduce_": 1}), (True, {"_allgather_base_": 2, "_reduce_scatter_base_": 1})],
)
def test_collectives_are_kept_rather_than_repeated_where_the_policy_names_them(
    sequence_parallel, again
):
    """Repeated are, in each layer: the gathers before qkv and fc1, the sum after proj; that after
    fc2 is the tail."""
    for repeated, watched, kept in run_ranks(
        collectives_of_a_step, 2, "*:ops(matmul,collective)", sequence_parallel
    ):
        # What a collective returns that writes in place is no tensor, and what it writes is not
        # seen: kept or not, it would spoil what was kept before it.
        assert any(name.startswith("_c10d_functional.") for name in watched)
        assert not [name for name in watched if name.startswith("c10d.")]
        assert repeated == {} and sum(
            name.startswith("_c10d") for name in kept
        ) == NUM_LAYERS * sum(again.values())
    for repeated, _, _ in run_ranks(collectives_of_a_step, 2, "*:ops(matmul)", sequence_parallel):
        by_name = Counter(sent.name for sent in repeated.elements())
        assert by_name == {name: NUM_LAYERS * count for name, count in again.items()}


def test_an_in_place_sum_is_an_error_where_results_are_kept():
    def work(rank, world_size):
        with tp_state(world_size) as parallel:
            rebuilt(
                lambda x: collectives.all_reduce_(x * 2, parallel.tp_group),
                torch.ones(3, requires_grad=True),
                results=KeptResults(("matmul",), skip_tail=False),
                rng=parallel.rng,
            )

    with pytest.raises(RankFailure, match="does not see what a collective writes in place"):
        run_ranks(work, 2)


# What cannot be kept


@pytest.mark.parametrize(
    "kernel", [kernel for kernel in GROUPS["attention"] if kernel.startswith("aten.")]
)
def test_an_attention_kernel_is_not_kept_where_it_draws_its_dropout(kernel):
    results = KeptResults(("attention/2",), skip_tail=True)
    (operator,) = (one for one, name in find_operators((kernel,)).items() if name == kernel)
    position = [argument.name for argument in operator._schema.arguments].index("dropout_p")
    before = [None] * position
    assert not results.keeps(operator, (*before, 0.1), {})
    assert not results.keeps(operator, (), {"dropout_p": 0.1})
    assert results.keeps(operator, (*before, 0.0), {})  # the first: those before did not count
    assert not results.keeps(operator, (), {})


@pytest.mark.parametrize(
    "name, message",
    [
        ("aten.nothing.default", "has no operator aten.nothing.default"),
        ("nobody.mm.default", "has no operator"),
        ("aten.mm.out", "writes into its argument"),
        ("aten.native_dropout.default", "aten.native_dropout.default.*draws random numbers"),
    ],
)
def test_operators_that_do_not_exist_or_write_are_refused_when_the_model_is_built(name, message):
    with pytest.raises(InputError, match=message):
        planned(f"1:ops(matmul,{name})")


def assert_gradients_are_plain(rng, function, after=torch.sum):
    """after: the loss that the caller makes of the function's result."""
    plain, other = (torch.ones(2, 2, requires_grad=True) for _ in range(2))
    after(function(plain)).backward()
    results = KeptResults(("matmul",), skip_tail=False)
    after(rebuilt(function, other, results=results, rng=rng)).backward()
    assert torch.equal(plain.grad, other.grad)


def test_a_result_that_is_written_to_later_or_after_the_layer_is_made_again(rng):
    assert_gradients_are_plain(rng, lambda x: torch.mm(x, x).mul_(2).sin())
    assert_gradients_are_plain(
        rng, lambda x: torch.mm(x.sin(), x.T), lambda result: result.add_(1).square().sum()
    )


def test_a_result_of_inference_may_be_kept_on_the_host():
    class Infers(Block):
        def forward(self, hidden):
            with torch.inference_mode():
                scale = self.first(hidden).sum().item()
            return self.body(hidden) * scale

    assert_changes_nothing(lambda: Model(Infers), "*:ops(matmul)@host", step)


def test_the_groups_hold_every_fused_attention_kernel_of_this_torch():
    # not fused; of no device here
    apart = {"_scaled_dot_product_attention_math", "_scaled_dot_product_attention_math_for_mps"}
    names = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::_scaled_dot_product")
        and "backward" not in name
        and "." not in name
    }
    ours = {  # with a window, and of all ranks
        "aten._flash_attention_forward.default",
        "megatron_lite.context_parallel_attention.default",
    }
    assert {f"aten.{name}.default" for name in names - apart} | ours == set(GROUPS["attention"])
    assert set(find_operators(tuple(GROUPS)).values()) == IN_GROUPS


# The replay


def test_a_run_that_verifies_finds_what_is_rebuilt_otherwise_beside_kept_results(rng):
    calls = []

    def layer(x, regions):
        calls.append(is_recomputing())
        product = regions.run("mlp", lambda one, _: torch.mm(one, one), x)
        return regions.run("core_attn", lambda one, _: (one + len(calls) - 1).sin(), product)

    plan = plan_of("*:ops(matmul)", 1, recompute_verify=True)
    output = run_layers(plan, [layer], torch.eye(3).requires_grad_(), rng=rng, tp_group=None)
    with pytest.raises(RecomputeMismatch, match="layer 0, core_attn: tensor 0"):
        output.sum().backward()
    assert calls == [False, True]


def test_nothing_kept_or_rebuilt_outlives_the_backward():
    model = planned("*:ops(matmul,attention)", attention_backend="flash", hidden_dropout=0.1)
    with LiveStorages() as live:
        loss = loss_of(model)
        loss.backward()
    assert live.bytes_beside(addresses([loss, *(one.grad for one in model.parameters())])) == 0
