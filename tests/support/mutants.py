"""A fault put back into the product, and the test that must then fail."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch

from megatron_lite.parallel.rng import RngStreams


class Mutant(NamedTuple):
    """fault: puts it back with the given MonkeyPatch. arguments: the test's parameters, its fixtures aside.

    error: part of the message, where the test fails by an error of torch or of a rank and not by its own assertion.
    """

    fault: Callable[[pytest.MonkeyPatch], None]
    test: Callable[..., None]
    arguments: Mapping[str, Any] = {}
    error: str = ""

    @property
    def name(self) -> str:
        return f"{self.fault.__name__}-{self.test.__name__}"


def assert_seen(mutant: Mutant, monkeypatch: pytest.MonkeyPatch, **more_fixtures: Any) -> None:
    """The test fails while the fault is in force. Ranks that it forks inherit the fault."""
    fixtures = {"rng": RngStreams(torch.device("cpu"), seed=3), "monkeypatch": monkeypatch, **more_fixtures}
    wanted = {name: value for name, value in fixtures.items() if name in inspect.signature(mutant.test).parameters}
    mutant.fault(monkeypatch)
    failure = RuntimeError if mutant.error else (AssertionError, pytest.fail.Exception)
    with pytest.raises(failure, match=mutant.error or None):
        mutant.test(**wanted, **mutant.arguments)
