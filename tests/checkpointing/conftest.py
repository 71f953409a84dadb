"""Fixtures of the tests of checkpoints."""

import pytest

from tests.support.starts import saved_model


@pytest.fixture(scope="module")
def saved():
    with saved_model() as found:
        yield found
