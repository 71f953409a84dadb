"""The files of a tokenizer, which travel in every checkpoint.

A checkpoint stores them under fixed names, beside its other files. A tool can then read the
tokenizer from the checkpoint, also after the files were moved or on another machine.
"""

import itertools
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_lite.config import checks
from megatron_lite.config.checks import input_faults, parse_json
from megatron_lite.config.data_settings import READ_FILES, TokenizerConfig
from megatron_lite.config.input_file import read_input

# The types that the names of files tell, the likeliest first.
TOLD_BY_FILES = ("HuggingFaceTokenizer", "GPT2BPETokenizer", "Llama2Tokenizer")
TOKEN_IDS = "token_ids.json"  # the ids of special tokens in the config.json of Hugging Face
OF_MODEL = ("generation_config.json", TOKEN_IDS)
# Files that other libraries read, if they lie beside those of a tokenizer.
BESIDE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    *OF_MODEL,
)
NAMES = frozenset((*BESIDE, *(name for row in READ_FILES.values() for name in row.values())))
WITH_IDS = ("tokenizer.json", "vocab.json")
LARGEST_ID = 2**31 - 1  # token ids are stored in 32 bits
MOST_BYTES = 2**28  # the largest tokenizer.json known has 2**25


def read_files(config: TokenizerConfig) -> dict[str, Path]:
    """Returns the paths of the files that a tokenizer reads, by the names under which they are
    stored. Each may be given as its folder."""
    found = {}
    for field, name in READ_FILES[str(config.tokenizer_type)].items():
        path = Path(str(getattr(config, field)))
        found[name] = path / name if path.is_dir() else path
    return found


def files_of(config: TokenizerConfig, step: Path | None = None) -> dict[str, Path]:
    """Returns these paths, and those of files beside them that other libraries read.

    step: the folder of the checkpoint that a run goes on from. Its files of the model are taken if
        none lie beside those of the tokenizer.
    """
    read, there = read_files(config), in_folder(step) if step else {}
    found = {name: there[name] for name in OF_MODEL if name in there}
    for folder in {path.parent for path in read.values()}:
        found |= {name: folder / name for name in BESIDE if os.path.lexists(folder / name)}
    return found | read


def contents_of(files: Mapping[str, Path], vocab_size: int | None = None) -> dict[str, bytes]:
    """Returns the contents of files, by stored name.

    vocab_size: V of the model; None if it is not known.
    Raises InputError if one cannot be read, is not what its name says, or has ids of no such model.
    """
    contents = {}
    for name, path in files.items():
        content = contents[name] = read_input(path, MOST_BYTES)
        with input_faults(f"{path}: not a tokenizer that can be read (", ")"):
            if name.endswith(".model"):
                if not content.startswith(b"\n"):  # the pieces, field 1 of the protocol buffer
                    raise ValueError("it does not begin with the pieces of SentencePiece")
                continue
            text = content.decode("utf-8-sig")
            if "\0" in text:
                raise ValueError("it is no text")
            if name == "merges.txt":
                merges_of(text)
            if name.endswith(".json"):
                values = parse_json(text, strict=False)
                if name == "tiktoken.json":
                    checks.as_list(values, "the text")
                elif checks.as_object(values, "the text") is values and name in WITH_IDS:
                    _check_ids(values, name, vocab_size)
    return contents


def in_folder(folder: Path) -> dict[str, Path]:
    """Returns the paths of the files of a tokenizer that lie in a folder, by their names."""
    return {name: folder / name for name in sorted(NAMES) if os.path.lexists(folder / name)}


def read_from(config: TokenizerConfig, folder: Path) -> TokenizerConfig:
    """Returns the config with the paths of the files in a folder, if all of them are there.

    Otherwise, as in checkpoints that hold no tokenizer, it returns the config unchanged.
    """
    paths = _paths(config.tokenizer_type, folder)
    return replace(config, **paths) if all(map(os.path.isfile, paths.values())) else config


def config_of(names: Collection[str], folder: Path, vocab_size: int) -> TokenizerConfig:
    """Returns the config of a tokenizer whose files are stored in a folder.

    names: of the files. vocab_size: V of the model.
    Without files of a known type it is the NullTokenizer, of as many ids.
    """
    for kind in TOLD_BY_FILES:
        if {*READ_FILES[kind].values()} <= {*names}:
            paths = _paths(kind, folder)
            return TokenizerConfig(tokenizer_type=kind, vocab_size=vocab_size, **paths)
    return TokenizerConfig(vocab_size=vocab_size - 1)


def _paths(kind: str | None, folder: Path) -> dict[str, Any]:
    """Returns the fields of a config that name the files of a tokenizer in a folder."""
    return {field: str(folder / name) for field, name in READ_FILES[str(kind)].items()}


def _check_ids(values: Mapping[str, Any], name: str, vocab_size: int | None) -> None:
    """Raises ValueError unless each word of a vocab.json or a tokenizer.json has an id of its own,
    which a model of V ids has. Added tokens may lie beyond: see `Tokenizer.fewest_ids`."""
    vocabulary = values
    added = []
    if name == "tokenizer.json":
        vocabulary = checks.as_object(checks.field(values, "model"), "model").get("vocab", {})
        added = checks.as_list(values.get("added_tokens") or [], "added_tokens")
    if isinstance(vocabulary, list):  # of Unigram: [word, score] in the order of the ids
        pairs = (checks.as_list(pair, "an entry of vocab") for pair in vocabulary)
        words = {str(pair[:1]): number for number, pair in enumerate(pairs)}
    else:
        words = dict(checks.as_object(vocabulary, "vocab"))
    most = LARGEST_ID if vocab_size is None else vocab_size - 1
    for word, number in words.items():
        checks.as_whole(number, f"the id of {checks.quoted(word)}", 0, most)
    for token in added:
        token = checks.as_object(token, "an added token")
        word, number = checks.field(token, "content"), checks.field(token, "id")
        checks.as_whole(number, f"the id of {checks.quoted(word)}", 0, LARGEST_ID)
        words[str([word] if isinstance(vocabulary, list) else word)] = number
    # Sorted, since a file can choose ids whose hashes collide.
    for first, second in itertools.pairwise(sorted(words.values())):
        if first == second:
            same = [checks.quoted(word) for word, number in words.items() if number == first]
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
