"""The words and ids in the files of a tokenizer, read and checked without its library."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from megatron_lite.config import plain

LARGEST_ID = 2**31 - 1  # token ids are stored in 32 bits


def words_of(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the ids of a vocab.json or a tokenizer.json, by word.

    Raises ValueError if the values have another form.
    """
    if name == "vocab.json":
        return dict(values)
    vocabulary = plain.as_object(plain.field(values, "model"), "model").get("vocab", {})
    if isinstance(vocabulary, list):  # of Unigram: [word, score] in the order of the ids
        pairs = (plain.as_list(pair, "an entry of vocab") for pair in vocabulary)
        words = {str(pair[:1]): number for number, pair in enumerate(pairs)}
    else:
        words = dict(plain.as_object(vocabulary, "vocab"))
    for token in plain.as_list(values.get("added_tokens") or [], "added_tokens"):
        token = plain.as_object(token, "an added token")
        word = plain.field(token, "content")
        if isinstance(vocabulary, list):
            word = str([word])
        words[str(word)] = plain.field(token, "id")
    return words


def check_ids(words: Mapping[str, Any], vocab_size: int | None) -> None:
    """Raises ValueError unless each word has an id of its own, which a model of V ids has."""
    most = LARGEST_ID if vocab_size is None else vocab_size - 1
    for word, number in words.items():
        plain.as_whole(number, f"the id of {plain.shown(word)}", 0, most)
    # Sorted, since a file can choose ids whose hashes collide.
    ids = sorted(words.values())
    for first, second in itertools.pairwise(ids):
        if first == second:
            same = [plain.shown(word) for word, number in words.items() if number == first]
            raise ValueError(f"{', '.join(same[:3])} have one id, {first}")


def merges_of(text: str) -> list[tuple[str, str]]:
    """Returns the pairs of a merges.txt. Raises ValueError if a line is no pair of words."""
    merges = []
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.rstrip("\r").split(" ")
        if line.startswith("#version") or words == [""]:
            continue
        if len(words) != 2:
            raise ValueError(f"line {number} is no pair of words")
        merges.append((words[0], words[1]))
    return merges
