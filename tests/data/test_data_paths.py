"""Where the words of the data come from: flags, a file of words, or a JSON file of the splits.

A --data-path that names no token files: the message has what to give, or the commands that make
them.
"""

import json
import re

import pytest

from megatron_lite.config.checks import InputError
from megatron_lite.config.data_settings import DataConfig
from megatron_lite.data.data_paths import parse_split, read_data_paths, split_documents
from megatron_lite.data.datasets import build_datasets
from megatron_lite.data.indexed import IndexedDataset
from tests.data.test_blend import write_two


def config(**fields):
    return DataConfig(seq_length=5, **fields)


def built(**fields):
    return build_datasets(config(**fields), vocab_size=1000, seed=3, num_samples=(60, 7, 5))


def samples(datasets):
    return [
        None if one is None else [one[number].tolist() for number in range(len(one))]
        for one in (datasets.train, datasets.valid, datasets.test)
    ]


@pytest.mark.parametrize("spelled", [list, lambda words: " ".join(map(str, words))])
def test_the_json_file_is_the_same_as_the_three_flags(tmp_path, spelled):
    first, second = write_two(tmp_path)
    words = {"train": [0.3, first, 0.7, second], "valid": [second], "test": [first, second]}
    path = tmp_path / "splits.json"
    path.write_text(json.dumps({name: spelled(value) for name, value in words.items()}))
    flags = {f"{name}_data_path": list(map(str, value)) for name, value in words.items()}
    by_flags, by_file = built(**flags), built(per_split_data_args_path=str(path))
    assert samples(by_flags) == samples(by_file)
    assert by_flags.identity == by_file.identity
    assert by_flags.identity != built(train_data_path=flags["train_data_path"]).identity


def test_the_file_of_words_is_the_same_as_the_flag(tmp_path):
    first, second = write_two(tmp_path)
    path = tmp_path / "words.txt"
    path.write_text(f"3 {first}\n1 {second}\n")
    by_file = built(data_args_path=str(path), split="8,1,1")
    by_flag = built(data_path=("3", first, "1", second), split="8,1,1")
    assert samples(by_file) == samples(by_flag)
    assert by_file.identity == by_flag.identity


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "is not JSON"),
        ('{"train": ["a"]}', "found {'train'"),
        ('{"train": [], "valid": [], "test": []}', "train names no data"),
        ('{"train": [true], "valid": [], "test": []}', "train is no list of texts and numbers"),
        ('{"train": [-1, "a"], "valid": [], "test": []}', "Every weight must be above 0"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_file_of_splits_names_the_file_and_the_fault(tmp_path, content, message):
    path = tmp_path / "splits.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=rf"--per-split-data-args-path .*splits\.json.*{message}"):
        read_data_paths(config(per_split_data_args_path=str(path)))


@pytest.mark.parametrize(
    "split, documents, expected",
    [
        ("969, 30, 1", 1000, ((0, 969), (969, 999), (999, 1000))),
        ("99,1,0", 250, ((0, 248), (248, 250), (250, 250))),  # 247.5 rounds to even
        ("1,1", 7, ((0, 4), (4, 7), (7, 7))),
        ("0, 0.25, .75", 8, ((0, 0), (0, 2), (2, 8))),
        ("8e1,2e1", 10, ((0, 8), (8, 10), (10, 10))),
    ],
)
def test_split_gives_the_ranges_worked_out_by_hand(split, documents, expected):
    assert split_documents(split, documents) == list(expected)


@pytest.mark.parametrize("split", ["", "1,2,3,4", "0,0,0", "1,-1,0", "nan", "1,,2", "1e308,1e308"])
def test_a_bad_split_names_itself_and_the_rule(split):
    with pytest.raises(
        InputError,
        match=r"--split '.*' must be 1 to 3 numbers >= 0, not all 0, .* such as '969, 30, 1'",
    ):
        parse_split(split)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "prefix, file, answer",
    [
        ("data.bin", "data.bin", "leave the ending out: --data-path data"),
        ("data", "data_text_document.idx", "did you mean --data-path data_text_document?"),
        ("a b.jsonl", "a b.jsonl", "preprocess_data --input 'a b.jsonl' --output-prefix 'a b' "),
    ],
)
def test_the_answer_has_what_to_give(folder, prefix, file, answer):
    (folder / file).write_text("words")
    with pytest.raises(InputError, match=re.escape(answer)):
        IndexedDataset(prefix)
