"""Where the words of the data come from: flags, a file of words, or a JSON file of the splits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.config.checks import InputError
from megatron_lite.config.data_settings import DataConfig
from megatron_lite.data.data_paths import SplitPaths, read_data_paths
from megatron_lite.data.datasets import Datasets, build_datasets
from tests.data.test_blend import write


def config(**fields: Any) -> DataConfig:
    return DataConfig(seq_length=5, **fields)


def built(**fields: Any) -> Datasets:
    return build_datasets(config(**fields), vocab_size=1000, seed=3, num_samples=(60, 7, 5))


def samples(datasets: Datasets) -> list[list[list[int]] | None]:
    return [
        None if one is None else [one[number].tolist() for number in range(len(one))]
        for one in (datasets.train, datasets.valid, datasets.test)
    ]


def test_each_split_reads_the_whole_of_its_own_data(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", first_id=0), write(tmp_path / "b", first_id=500)
    train, valid, test = samples(built(train_data_path=[first], valid_data_path=[second]))
    assert train is not None and valid is not None and test is None
    assert {token // 500 for row in train for token in row} == {0}
    assert {token // 500 for row in valid for token in row} == {1}
    # one epoch of all 220 tokens, and not of a share of them
    assert len({token for row in valid for token in row}) > 200


@pytest.mark.parametrize(
    "spelled",
    [
        lambda words: words,
        lambda words: " ".join(map(str, words)),
        lambda words: [str(word) for word in words],
    ],
    ids=["list", "text", "texts"],
)
def test_the_json_file_is_the_same_as_the_three_flags(tmp_path: Path, spelled: Any) -> None:
    first, second = write(tmp_path / "a", first_id=0), write(tmp_path / "b", first_id=500)
    words = {"train": [0.3, first, 0.7, second], "valid": [second], "test": [first, second]}
    path = tmp_path / "splits.json"
    path.write_text(json.dumps({name: spelled(value) for name, value in words.items()}))
    flags = {f"{name}_data_path": list(map(str, value)) for name, value in words.items()}
    by_flags, by_file = built(**flags), built(per_split_data_args_path=str(path))
    assert samples(by_flags) == samples(by_file)
    assert by_flags.identity == by_file.identity
    assert by_flags.identity != built(train_data_path=flags["train_data_path"]).identity


def test_the_file_of_words_is_the_same_as_the_flag(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", first_id=0), write(tmp_path / "b", first_id=500)
    path = tmp_path / "words.txt"
    path.write_text(f"3 {first}\n1 {second}\n")
    by_file = built(data_args_path=str(path), split="8,1,1")
    by_flag = built(data_path=("3", first, "1", second), split="8,1,1")
    assert samples(by_file) == samples(by_flag)
    assert by_file.identity == by_flag.identity


def test_a_split_without_data_is_null_or_empty(tmp_path: Path) -> None:
    path = tmp_path / "splits.json"
    path.write_text('{"train": ["a"], "valid": null, "test": []}')
    assert read_data_paths(config(per_split_data_args_path=str(path))) == SplitPaths(
        (("a",), None), None, None
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "found list, expected"),
        ('{"train": ["a"]}', 'found the keys train, expected {"train"'),
        ('{"train": ["a"], "valid": [], "test": [], "more": []}', "found the keys train, valid"),
        ('{"train": [], "valid": [], "test": []}', "train names no data"),
        ('{"train": 3, "valid": [], "test": []}', "train is no list of texts and numbers"),
        ('{"train": [true], "valid": [], "test": []}', "train is no list of texts and numbers"),
        ('{"train": ["x", "a", "b"], "valid": ["1", "a", "b"], "test": []}', "give prefixes only"),
        ('{"train": [-1, "a"], "valid": [], "test": []}', "every weight must be above 0"),
    ],
)
def test_a_bad_file_of_splits_names_the_file_and_the_fault(
    tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "splits.json").write_text(content)
    with pytest.raises(InputError) as caught:
        read_data_paths(config(per_split_data_args_path=str(tmp_path / "splits.json")))
    assert str(caught.value).startswith("--per-split-data-args-path ")
    assert message in str(caught.value) and "splits.json" in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for name in ("data_args_path", "per_split_data_args_path"):
        with pytest.raises(InputError, match=r"-args-path .*/none: cannot be read \(No such file"):
            read_data_paths(config(**{name: str(tmp_path / "none")}))
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(InputError, match=r"--data-args-path .*/empty is empty"):
        read_data_paths(config(data_args_path=str(tmp_path / "empty")))


def test_a_missing_prefix_of_a_split_is_named(tmp_path: Path) -> None:
    first = write(tmp_path / "a", first_id=0)
    with pytest.raises(InputError, match=r"no/where\.idx: no such file"):
        built(train_data_path=[first], valid_data_path=["no/where"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            dict(data_path=["a"], train_data_path=["b"]),
            "--data-path and --train-data-path are two sources of data: set one",
        ),
        (
            dict(data_path=["a"], data_args_path="f"),
            "--data-path and --data-args-path are two sources",
        ),
        (
            dict(train_data_path=["a"], per_split_data_args_path="f"),
            "--train-data-path and --per-split-data-args-path are two sources",
        ),
        (
            dict(mock_data=True, per_split_data_args_path="f"),
            "--mock-data and --per-split-data-args-path are two sources",
        ),
        (dict(valid_data_path=["a"]), "--valid-data-path needs --train-data-path"),
        (dict(train_data_path=["a"], split="1,1,1"), "--split '1,1,1' cuts what --data-path names"),
        (dict(mock_data=True, dataloader_type="external"), "must be one of single, cyclic"),
        (dict(mock_data=True, data_sharding=False), "--no-data-sharding needs"),
        (dict(data_args_path=""), "--data-args-path is empty"),
    ],
)
def test_two_sources_of_data_are_one_too_many(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message.replace("(", r"\(") + "|" + message):
        config(**fields)


def test_the_blend_of_a_cyclic_run_has_megatrons_length(tmp_path: Path) -> None:
    """ceil(60 * share) of each part, in sum."""
    first, second = write(tmp_path / "a", first_id=0), write(tmp_path / "b", first_id=500)
    words = ["1", first, "6", second]
    single = built(train_data_path=words)
    cyclic = built(train_data_path=words, dataloader_type="cyclic")
    assert (len(single.train), len(cyclic.train)) == (60, 9 + 52)
    assert single.identity != cyclic.identity
