"""The blend index in rows equals the rule as it is written, to the last bit of the errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_lite.data import blend_index
from megatron_lite.data.blend_index import (
    BlendIndex,
    blend_index_fault,
    build_blend_index,
    kept_blend_index,
)
from megatron_lite.data.splits import normalized


def plain(weights: tuple[float, ...], size: int) -> BlendIndex:
    counts = [0] * len(weights)
    dataset, sample = np.zeros(size, np.int16), np.zeros(size, np.int64)
    for n in range(size):
        errors = [weight * max(n, 1.0) - count for weight, count in zip(weights, counts)]  # noqa: B905
        dataset[n] = errors.index(max(errors))
        sample[n] = counts[dataset[n]]
        counts[dataset[n]] += 1
    return BlendIndex(dataset, sample)


def drawn(random: np.random.RandomState) -> tuple[float, ...]:
    """Weights of one of seven kinds: equal, whole numbers, powers, tiny, huge, sparse, any."""
    number = int(random.randint(1, 13))
    kinds = (
        np.ones(number),
        random.randint(1, 20, size=number),
        2.0 ** -random.randint(0, 12, size=number),
        np.r_[1.0, 1e-9 + 1e-3 * random.random_sample(number)],
        np.r_[random.random_sample(number) + 0.1, 10.0 ** random.randint(0, 300)],
        random.dirichlet(np.full(number, 0.2)) + 1e-12,
        random.random_sample(number) + 1e-3,
    )
    return normalized(list(kinds[random.randint(len(kinds))]))


def small_rows(monkeypatch: pytest.MonkeyPatch, *, warm_up: int, few_rows: int) -> None:
    for name, value in {
        "LOOPED": 0,
        "HEAD": 4,
        "WARM_UP": warm_up,
        "SHORTEST_ROW": max(8, 2 * warm_up),
        "STEPS": 4,
        "FEW_ROWS": few_rows,
    }.items():
        monkeypatch.setattr(blend_index, name, value)


@pytest.mark.parametrize("guess_is_wrong", [False, True])
@pytest.mark.parametrize(("warm_up", "few_rows"), [(0, 0), (0, 2), (4, 0), (16, 3)])
def test_rows_equal_the_loop(
    warm_up: int, few_rows: int, guess_is_wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short rows without a warm-up begin with wrong counts in most cases, and are repaired. A wrong
    guess changes nothing but the time."""
    small_rows(monkeypatch, warm_up=warm_up, few_rows=few_rows)
    random = np.random.RandomState(warm_up + few_rows)

    def wrong(shares: np.ndarray, starts: np.ndarray) -> np.ndarray:
        counts = random.randint(0, 9, size=(len(starts), len(shares))).astype(float)
        counts[:, 0] += starts - counts.sum(axis=1)
        return counts

    if guess_is_wrong:
        monkeypatch.setattr(blend_index, "_guessed", wrong)
    for _ in range(40):
        weights, size = drawn(random), int(random.randint(1, 700))
        for found, expected in zip(
            build_blend_index(weights, size), plain(weights, size), strict=True
        ):
            np.testing.assert_array_equal(found, expected, err_msg=str((weights, size)))
            assert found.dtype == expected.dtype


def test_a_large_blend_is_built_once_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = normalized([3, 1, 2])

    def kept(size: int, shares: tuple[float, ...] = weights) -> BlendIndex:
        return kept_blend_index(
            shares, size, data_cache_path=str(tmp_path / "c"), prefix="no/use", keep_from=100
        )

    first = kept(300)
    with monkeypatch.context() as patch:
        patch.setattr(blend_index, "build_blend_index", lambda *_, **__: pytest.fail("built again"))
        again = kept(300)
    for found, other, expected in zip(first, again, plain(weights, 300), strict=True):
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(other, expected)
    kept(301)
    kept(300, normalized([3, 1, 2.0000001]))
    assert len([path for path in (tmp_path / "c").iterdir() if path.is_dir()]) == 3
    kept(99)
    assert len([path for path in (tmp_path / "c").iterdir() if path.is_dir()]) == 3


def test_a_blend_index_of_other_datasets_is_not_used() -> None:
    good = build_blend_index(normalized([3, 1]), 50)._asdict()
    assert blend_index_fault(good, 2, 50) is None
    for change in (
        {"dataset": good["dataset"] + np.int16(1)},
        {"sample": good["sample"] - 1},
        {"sample": good["sample"] + 50},
        {"dataset": good["dataset"].astype(np.int64)},
        {"sample": good["sample"][:-1]},
        {"more": good["sample"]},
    ):
        assert blend_index_fault({**good, **change}, 2, 50) is not None
