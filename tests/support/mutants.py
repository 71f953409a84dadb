"""Puts a fault into the product and checks that a test fails."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import pytest
import torch

from megatron_lite.parallel.rng import RngStreams


class Mutant(NamedTuple):
    """A fault, and the test that must fail with it.

    fault: puts the fault into the product, with the given MonkeyPatch.
    arguments: the test's parameters, without its fixtures.
    error: a part of the message, if the test fails by an error of torch or of a rank instead of its
        own assertion.
    long: whether only .ci/run runs the mutant.
    """

    fault: Callable[[pytest.MonkeyPatch], None]
    test: Callable[..., None]
    arguments: Mapping[str, Any] = {}
    error: str = ""
    long: bool = False

    @property
    def name(self) -> str:
        return f"{self.fault.__name__}-{self.test.__name__}"


def parameters(mutants: Iterable[Mutant]) -> list[Any]:
    """Returns the mutants as a test's parameters, with their names and marks."""
    return [
        pytest.param(mutant, id=mutant.name, marks=[pytest.mark.long] * mutant.long)
        for mutant in mutants
    ]


def assert_seen(mutant: Mutant, monkeypatch: pytest.MonkeyPatch, **more_fixtures: Any) -> None:
    """Asserts that the test fails with the fault. Ranks that the test forks inherit the fault."""
    fixtures = {
        "rng": RngStreams(torch.device("cpu"), seed=3),
        "monkeypatch": monkeypatch,
        **more_fixtures,
    }
    wanted = {
        name: value
        for name, value in fixtures.items()
        if name in inspect.signature(mutant.test).parameters
    }
    mutant.fault(monkeypatch)
    failure = RuntimeError if mutant.error else (AssertionError, pytest.fail.Exception)
    with pytest.raises(failure, match=mutant.error or None):
        mutant.test(**wanted, **mutant.arguments)
