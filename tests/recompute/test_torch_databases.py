"""Every differentiable operator and every module of torch as a layer, from torch's own databases.

`torch.testing._internal` has sample inputs of each. Several steps of such a layer under a policy
are equal to the plain ones to the bit, or plain torch refuses them too. `.ci/run` tries one sample
of every 24th operator and two of every 24th module under each policy, other ones under each. All of
them, as in the weekly run, take up to four minutes for each policy:

    FULL_GRIDS=1 python -m pytest tests/recompute/test_torch_databases.py
"""

import copy
import itertools
import os
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from megatron_lite.recompute.apply import apply_policy_
from tests.support.dispatch import Dispatches
from tests.support.odd_layers import EACH_KIND
from tests.support.pairs import FULL_GRIDS

# torch's own tests need this package, and its databases import it.
pytest.importorskip("expecttest")

ALL = FULL_GRIDS or os.environ.get("TORCH_DATABASES") == "all"
# These do not repeat themselves in plain torch: memory that no kernel sets, or a choice of threads.
NOT_REPEATABLE = frozenset({
    "empty_like", "new_empty", "new_empty_strided", "empty", "empty_permuted", "empty_strided",
    "linalg.lstsq",
})  # fmt: skip


class Operator(nn.Module):
    """A layer that is one operator."""

    def __init__(self, op):
        super().__init__()
        self.op = op

    def forward(self, *args, **kwargs):
        """Returns the operator's result. Its arguments are no leaves, as in a model."""
        args, kwargs = tree_map(_no_leaf, (args, kwargs))
        return self.op(*args, **kwargs)


def _no_leaf(value):
    if isinstance(value, Tensor) and value.requires_grad and value.is_floating_point():
        return value * 1.0
    return value


def by_turns(entries, policy):
    turn = EACH_KIND.index(policy)
    return entries if ALL else entries[turn * 6 :: 24]


def operators(policy):
    # late, since the import takes four seconds
    from torch.testing._internal.common_methods_invocations import op_db

    for op in by_turns(op_db, policy):
        if not op.supports_autograd or torch.float32 not in op.dtypes or op.name in NOT_REPEATABLE:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(1)
            samples = op.sample_inputs("cpu", torch.float32, requires_grad=True)
            samples = list(itertools.islice(samples, 6 if ALL else 1))
        for number, sample in enumerate(samples):
            name = f"{op.name}.{op.variant_test_name}#{number}"
            yield name, lambda op=op: Operator(op.op), (sample.input, *sample.args), sample.kwargs


def modules(policy, training):
    from torch.testing._internal.common_modules import module_db

    for info in by_turns(module_db, policy):
        torch.manual_seed(1)
        inputs = info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
        )
        for number, each in enumerate(inputs[: None if ALL else 2]):
            made, given = each.constructor_input, each.forward_input
            if given is None:
                continue

            def make(info=info, made=made):
                return info.module_cls(*made.args, **made.kwargs).train(training)

            name = f"{info.name}#{number} {'train' if training else 'eval'}"
            yield name, make, given.args, given.kwargs


def train(case, policy, mode=nullcontext):
    """Returns results, gradients and state after each step. mode: around each forward."""
    _, make, args, kwargs = case
    torch.manual_seed(2)
    model = nn.Module()
    model.layers = nn.ModuleList([make()])
    if policy is not None:
        apply_policy_(model, layers_fqn="layers", policy=policy)
    given = tree_map(_fresh, (args, kwargs))
    found = []
    for _ in range(4):
        with mode():
            result = model.layers[0](*given[0], **given[1])
        losses = [
            torch.view_as_real(each).sum() if each.is_complex() else each.square().sum()
            for each in tree_leaves(result)
            if isinstance(each, Tensor) and each.requires_grad and each.layout == torch.strided
        ]
        if losses:
            sum(loss.float() for loss in losses).backward()
        found += [loss.detach() for loss in losses]
    leaves = [each for each in tree_leaves(given) if isinstance(each, Tensor)]
    found += [each.grad for each in (*leaves, *model.parameters())]
    return found + [each.detach().clone() for each in (*leaves, *model.buffers())] + [torch.rand(1)]


def _fresh(value):
    if not isinstance(value, Tensor):
        return copy.deepcopy(value) if isinstance(value, torch.Generator) else value
    return value.detach().clone().requires_grad_(value.requires_grad)


def is_equal(one, other):
    if one is None or other is None or one.layout != torch.strided:
        return (one is None) == (other is None)
    return torch.equal(
        *(
            each.resolve_conj().nan_to_num() if each.is_floating_point() else each
            for each in (one, other)
        )
    )


def faults(cases, policy):
    lines = []
    # Under any mode, linear_cross_entropy of torch computes in another order.
    mode = Dispatches if "ops" in policy else nullcontext
    for case in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                plain, again = train(case, None, mode), train(case, None, mode)
            except Exception:
                continue
            if not all(map(is_equal, plain, again)):
                continue  # plain torch does not repeat it
            try:
                found = train(case, policy)
            except Exception as error:
                lines.append(f"{case[0]}: {type(error).__name__}: {str(error)[:300]}")
                continue
        if len(found) != len(plain) or not all(map(is_equal, plain, found)):
            lines.append(f"{case[0]}: silent")
    return lines


@pytest.mark.runs(daily=0)
@pytest.mark.parametrize("policy", EACH_KIND)
def test_operators_are_right(policy):
    assert faults(operators(policy), policy) == []


@pytest.mark.runs(daily=0, ci=4)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("policy", EACH_KIND)
def test_modules_are_right(policy, training):
    assert faults(modules(policy, training), policy) == []
