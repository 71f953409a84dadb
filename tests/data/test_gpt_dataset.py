import itertools
import os
import time

import pytest

from megatron_lite.config.checks import InputError
from megatron_lite.data import gpt_dataset
from megatron_lite.data.blend import BlendedDataset, build_blend_index
from megatron_lite.data.gpt_dataset import GPTDataset
from megatron_lite.data.indexed import IndexedDataset
from tests.support.corpora import written
from tests.support.mutants import replaces
from tests.support.ranks import run_ranks

LENGTHS = (3, 11, 1, 6, 9, 2, 7)


def write(prefix, lengths=LENGTHS, first_id=0):
    """Documents whose token ids count up over the whole file, so that an id tells where it
    stood."""
    ends = list(itertools.accumulate(lengths, initial=first_id))
    return IndexedDataset(written(prefix, itertools.starmap(range, itertools.pairwise(ends))))


def dataset(indexed, **options):
    given = dict(documents=(0, 7), num_samples=None, seq_length=4, seed=5, vocab_size=100)
    return GPTDataset(indexed, **{**given, **options})


def rows(data):
    return [data[number].tolist() for number in range(len(data))]


@pytest.mark.parametrize("num_samples", [None, 50])
def test_the_documents_of_a_sample_are_those_whose_ids_it_holds(tmp_path, num_samples):
    """An id tells where it stood. In the order of the sample; of a blend, with the file of the
    part."""
    first, second = write(tmp_path / "first"), write(tmp_path / "second", first_id=50)
    of_id = [document for document, length in enumerate(LENGTHS) for _ in range(length)]
    parts = [
        dataset(indexed, documents=(1, 6), num_samples=num_samples, seed=seed)
        for indexed, seed in ((first, 5), (second, 6))
    ]
    for data, first_id in zip(parts, (0, 50), strict=True):
        for number, row in enumerate(rows(data)):
            expected = [of_id[token - first_id] for token in row]
            assert data.documents(number) == {data.indexed.bin_path: list(dict.fromkeys(expected))}
    blend = BlendedDataset(parts, build_blend_index([0.5, 0.5], 6))
    for number in range(6):
        (path,) = blend.documents(number)
        assert path == (second if blend[number][0] >= 50 else first).bin_path


def test_an_id_outside_the_vocabulary_names_file_document_and_id(tmp_path):
    indexed = IndexedDataset(written(tmp_path / "data", ([1, 2, 3], [], [4, 30, 5], [6, 7])))
    message = r"data\.bin: document 2 holds token id 30, but the vocabulary has 30 ids"
    with pytest.raises(InputError, match=message):
        rows(dataset(indexed, documents=(0, 3), seq_length=7, vocab_size=30))
    assert len(rows(dataset(indexed, documents=(0, 3), seq_length=7, vocab_size=31))) == 1


@pytest.mark.parametrize("lengths", [(7, 2, 9, 6, 1, 11, 3), (4, 11, 1, 6, 9, 2, 7)])
def test_the_index_of_re_tokenised_data_is_not_used(tmp_path, lengths):
    dataset(write(tmp_path / "data"), num_samples=30)
    again = dataset(write(tmp_path / "data", lengths), num_samples=30)
    assert rows(again) == rows(dataset(write(tmp_path / "fresh", lengths), num_samples=30))


def test_without_a_folder_that_can_be_written_it_does_without_a_cache(tmp_path):
    indexed = write(tmp_path / "data")
    (tmp_path / "data_cache").write_text("a file where the folder would be")
    assert rows(dataset(indexed)) == rows(dataset(indexed, cache_path=str(tmp_path / "cache")))
    with pytest.raises(InputError, match=r"--data-cache-path .*data_cache cannot be used"):
        dataset(indexed, cache_path=str(tmp_path / "data_cache"))


def test_of_several_processes_one_builds_and_all_agree(tmp_path):
    """A build does not end before all processes ask for the dataset, so others would build too if
    nothing held them."""
    prefix, asking = write(tmp_path / "data").bin_path.removesuffix(".bin"), tmp_path / "asking"
    asking.mkdir()

    def work(rank, world_size):
        """Returns what this process reads, and a value for each build."""
        built = []

        @replaces("build_sample_index", gpt_dataset)
        def slow(build, *args, **options):
            built.append(rank)
            while len(os.listdir(asking)) < world_size:
                time.sleep(0.01)
            return build(*args, **options)

        with pytest.MonkeyPatch.context() as patch:
            slow(patch)
            (asking / str(rank)).touch()
            return rows(dataset(IndexedDataset(prefix), num_samples=30)), built

    found = run_ranks(work, 4)
    assert sum(len(built) for _, built in found) == 1
    expected = rows(dataset(IndexedDataset(prefix), num_samples=30))
    assert all(read == expected for read, _ in found)


def test_an_epoch_too_short_for_a_sample_is_an_error_with_the_numbers(tmp_path):
    indexed = write(tmp_path / "data")
    message = r"documents 2 to 3 hold 7 tokens, but one sample takes --seq-length 7 \+ 1"
    with pytest.raises(InputError, match=message):
        dataset(indexed, documents=(2, 4), seq_length=7, num_samples=None)
    assert len(dataset(indexed, documents=(2, 4), seq_length=6, num_samples=None)) == 1
