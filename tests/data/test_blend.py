from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_lite.config.checks import InputError
from megatron_lite.config.data_settings import DataConfig
from megatron_lite.data.blend import BlendedDataset, parse_data_path, samples_to_request
from megatron_lite.data.blend_index import build_blend_index
from megatron_lite.data.datasets import Datasets, build_datasets
from megatron_lite.data.splits import normalized
from tests.support.corpora import written


def write(prefix: Path, *, first_id: int, documents: int = 20, length: int = 11) -> str:
    starts = range(first_id, first_id + documents * length, length)
    return written(prefix, (range(start, start + length) for start in starts))


def build(
    *data_path: str, num_samples: tuple[int, int, int] = (30, 4, 2), split: str = "6,3,1"
) -> Datasets:
    return build_datasets(
        DataConfig(seq_length=5, data_path=data_path, split=split),
        vocab_size=1000,
        seed=3,
        num_samples=num_samples,
    )


def test_a_blend_never_asks_a_part_for_more_than_it_requests() -> None:
    random = np.random.RandomState(0)
    for _ in range(200):
        weights = normalized(random.random_sample(random.randint(1, 9)) + 1e-3)
        size = int(random.randint(1, 60))
        counts = np.bincount(build_blend_index(weights, size).dataset, minlength=len(weights))
        assert all(
            count <= samples_to_request(size, weight)
            for count, weight in zip(counts, weights, strict=True)
        )


def test_request_is_the_share_and_half_a_percent_each_rounded_up() -> None:
    requests = ((1000, 0.3), (10, 0.25), (1, 1.0))
    assert [samples_to_request(*request) for request in requests] == [302, 4, 2]


def test_items_come_from_the_chosen_dataset() -> None:
    first, second = ([np.array([base + number]) for number in range(9)] for base in (0, 100))
    blend = BlendedDataset([first, second], [0.25, 0.75], 8)
    assert [blend[number].item() for number in range(8)] == [100, 0, 101, 102, 1, 103, 104, 105]


def test_data_path_takes_one_prefix_or_weights_or_prefixes() -> None:
    assert parse_data_path(["a"]) == (("a",), None)
    assert parse_data_path(["a", "b"]) == (("a", "b"), None)
    assert parse_data_path(["30", "a", "10", "b"]) == (("a", "b"), (0.75, 0.25))
    assert parse_data_path([".5", "a"]) == (("a",), (1.0,))


@pytest.mark.parametrize(
    "words",
    [
        ("1", "a", "b"),
        ("1", "a", "b", "2"),
        ("a", "1"),
        ("1", "2"),
        ("0", "a"),
        ("-1", "a", "2", "b"),
        ("nan", "a"),
        ("inf", "a"),
        ("1e308", "a", "1e308", "b"),
        ("1e-308", "a", "1e308", "b"),
    ],
)
def test_a_bad_data_path_shows_itself(words: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match="--data-path " + " ".join(words)):
        parse_data_path(words)


def test_weights_decide_how_much_of_each_prefix_is_read(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", first_id=0), write(tmp_path / "b", first_id=500)
    train = build("3", first, "1", second, num_samples=(400, 0, 0)).train
    assert len(train) == 400
    assert sum(int(train[number][0]) >= 500 for number in range(400)) == 100


def test_without_weights_one_epoch_of_each_is_read_in_the_shares_of_the_sizes(
    tmp_path: Path,
) -> None:
    """60 % of 20 and of 40 documents of 11 tokens, s=5: (132 - 1) // 5 = 26 and (264 - 1) // 5 = 52
    samples."""
    first, second = (
        write(tmp_path / "a", first_id=0),
        write(tmp_path / "b", first_id=500, documents=40),
    )
    train = build(first, second, num_samples=(78, 0, 0)).train
    assert sum(int(train[number][0]) >= 500 for number in range(78)) == 52
    assert len({tuple(train[number].tolist()) for number in range(78)}) == 78
    longer = build(first, second, num_samples=(156, 0, 0)).train
    assert len(longer) == 156
    assert sum(int(longer[number][0]) >= 500 for number in range(156)) == 104


def test_each_split_reads_its_own_documents(tmp_path: Path) -> None:
    datasets = build(write(tmp_path / "a", first_id=0))
    seen = [
        {int(token) // 11 for number in range(len(data)) for token in data[number]}
        for data in (datasets.train, datasets.valid, datasets.test)
        if data is not None
    ]
    assert seen == [set(range(12)), set(range(12, 18)), set(range(18, 20))]


def test_mock_splits_differ_and_have_the_length_asked_for() -> None:
    config = DataConfig(seq_length=5, mock_data=True)
    datasets = build_datasets(config, vocab_size=10, seed=1, num_samples=(7, 3, 0))
    assert datasets.valid is not None and datasets.test is None
    assert (len(datasets.train), len(datasets.valid)) == (7, 3)
    assert not np.array_equal(datasets.train[0], datasets.valid[0])


def test_a_blend_with_a_part_that_lacks_the_split_names_it(tmp_path: Path) -> None:
    paths = write(tmp_path / "a", first_id=0), write(tmp_path / "b", first_id=500, documents=2)
    with pytest.raises(
        InputError,
        match=r"/b has no documents for the test split, .* set that share of --split to 0",
    ):
        build(*paths)


def test_no_documents_for_training_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--split '0,1' leaves no documents for training"):
        build(write(tmp_path / "a", first_id=0), split="0,1")
