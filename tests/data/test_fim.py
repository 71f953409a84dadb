"""Documents rearranged for filling in the middle, against a reading of Megatron's rules."""

import dataclasses

import numpy as np
import pytest

from arguments import parse_args
from megatron_lite.config.checks import InputError
from megatron_lite.config.data_settings import DataConfig, TokenizerConfig
from megatron_lite.data.datasets import build_datasets
from tests.support.commands import fault_of
from tests.support.corpora import written
from tests.support.ranks import run_ranks
from tests.support.runs import rows, run_to_end, step_bytes, tiny_run

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


def decoded(ids):
    return "".join([*LETTERS, "ab", "cd", *[""] * 6][number] for number in ids)


def document(text):
    pieces = [encoded(piece) for piece in text.split("<file>")]
    return [*pieces[0], *(id for piece in pieces[1:] for id in (FILE, *piece)), END]


def expected_of(sample, random, config):
    """Megatron's rules, token by token."""

    def permuted(ids, rate):
        text = decoded(ids)
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
    with pytest.raises(InputError, match="^--fim-split-sample  is no token"):
        built(tmp_path, fim_split_sample="", fim_fragment_rate=0.5)


@pytest.mark.long
def test_a_resumed_run_on_two_stages_reads_the_same_samples_to_the_bit(tmp_path):
    built(tmp_path)
    tokenizer = vars(tokenizer_at(tmp_path))

    def run(folder, **checkpoint):
        run_to_end(
            tiny_run(
                **{name: tokenizer[name] for name in ("tokenizer_type", "tokenizer_model")},
                vocab_size=14,
                mock_data=False,
                data_path=(str(tmp_path / "data"),),
                split="1,0,0",
                fim_data=True,
                train_iters=4,
                eval_iters=0,
                metrics=tmp_path / f"{folder}.jsonl",
                save=str(tmp_path / folder),
                save_interval=2,
                pipeline_model_parallel_size=2,
                **checkpoint,
            )
        )

    def work(rank, world_size):
        run("whole")
        run("parts", exit_interval=2)
        run("parts", load=str(tmp_path / "parts"))

    run_ranks(work, 2, detail=False)
    assert rows(tmp_path / "parts.jsonl") == rows(tmp_path / "whole.jsonl")
    expected, found = (step_bytes(tmp_path / folder, 4) for folder in ("whole", "parts"))
    assert expected == found != {}


FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --train-iters 2 --lr 1 "
    "--max-position-embeddings 8 --micro-batch-size 1"
)
FILES = "--data-path d --vocab-file v --merge-file m --vocab-size 9"


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ("--data-path d --vocab-size 9 --fim-data", "--fim-data needs --tokenizer-type Hugging"),
        (f"--mock-data {FILES[14:]} --fim-data", "--fim-data excludes --mock-data: documents are"),
        (f"{FILES} --fim-data --fim-rate 1.5", "--fim-rate must be at least 0 and at most 1"),
        (f"{FILES} --fim-data --fim-split-sample x", "--fim-split-sample x needs --fim-fragment-"),
    ],
)
def test_what_cannot_be_rearranged_is_refused(flags, fault):
    assert fault in fault_of(parse_args, f"{FLAGS} {flags}")


def test_bigcodes_tokenizer_turns_it_on_with_its_tokens():
    theirs = "--data-path d --tokenizer-type TokenizerFromFileWithFIM --tokenizer-file t"
    found = parse_args(f"{FLAGS} {theirs} --fim-rate 0.3 --fragment-fim-rate 0.2".split())
    data = found.config.data
    assert data.fim_data and (data.fim_rate, data.fim_fragment_rate) == (0.3, 0.2)
    tokens = [data.fim_prefix_token, data.fim_middle_token, data.fim_suffix_token]
    assert [*tokens, data.fim_pad_token] == [f"<fim-{NAMES[i][5:]}" for i in range(4)]
    for off in ("", "--fim-rate 0"):
        assert not parse_args(f"{FLAGS} {theirs} {off}".split()).config.data.fim_data
