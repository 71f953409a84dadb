"""The engines of benchmarks/data.py: our data path, and megatron-core's on the same files.

megatron-core is imported only here and is optional; its helper in C++ comes with its wheel.
"""

import contextlib
import io
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from megatron_lite.data.blend import build_blend_index
from megatron_lite.data.data_paths import normalized
from megatron_lite.data.gpt_dataset import GPTDataset, build_sample_index
from megatron_lite.data.indexed import HEADER, MAGIC, IndexedDataset
from megatron_lite.tools import preprocess_data

OURS, THEIRS = "megatron_lite", "megatron-core"
VOCAB_SIZE = 1000


@dataclass(frozen=True)
class Task:
    """A row of the table. count: how many of `unit` an action works through."""

    what: str
    unit: str
    count: int
    actions: Mapping[str, Callable[[], object]]


def write_text(path, lines):
    """Writes documents of 200 token ids, one JSON object a line."""
    random = np.random.RandomState(0)
    with open(path, "w") as file:
        for _ in range(lines):
            text = " ".join(map(str, random.randint(0, VOCAB_SIZE, size=200).tolist()))
            file.write(json.dumps({"text": text}) + "\n")


def write_dataset(prefix, documents):
    """Writes a dataset of 1 to 799 tokens a document. The .bin is a hole: every token is 0."""
    lengths = np.random.RandomState(1).randint(1, 800, size=documents).astype("<i4")
    offsets = np.zeros(documents + 1, "<i8")
    np.cumsum(2 * lengths, out=offsets[1:])
    with open(prefix.with_suffix(".idx"), "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, documents, documents + 1))
        for part in (lengths, offsets[:-1], np.arange(documents + 1, dtype="<i8")):
            part.tofile(file)
    with open(prefix.with_suffix(".bin"), "wb") as file:
        file.truncate(offsets[-1])


def tasks_of(folder, sizes):
    """Writes the files and yields the rows. Rows of megatron-core are left out without it.

    sizes: how much each row does: `lines` documents of a text, `documents` of the dataset that is
        opened and indexed, `reads` samples of it, `blend` samples of a blend of `datasets`.
    """
    engines = {OURS: Ours(folder, sizes)}
    with contextlib.suppress(ImportError):
        engines[THEIRS] = Megatron(folder, sizes)
    documents = ("documents", sizes.documents)
    for what, unit, count in (
        ("preprocess", "documents", sizes.lines),
        ("open", *documents),
        ("sample_index", *documents),
        ("load", "samples", sizes.reads),
        ("blend_index", "samples", sizes.blend),
    ):
        yield Task(what, unit, count, {name: getattr(one, what) for name, one in engines.items()})


class Engine:
    """What an engine works on. Its methods have the names of the rows."""

    def __init__(self, folder, sizes):
        self.sizes, self.folder = sizes, folder
        self.text, self.prefix = folder / "text.jsonl", folder / "data"
        if not self.text.exists():
            write_text(self.text, sizes.lines)
            write_dataset(self.prefix, sizes.documents)
        self.lengths = np.array(IndexedDataset(str(self.prefix)).sequence_lengths)
        samples = (int(self.lengths.sum(dtype=np.int64)) - 1) // sizes.seq_length
        parts = np.random.RandomState(2).dirichlet(np.ones(sizes.datasets))
        self.weights = normalized(parts.tolist())
        self.order = np.random.RandomState(3).randint(samples, size=sizes.reads).tolist()
        self.dataset = None

    def load(self):
        for number in self.order:
            self.dataset[number]


class Ours(Engine):
    """The functions of this project."""

    def __init__(self, folder, sizes):
        super().__init__(folder, sizes)
        self.dataset = GPTDataset(
            IndexedDataset(str(self.prefix)),
            documents=(0, sizes.documents),
            num_samples=None,
            seq_length=sizes.seq_length,
            seed=1,
            vocab_size=VOCAB_SIZE,
            cache_path=str(folder / "cache"),
        )

    def preprocess(self):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            status = preprocess_data.main(
                f"--input {self.text} --output-prefix {self.folder / 'ours'} "
                f"--tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE} --workers 1".split()
            )
        assert status == 0

    def open(self):
        return IndexedDataset(str(self.prefix)).fingerprint

    def sample_index(self):
        return build_sample_index(
            self.lengths,
            first_document=0,
            num_samples=None,
            seq_length=self.sizes.seq_length,
            seed=1,
        )

    def blend_index(self):
        return build_blend_index(self.weights, self.sizes.blend)


class Megatron(Engine):
    """megatron-core's functions for the same work."""

    def __init__(self, folder, sizes):
        super().__init__(folder, sizes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of each GPU library that is not there
            from megatron.core.datasets import gpt_dataset, helpers, indexed_dataset

        self.gpt, self.helpers, self.indexed = gpt_dataset, helpers, indexed_dataset
        config = self.gpt.GPTDatasetConfig(
            random_seed=1,
            sequence_length=sizes.seq_length,
            blend=([str(self.prefix)], None),
            split="1",
            tokenizer=SimpleNamespace(
                vocab_size=VOCAB_SIZE, eod=VOCAB_SIZE, pad=VOCAB_SIZE + 1, unique_identifiers={}
            ),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        self.documents = np.arange(sizes.documents, dtype=np.int32)
        prefix, split = str(self.prefix), self.gpt.Split.train
        self.dataset = self.gpt.GPTDataset(self.open(), prefix, self.documents, None, split, config)

    def preprocess(self):
        """Does what Megatron's tool does in one process: parse, tokenize, append."""
        prefix = self.folder / "theirs"
        builder = self.indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
        with open(self.text) as file:
            for line in file:
                ids = [int(word) for word in json.loads(line)["text"].split()]
                builder.add_document(ids, [len(ids)])
        builder.finalize(f"{prefix}.idx")

    def open(self):
        return self.indexed.IndexedDataset(str(self.prefix))

    def sample_index(self):
        random = np.random.RandomState(1)
        order = self.gpt._build_document_index(self.documents, 1, random, False)
        tokens = int(self.lengths.sum(dtype=np.int64))
        starts = self.helpers.build_sample_idx(
            self.lengths, order, self.sizes.seq_length, 1, tokens, True, True
        )
        samples = len(starts) - 1
        return order, starts, self.gpt._build_shuffle_index(samples, samples, random)

    def blend_index(self):
        size, weights = self.sizes.blend, np.array(self.weights)
        datasets, samples = np.zeros(size, np.int16), np.zeros(size, np.int64)
        self.helpers.build_blending_indices(datasets, samples, weights, len(weights), size, False)
        return datasets, samples
