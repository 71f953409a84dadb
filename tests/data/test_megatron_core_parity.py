"""The same files and the same settings through megatron-core, which is installed for this alone:
every token has to agree."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_lite.config.data_settings import DataConfig
from megatron_lite.data.datasets import build_datasets
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.model.attention import Readable, causal_mask
from megatron_lite.training.batches import DocumentRules, cut
from tests.support.corpora import written
from tests.support.documents import EOD, packed_text
from tests.support.pairs import in_one_test

pytest.importorskip("megatron.core.datasets.helpers_cpp")
from megatron.core.datasets import gpt_dataset, indexed_dataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.utils import get_blend_from_list

VOCAB_SIZE = 1000


def write(prefix, *, seed, documents, longest=59, vocab_size=VOCAB_SIZE):
    random = np.random.RandomState(seed)
    lengths = random.randint(1, longest + 1, size=documents)
    texts = (random.randint(0, vocab_size, size=length) for length in lengths)
    return written(prefix, texts, vocab_size=vocab_size)


def megatron_datasets(data, *, seed, num_samples):
    tokenizer = SimpleNamespace(
        vocab_size=VOCAB_SIZE, eod=VOCAB_SIZE + 1, pad=VOCAB_SIZE + 2, unique_identifiers={}
    )
    config = gpt_dataset.GPTDatasetConfig(
        random_seed=seed,
        sequence_length=data.seq_length,
        blend=get_blend_from_list(list(data.data_path)) if data.data_path else None,
        blend_per_split=(
            [
                get_blend_from_list(list(words)) if words else None
                for words in (data.train_data_path, data.valid_data_path, data.test_data_path)
            ]
            if data.is_per_split
            else None
        ),
        split=None if data.is_per_split else data.split,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    return BlendedMegatronDatasetBuilder(
        gpt_dataset.GPTDataset, list(num_samples), lambda: True, config
    ).build()


def test_each_reads_what_the_other_wrote(tmp_path):
    for vocab_size in (100, 70_000):
        ours = write(tmp_path / f"ours-{vocab_size}", seed=1, documents=23, vocab_size=vocab_size)
        read = indexed_dataset.IndexedDataset(ours)
        theirs = str(tmp_path / f"theirs-{vocab_size}")
        builder = indexed_dataset.IndexedDatasetBuilder(
            theirs + ".bin", dtype=indexed_dataset.DType.optimal_dtype(vocab_size)
        )
        for number in range(len(read)):
            builder.add_document(read[number], [len(read[number])])
        builder.finalize(theirs + ".idx")
        for ending in (".bin", ".idx"):
            assert Path(ours + ending).read_bytes() == Path(theirs + ending).read_bytes()
        assert [IndexedDataset(theirs).get(number).tolist() for number in range(23)] == [
            row.tolist() for row in read
        ]


@pytest.mark.parametrize(
    "words",
    [
        dict(data="one"),
        dict(data="2 one"),
        dict(data="0.2 one 0.7 two 0.1 three"),
        dict(data="one two three"),
        dict(train="one", valid="two", test="three"),
        dict(train="0.2 one 0.7 two 0.1 three", valid="one", test="two three"),
        dict(train="5 one", valid="1 two 2 three"),
    ],
)
@pytest.mark.parametrize("num_samples", [(60, 9, 5), (300, 40, 1)])
def test_training_validation_and_test_tokens_agree(tmp_path, words, num_samples):
    """Whether the splits share their data or have data of their own."""
    prefixes = {
        name: write(tmp_path / name, seed=seed, documents=documents)
        for seed, (name, documents) in enumerate({"one": 100, "two": 160, "three": 57}.items())
    }
    paths = {
        "data_path" if split == "data" else f"{split}_data_path": tuple(
            prefixes.get(word, word) for word in text.split()
        )
        for split, text in words.items()
    }
    if "data" in words:
        paths["split"] = "70, 20, 10"
    assert compared(DataConfig(seq_length=16, **paths), num_samples) >= num_samples[0]


@in_one_test("case", range(60))
def test_a_few_short_documents_give_the_same_tokens(tmp_path, case):
    """Many epochs, of which the last one is shuffled apart or not."""
    random = np.random.RandomState(case)
    documents, seq_length, most = (int(random.randint(1, most)) for most in (10, 8, 41))
    prefix = write(tmp_path / str(case), seed=case, documents=documents, longest=11 + seq_length)
    data = DataConfig(seq_length=seq_length, data_path=(prefix,), split="1,0,0")
    if IndexedDataset(prefix).sequence_lengths.sum() > seq_length:
        assert compared(data, (most, 0, 0)) >= most


def compared(data, num_samples):
    """Compares every sample of every split. Returns how many there are."""
    ours = build_datasets(data, vocab_size=VOCAB_SIZE, seed=9, num_samples=num_samples)
    theirs = megatron_datasets(data, seed=9, num_samples=num_samples)
    number_compared = 0
    for mine, reference in zip((ours.train, ours.valid, ours.test), theirs, strict=True):
        assert (mine is None) == (reference is None)
        for number in range(0 if mine is None else min(len(mine), len(reference))):
            item = reference[number]
            assert mine[number][:-1].tolist() == item["tokens"].tolist()
            assert mine[number][1:].tolist() == item["labels"].tolist()
            number_compared += 1
    return number_compared


@pytest.mark.parametrize("flags", list(product((False, True), repeat=3)))
def test_documents_have_the_masks_and_positions_of_theirs(flags):
    mask_loss, reset_positions, reset_attention = flags
    rules = DocumentRules(
        eod=EOD,
        mask_loss=mask_loss,
        reset_positions=reset_positions,
        reset_attention=reset_attention,
    )
    for seed in range(20):
        text = packed_text(seed, most=1 + seed)
        ours = cut(text, rules=rules)
        own_mask, (position_ids, cu_seqlens) = ours.loss_mask, ours.documents
        assert [one is not None for one in (own_mask, position_ids, cu_seqlens)] == list(flags)
        for number, tokens in enumerate(text[:, :-1]):
            attention, loss, positions = gpt_dataset._get_ltor_masks_and_position_ids(
                tokens, EOD, reset_positions, reset_attention, mask_loss, True
            )
            assert torch.equal(
                torch.ones(len(tokens)) if own_mask is None else own_mask[number], loss
            )
            places = torch.arange(len(tokens)) if position_ids is None else position_ids[number]
            assert torch.equal(places, positions)
            if cu_seqlens is not None:
                readable = Readable(documents=cu_seqlens)
                hidden = causal_mask(torch.empty(len(tokens)), readable)[number] != 0
                assert torch.equal(hidden, attention)
