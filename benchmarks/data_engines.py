"""The engines of benchmarks/data.py: our data path, and megatron-core's on the same files.

`actions_of` returns for each row of the table the action of each engine. megatron-core is imported
only here and is optional; its helper in C++ comes with its wheel.
"""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_lite.data.blend import build_blend_index
from megatron_lite.data.data_paths import normalized
from megatron_lite.data.gpt_dataset import GPTDataset, build_sample_index
from megatron_lite.data.indexed import HEADER, MAGIC, IndexedDataset
from megatron_lite.tools import preprocess_data

OURS, THEIRS = "megatron_lite", "megatron-core"
VOCAB_SIZE = 1000
Actions = Mapping[str, Callable[[], object]]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much each row does.

    lines: documents of the text that is tokenized.
    documents: documents of the dataset that is opened and indexed.
    reads: samples that are read from it.
    blend: samples of a blend of `datasets` datasets.
    """

    lines: int
    documents: int
    reads: int
    blend: int
    datasets: int
    seq_length: int


@dataclass(frozen=True)
class Task:
    """A row of the table. count: how many of `unit` an action works through."""

    what: str
    unit: str
    count: int
    actions: Actions


def write_text(path: Path, lines: int) -> None:
    """Writes documents of 200 token ids, one JSON object a line."""
    random = np.random.RandomState(0)
    with open(path, "w") as file:
        for _ in range(lines):
            text = " ".join(map(str, random.randint(0, VOCAB_SIZE, size=200).tolist()))
            file.write(json.dumps({"text": text}) + "\n")


def write_dataset(prefix: Path, documents: int) -> None:
    """Writes a dataset of 1 to 799 tokens a document. The .bin is a hole: every token is 0."""
    random, block = np.random.RandomState(1), 1 << 20
    tokens, position = 0, 0
    parts = [prefix.with_name(f"{prefix.name}.{part}") for part in ("lengths", "offsets")]
    with open(parts[0], "wb") as lengths, open(parts[1], "wb") as offsets:
        for first in range(0, documents, block):
            some = random.randint(1, 800, size=min(block, documents - first)).astype("<i4")
            ends = 2 * (tokens + np.cumsum(some, dtype=np.int64))
            lengths.write(some.tobytes())
            offsets.write((ends - 2 * some).astype("<i8").tobytes())
            tokens += int(some.sum(dtype=np.int64))
    with open(prefix.with_suffix(".idx"), "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, documents, documents + 1))
        for part in parts:
            with open(part, "rb") as source:
                while content := source.read(1 << 24):
                    file.write(content)
            part.unlink()
        for position in range(0, documents + 1, block):
            stop = min(position + block, documents + 1)
            file.write(np.arange(position, stop, dtype="<i8").tobytes())
    with open(prefix.with_suffix(".bin"), "wb") as file:
        file.truncate(2 * tokens)


def tasks_of(folder: Path, sizes: Sizes) -> list[Task]:
    """Writes the files and returns the rows. Rows of megatron-core are left out without it."""
    text, prefix = folder / "text.jsonl", folder / "data"
    write_text(text, sizes.lines)
    write_dataset(prefix, sizes.documents)
    lengths = np.array(IndexedDataset(str(prefix)).sequence_lengths)
    samples = (int(lengths.sum(dtype=np.int64)) - 1) // sizes.seq_length
    weights = normalized(np.random.RandomState(2).dirichlet(np.ones(sizes.datasets)).tolist())
    order = np.random.RandomState(3).randint(samples, size=sizes.reads).tolist()
    ours = _our_dataset(prefix, sizes, folder)

    def read(dataset: Any) -> None:
        for number in order:
            dataset[number]

    actions: dict[str, dict[str, Callable[[], object]]] = {
        "preprocess": {OURS: lambda: _preprocess(text, folder / "ours")},
        "open": {OURS: lambda: IndexedDataset(str(prefix)).fingerprint},
        "sample index": {OURS: lambda: _our_sample_index(lengths, sizes)},
        "load": {OURS: lambda: read(ours)},
        "blend index": {OURS: lambda: build_blend_index(weights, sizes.blend)},
    }
    core = _megatron()
    if core is not None:
        theirs = core.dataset(prefix, sizes)
        actions["preprocess"][THEIRS] = lambda: core.preprocess(text, folder / "theirs")
        actions["open"][THEIRS] = lambda: core.indexed.IndexedDataset(str(prefix))
        actions["sample index"][THEIRS] = lambda: core.sample_index(lengths, sizes)
        actions["load"][THEIRS] = lambda: read(theirs)
        actions["blend index"][THEIRS] = lambda: core.blend_index(weights, sizes.blend)
    units = {
        "preprocess": ("documents", sizes.lines),
        "open": ("documents", sizes.documents),
        "sample index": ("documents", sizes.documents),
        "load": ("samples", sizes.reads),
        "blend index": ("samples", sizes.blend),
    }
    return [Task(what, *units[what], actions[what]) for what in actions]


def _preprocess(text: Path, prefix: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        status = preprocess_data.main(
            f"--input {text} --output-prefix {prefix} --tokenizer-type NullTokenizer "
            f"--vocab-size {VOCAB_SIZE} --workers 1".split()
        )
    assert status == 0


def _our_dataset(prefix: Path, sizes: Sizes, folder: Path) -> GPTDataset:
    return GPTDataset(
        IndexedDataset(str(prefix)),
        documents=(0, sizes.documents),
        num_samples=None,
        seq_length=sizes.seq_length,
        seed=1,
        vocab_size=VOCAB_SIZE,
        cache_path=str(folder / "cache"),
    )


def _our_sample_index(lengths: np.ndarray, sizes: Sizes) -> object:
    return build_sample_index(
        lengths, first_document=0, num_samples=None, seq_length=sizes.seq_length, seed=1
    )


class _Megatron:
    """megatron-core's functions for the same work."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of each GPU library that is not there
            from megatron.core.datasets import gpt_dataset, helpers, indexed_dataset

        self.gpt, self.helpers, self.indexed = gpt_dataset, helpers, indexed_dataset

    def preprocess(self, text: Path, prefix: Path) -> None:
        """Does what Megatron's tool does in one process: parse, tokenize, append."""
        builder = self.indexed.IndexedDatasetBuilder(str(prefix) + ".bin", dtype=np.uint16)
        with open(text) as file:
            for line in file:
                ids = [int(word) for word in json.loads(line)["text"].split()]
                builder.add_document(ids, [len(ids)])
        builder.finalize(str(prefix) + ".idx")

    def dataset(self, prefix: Path, sizes: Sizes) -> Any:
        config = self.gpt.GPTDatasetConfig(
            random_seed=1,
            sequence_length=sizes.seq_length,
            blend=([str(prefix)], None),
            split="1",
            tokenizer=SimpleNamespace(
                vocab_size=VOCAB_SIZE, eod=VOCAB_SIZE, pad=VOCAB_SIZE + 1, unique_identifiers={}
            ),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        documents = np.arange(sizes.documents, dtype=np.int32)
        indexed = self.indexed.IndexedDataset(str(prefix))
        split = self.gpt.Split.train
        return self.gpt.GPTDataset(indexed, str(prefix), documents, None, split, config)

    def sample_index(self, lengths: np.ndarray, sizes: Sizes) -> object:
        random = np.random.RandomState(1)
        documents = np.arange(sizes.documents, dtype=np.int32)
        order = self.gpt._build_document_index(documents, 1, random, False)
        tokens = int(lengths.sum(dtype=np.int64))
        starts = self.helpers.build_sample_idx(
            lengths, order, sizes.seq_length, 1, tokens, True, True
        )
        samples = len(starts) - 1
        return order, starts, self.gpt._build_shuffle_index(samples, samples, random)

    def blend_index(self, weights: tuple[float, ...], size: int) -> object:
        datasets, samples = np.zeros(size, np.int16), np.zeros(size, np.int64)
        self.helpers.build_blending_indices(
            datasets, samples, np.array(weights), len(weights), size, False
        )
        return datasets, samples


def _megatron() -> _Megatron | None:
    try:
        return _Megatron()
    except ImportError:
        return None
