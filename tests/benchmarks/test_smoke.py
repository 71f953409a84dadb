"""benchmarks/smoke.py: the best attempt counts, and only what no attempt reaches fails."""

from __future__ import annotations

import pytest

from benchmarks import smoke

PAIR = (smoke.OURS, smoke.PLAIN)


@pytest.mark.parametrize(
    ("attempts", "best"), [([1.0, 9.0], 1.0), ([1.2, 1.04, 9.0], 1.04), ([1.2, 1.3, 1.1], 1.1)]
)
def test_attempts_go_on_until_one_is_within_the_limit(
    attempts: list[float], best: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(attempts)
    monkeypatch.setattr(smoke, "ATTEMPTS", len(attempts))
    monkeypatch.setattr(smoke, "attempt", lambda _: dict.fromkeys(smoke.TIME_LIMITS, next(left)))
    assert smoke.best_attempts([])[PAIR] == best


@pytest.mark.parametrize(
    ("ratio", "fails"), [(1.04, False), (1.09, False), (1.11, True), (float("nan"), True)]
)
def test_a_ratio_fails_if_it_is_above_limit_and_margin(
    ratio: float, fails: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert smoke.told("time", {PAIR: ratio}, {PAIR: 1.05}, 0.05) is fails
    assert ("ABOVE" in capsys.readouterr().out) is fails
