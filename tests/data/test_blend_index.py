"""The blend index in rows equals the rule as it is written, to the last bit of the errors."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.config.checks import InputError
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


@pytest.mark.parametrize(("warm_up", "few_rows"), [(0, 0), (0, 2), (4, 0), (16, 3)])
def test_rows_equal_the_loop(warm_up: int, few_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows without a warm-up begin with wrong counts in most cases, and are repaired."""
    small_rows(monkeypatch, warm_up=warm_up, few_rows=few_rows)
    random = np.random.RandomState(warm_up + few_rows)
    for _ in range(60):
        weights, size = drawn(random), int(random.randint(1, 700))
        found, expected = build_blend_index(weights, size), plain(weights, size)
        np.testing.assert_array_equal(found.dataset, expected.dataset, err_msg=str((weights, size)))
        np.testing.assert_array_equal(found.sample, expected.sample)
        assert (found.dataset.dtype, found.sample.dtype) == (np.int16, np.int64)


def test_a_wrong_guess_changes_nothing_but_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    small_rows(monkeypatch, warm_up=0, few_rows=2)
    random = np.random.RandomState(3)

    def wrong(shares: np.ndarray, starts: np.ndarray) -> np.ndarray:
        counts = random.randint(0, 9, size=(len(starts), len(shares))).astype(float)
        counts[:, 0] += starts - counts.sum(axis=1)
        return counts

    monkeypatch.setattr(blend_index, "_guessed", wrong)
    for _ in range(40):
        weights, size = drawn(random), int(random.randint(40, 400))
        for found, expected in zip(
            build_blend_index(weights, size), plain(weights, size), strict=True
        ):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.long
@pytest.mark.parametrize("case", range(20))
def test_many_blends_equal_megatrons_helper(case: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 blends each with short rows, and one with the rows as they are."""
    helpers = pytest.importorskip("megatron.core.datasets.helpers_cpp")
    random = np.random.RandomState(case)

    def agrees(weights: tuple[float, ...], size: int) -> None:
        datasets, samples = np.zeros(size, np.int16), np.zeros(size, np.int64)
        helpers.build_blending_indices(
            datasets, samples, np.array(weights), len(weights), size, False
        )
        found = build_blend_index(weights, size)
        np.testing.assert_array_equal(found.dataset, datasets, err_msg=str((weights, size)))
        np.testing.assert_array_equal(found.sample, samples)

    agrees(drawn(random), 300_000 + int(random.randint(99_999)))
    small_rows(monkeypatch, warm_up=4 * (case % 3), few_rows=case % 4)
    for _ in range(200):
        agrees(drawn(random), int(random.randint(1, 2000)))


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


def test_a_cache_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    kept = partial(kept_blend_index, [1.0], 20, keep_from=10)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--data-cache-path .*file cannot be used"):
        kept(data_cache_path=str(tmp_path / "file"), prefix="no/use")
    kept(data_cache_path=None, prefix=str(tmp_path / "file" / "data"))
