"""Documents rearranged for filling in the middle, against a reading of Megatron's rules."""

import dataclasses

import numpy as np
import pytest

from megatron_lite.config.checks import InputError
from megatron_lite.config.data_settings import DataConfig, TokenizerConfig
from megatron_lite.data.datasets import build_datasets
from tests.support.corpora import written

LETTERS = "abcdeé"
NAMES = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<|endoftext|>", "<file>"]
PREFIX, MIDDLE, SUFFIX, PAD, END, FILE = range(8, 14)
DOCUMENTS = ("abcdab", "", "e", "dabédcbabcedaab<file>ab<file><file>cdea", "abab", "cde<file>dab")


def tokenizer_at(folder):
    """Letters, two merges "ab" and "cd", and six special tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate([*LETTERS, "ab", "cd"])}
    model = tokenizers.models.BPE(words, [("a", "b"), ("c", "d")])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(NAMES)
    # which would add a token to each encoded text
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", END)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))


def encoded(text):
    """The ids of a text, pair by pair from the left."""
    ids = []
    while text:
        length = 2 if text.startswith(("ab", "cd")) else 1
        ids.append([*LETTERS, "ab", "cd"].index(text[:length]))
        text = text[length:]
    return ids


def document(text):
    pieces = [encoded(piece) for piece in text.split("<file>")]
    return [*pieces[0], *(id for piece in pieces[1:] for id in (FILE, *piece)), END]


def expected_of(sample, random, config):
    """Megatron's rules, token by token."""

    def permuted(ids, rate):
        text = "".join([*LETTERS, "ab", "cd", *[""] * 6][number] for number in ids)
        if random.binomial(1, rate) == 0:
            return ids
        if config.fim_no_prefix is not None and text[: len(config.fim_no_prefix)] == (
            config.fim_no_prefix
        ):
            return ids
        low, high = np.sort(random.randint(low=0, high=len(text) + 1, size=2)).tolist()
        a, b, c = encoded(text[:low]), encoded(text[low:high]), encoded(text[high:])
        if random.binomial(1, config.fim_spm_rate) == 1:
            return [PREFIX, SUFFIX] + c + [MIDDLE] + a + b
        return [PREFIX] + a + [SUFFIX] + c + [MIDDLE] + b

    def between(ids, token, rule):
        found = []
        part = []
        for number in ids:
            if number != token:
                part.append(number)
            elif part:
                found += rule(part) + [token]
                part = []
        return found + rule(part)

    def whole(ids):
        if config.fim_split_sample is None or FILE not in ids:
            return permuted(ids, config.fim_rate)
        if random.binomial(1, config.fim_rate) == 0:
            return ids
        return between(ids, FILE, lambda part: permuted(part, config.fim_fragment_rate))

    found = between(sample, END, whole)
    return (found + [PAD] * len(sample))[: len(sample)]


def built(folder, seed=7, **fields):
    prefix = folder / "data"
    if not prefix.with_suffix(".bin").exists():
        written(prefix, map(document, DOCUMENTS))
    data = DataConfig(
        seq_length=9, data_path=(str(prefix),), split="3,2,0", fim_data=True, **fields
    )
    return build_datasets(
        data, vocab_size=14, seed=seed, num_samples=(40, 9, 0), tokenizer=tokenizer_at(folder)
    )


PLAIN = {"fim_rate": 0.7, "fim_spm_rate": 0.4}
SPLIT = {**PLAIN, "fim_split_sample": "<file>", "fim_fragment_rate": 0.6}


@pytest.mark.parametrize(
    "fields",
    [
        PLAIN,
        SPLIT,
        {**SPLIT, "fim_no_prefix": "ab"},
        {"fim_rate": 1.0, "fim_spm_rate": 0.0},
        {"fim_rate": 1.0, "fim_spm_rate": 1.0},
        {"fim_rate": 0.0},
    ],
)
def test_samples_are_those_of_megatrons_rules_with_a_generator_for_each(tmp_path, fields):
    found = built(tmp_path, **fields)
    off = dataclasses.replace(found.train.data, fim_data=False)
    plain = build_datasets(off, vocab_size=14, seed=7, num_samples=(40, 9, 0))
    assert found.valid is not None and plain.valid is not None and found.test is None
    changed = 0
    for place, (ours, source) in enumerate(
        ((found.train, plain.train), (found.valid, plain.valid))
    ):
        assert len(ours) == len(source) >= 9
        for index in range(len(ours)):
            sample = source[index]
            random = np.random.RandomState([7, place, index])
            expected = expected_of(sample.tolist(), random, off)
            assert ours[index].tolist() == expected
            assert ours[index].dtype == np.int64 and ours[index].shape == (10,)
            assert ours.documents(index) == source.documents(index)
            changed += expected != sample.tolist()
    assert changed > 30 or fields["fim_rate"] == 0.0


def test_a_sample_depends_on_the_seed_and_its_number_alone(tmp_path):
    one, again, other = (built(tmp_path, seed, **PLAIN).train for seed in (7, 7, 8))
    numbers = range(len(one))
    forth = [one[number].tolist() for number in numbers]
    back = [again[number].tolist() for number in reversed(numbers)][::-1]
    assert forth == back != [other[number].tolist() for number in numbers]


def test_a_token_that_the_tokenizer_lacks_is_named(tmp_path):
    with pytest.raises(InputError, match="^--fim-eod-token <eot> is no token of the tokenizer"):
        built(tmp_path, fim_eod_token="<eot>")
    with pytest.raises(InputError, match="^--fim-split-sample <sep> is no token"):
        built(tmp_path, fim_split_sample="<sep>", fim_fragment_rate=0.5)
