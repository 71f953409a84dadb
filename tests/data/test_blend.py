import numpy as np
import pytest

from megatron_lite.config.checks import InputError
from megatron_lite.config.data_settings import DataConfig
from megatron_lite.data import blend
from megatron_lite.data.blend import BlendIndex, build_blend_index, kept_blend_index
from megatron_lite.data.data_paths import normalized, parse_data_path
from megatron_lite.data.datasets import build_datasets
from tests.support.corpora import written


def write(prefix, *, first_id, documents=20, length=11):
    starts = range(first_id, first_id + documents * length, length)
    return written(prefix, (range(start, start + length) for start in starts))


def write_two(folder, documents=20):
    """The second one has so many documents."""
    return write(folder / "a", first_id=0), write(folder / "b", first_id=500, documents=documents)


def build(*data_path, num_samples=(30, 4, 2), split="6,3,1"):
    return build_datasets(
        DataConfig(seq_length=5, data_path=data_path, split=split),
        vocab_size=1000,
        seed=3,
        num_samples=num_samples,
    )


@pytest.mark.parametrize(
    "words",
    [
        ("1", "a", "b", "2"),
        ("a", "1"),
        ("1", "2"),
        ("0", "a"),
        ("nan", "a"),
        ("1e308", "a", "1e308", "b"),
    ],
)
def test_a_bad_data_path_shows_itself(words):
    with pytest.raises(InputError, match="--data-path " + " ".join(words)):
        parse_data_path(words)


def test_without_weights_one_epoch_of_each_is_read_in_the_shares_of_the_sizes(tmp_path):
    """60 % of 20 and of 40 documents of 11 tokens, s=5: (132 - 1) // 5 = 26 and (264 - 1) // 5 = 52
    samples."""
    first, second = write_two(tmp_path, documents=40)
    for count in (156, 78):
        train = build(first, second, num_samples=(count, 0, 0)).train
        of_second = sum(int(train[number][0]) >= 500 for number in range(count))
        assert (len(train), of_second) == (count, 2 * count // 3)
    assert [*map(len, train.datasets)] == [26, 52]  # of one epoch, not of several


def test_a_blend_with_a_part_that_lacks_the_split_names_it(tmp_path):
    paths = write_two(tmp_path, documents=2)
    with pytest.raises(
        InputError,
        match=r"/b has no documents for the test split, .* set that share of --split to 0",
    ):
        build(*paths)


# --- the index ---


def plain(weights, size):
    counts = [0] * len(weights)
    dataset, sample = np.zeros(size, np.int16), np.zeros(size, np.int64)
    for n in range(size):
        errors = [weight * max(n, 1.0) - count for weight, count in zip(weights, counts)]  # noqa: B905
        dataset[n] = errors.index(max(errors))
        sample[n] = counts[dataset[n]]
        counts[dataset[n]] += 1
    return BlendIndex(dataset, sample)


def drawn(random):
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


@pytest.mark.parametrize("guess_is_wrong", [False, True])
@pytest.mark.parametrize("warm_up", [0, 4, 16])
def test_rows_equal_the_loop(warm_up, guess_is_wrong, monkeypatch):
    """Short rows without a warm-up begin with wrong counts in most cases, and are repaired. A wrong
    guess changes nothing but the time."""
    small = dict(WARM_UP=warm_up, SHORTEST_ROW=max(8, 2 * warm_up), FEWEST_ROWS=2)
    for name, value in small.items():
        monkeypatch.setattr(blend, name, value)
    random = np.random.RandomState(warm_up)

    def wrong(shares, starts):
        counts = random.randint(0, 9, size=(len(starts), len(shares))).astype(float)
        counts[:, 0] += starts - counts.sum(axis=1)
        return counts

    if guess_is_wrong:
        monkeypatch.setattr(blend, "_guessed", wrong)
    for _ in range(40):
        weights, size = drawn(random), int(random.randint(1, 700))
        for found, expected in zip(
            build_blend_index(weights, size), plain(weights, size), strict=True
        ):
            np.testing.assert_array_equal(found, expected, err_msg=str((weights, size)))
            assert found.dtype == expected.dtype


def test_a_large_blend_is_built_once_and_kept(tmp_path, monkeypatch):
    weights = normalized([3, 1, 2])

    def kept(size, shares=weights):
        return kept_blend_index(shares, size, data_cache_path=str(tmp_path / "c"), prefix="no/use")

    monkeypatch.setattr(blend, "KEPT_FROM", 100)
    first = kept(300)
    with monkeypatch.context() as patch:
        patch.setattr(blend, "build_blend_index", lambda *_, **__: pytest.fail("built again"))
        again = kept(300)
    for found in (first, again):
        np.testing.assert_array_equal(found, plain(weights, 300))
    kept(301)
    kept(300, normalized([3, 1, 2.0000001]))
    assert sum(path.is_dir() for path in (tmp_path / "c").iterdir()) == 3
    kept(99)
    assert sum(path.is_dir() for path in (tmp_path / "c").iterdir()) == 3


def test_a_blend_index_of_other_datasets_is_not_used(monkeypatch):
    weights = normalized([3, 1])
    good = build_blend_index(weights, 50)._asdict()
    monkeypatch.setattr(blend, "KEPT_FROM", 1)
    monkeypatch.setattr(blend, "kept_arrays", lambda *_, fault: {"dataset": fault, "sample": 0})
    fault = kept_blend_index(weights, 50, data_cache_path=None, prefix="").dataset
    assert fault(good) is None
    for change in (
        {"dataset": good["dataset"] + np.int16(1)},
        {"sample": good["sample"] - 1},
        {"sample": good["sample"] + 50},
        {"dataset": good["dataset"].astype(np.float32)},
        {"sample": good["sample"][:-1]},
        {"more": good["sample"]},
    ):
        assert fault({**good, **change}) is not None
