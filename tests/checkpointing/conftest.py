"""Fixtures of the tests of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.starts import Saved, saved_model


@pytest.fixture(scope="module")
def saved() -> Iterator[Saved]:
    with saved_model() as found:
        yield found
