"""A flag of a tokenizer that nothing reads is a notice, as any other setting without effect."""

from __future__ import annotations

import pytest

from arguments import parse_args

RUN = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --max-position-embeddings 8 "
    "--seq-length 8 --micro-batch-size 2 --vocab-size 99"
)


@pytest.mark.parametrize(
    ("words", "unread"),
    [
        ("--tokenizer-type NullTokenizer --tokenizer-model a", ["--tokenizer-model"]),
        (
            "--tokenizer-type NullTokenizer --vocab-file a --merge-file b",
            ["--vocab-file", "--merge-file"],
        ),
        (
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model m --merge-file b",
            ["--merge-file"],
        ),
        (
            "--vocab-file a --merge-file b --tokenizer-special-tokens <s>",
            ["--tokenizer-special-tokens"],
        ),
        ("--vocab-file a --merge-file b", []),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model m", []),
    ],
)
def test_a_tokenizer_flag_that_nothing_reads_is_a_notice(words: str, unread: list[str]) -> None:
    parsed = parse_args([*RUN.split(), *words.split()])
    told = [notice.split()[0] for notice in parsed.notices if "has no effect" in notice]
    assert told == unread
    kept = parse_args(
        [*RUN.split(), "--tokenizer-type", str(parsed.config.tokenizer.tokenizer_type)]
        + [
            word
            for flag, value in zip(words.split()[::2], words.split()[1::2], strict=True)
            if flag not in unread and flag != "--tokenizer-type"
            for word in (flag, value)
        ]
    )
    assert parsed.config == kept.config
