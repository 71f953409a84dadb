"""Puts a fault into the product and checks that a test fails."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch

from megatron_lite.parallel.rng import RngStreams
from megatron_lite.training.step import TrainingError
from tests.support import pairs, ranks

Fault = Callable[[pytest.MonkeyPatch], None]
STATIC = (staticmethod, classmethod)


def replaces(name, *owners):
    """Makes a fault of a function: the function replaces what each owner has under this name.

        @replaces("depart", executor)
        def an_output_lives_until_its_backward(depart, output, fetch_grad): ...

        @replaces("ALIGNMENT", target)
        def tensors_begin_anywhere(alignment): return 1

    The function's first argument is the function that it replaces. The others are those of the
    call. What is no function is replaced by the result for it. The owners are modules, classes or
    dicts. A property stays a property.
    """

    def fault_of(function):
        @functools.wraps(function)
        def fault(patch):
            for owner in owners:
                if isinstance(owner, dict):
                    real = owner[name]
                    entry = functools.partial(function, real) if callable(real) else function(real)
                    patch.setitem(owner, name, entry)
                else:
                    patch.setattr(owner, name, _in_place_of(owner, name, function))

        return fault

    return fault_of


def _in_place_of(owner, name, function):
    """Returns the function, given the owner's function of this name, as an attribute like it.

    Of what is no function it returns the result for it.
    """
    held = inspect.getattr_static(owner, name)
    real = held.fget if isinstance(held, property) else getattr(owner, name)
    if not callable(real):
        return function(real)

    def replacement(*args, **kwargs):
        return function(real, *args, **kwargs)

    if isinstance(held, property):
        return property(replacement)
    return staticmethod(replacement) if isinstance(held, STATIC) else replacement


class Mutant(NamedTuple):
    """A fault, and the test that must fail with it.

    fault: puts the fault into the product, with the given MonkeyPatch.
    arguments: the test's parameters, without its fixtures.
    error: a part of the message, if the test fails by an error of torch or of a rank instead of its
        own assertion.
    """

    fault: Fault
    test: Callable[..., None]
    arguments: Mapping[str, Any] = {}
    error: str = ""

    @property
    def name(self):
        return f"{self.fault.__name__}-{self.test.__name__}"


SEEN = (AssertionError, TrainingError)  # stale memory may hold numbers that are not finite


def each_is_seen(mutants):
    """Returns a test that passes where each mutant's own test fails with its fault.

    It says nothing of the product, so that only .ci/run has it.

    Fixtures of the mutants' tests are those of the module that has the test: it imports them. Ranks
    that a test forks inherit the fault. A test that walks through a grid has the cases of a default
    run, in .ci/run too.
    """

    @pytest.mark.long
    @pytest.mark.parametrize("mutant", mutants, ids=lambda mutant: mutant.name)
    @pytest.mark.filterwarnings("ignore")
    def test_is_seen(mutant, monkeypatch, request):
        for module in (pairs, ranks):
            monkeypatch.setattr(module, "FULL_GRIDS", False)
        for mark in getattr(mutant.test, "pytestmark", ()):
            if mark.name == "skipif" and mark.args[0]:
                pytest.skip(mark.kwargs["reason"])
        fixtures = {
            name: RngStreams(torch.device("cpu"), seed=3)
            if name == "rng"
            else request.getfixturevalue(name)
            for name in inspect.signature(mutant.test).parameters
            if name not in mutant.arguments
        }
        mutant.fault(monkeypatch)
        failure = RuntimeError if mutant.error else (*SEEN, pytest.fail.Exception)
        with pytest.raises(failure, match=mutant.error or None):
            mutant.test(**fixtures, **mutant.arguments)

    return test_is_seen
