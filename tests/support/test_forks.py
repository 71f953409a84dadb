"""Tests of forks: the status tells how the function ended, and nothing of the test runs in it."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from tests.support.forks import leave, status_of_fork


def test_the_status_is_that_of_the_function() -> None:
    assert status_of_fork(lambda: None) == 0
    assert status_of_fork(lambda: 3) == 3
    assert status_of_fork(lambda: sys.exit(4)) == 4
    assert status_of_fork(lambda: sys.exit("text")) == 1
    assert status_of_fork(lambda: leave(7)) == 7
    assert status_of_fork(lambda: os.kill(os.getpid(), signal.SIGKILL)) == -signal.SIGKILL


def test_an_exception_is_told_and_does_not_reach_the_test(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fails() -> None:
        raise KeyError("inside")

    assert status_of_fork(fails) == 1
    assert "KeyError: 'inside'" in capfd.readouterr().err
