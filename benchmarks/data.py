"""Times the way from text to samples, and compares it with megatron-core's on the same files.

    preprocess      JSON lines of token ids into a .bin and .idx pair, in one process
    open            an .idx: ours checks every number and hashes the file, megatron-core maps it
    sample index    the order of documents and samples of one epoch
    load            samples in random order, from pages that are in memory
    blend index     the order in which a blend reads its datasets

In each round every engine does each row once, in a process of its own, which also gives the most
memory that the row adds. Mapped pages of files do not count.
"""

import contextlib
import io
import json
import multiprocessing
import re
import statistics
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, ".")  # the root of the clone, which may not be installed

from benchmarks.harness import (
    add_number,
    clock_of,
    in_rounds,
    new_report,
    parse_benchmark,
    plain_parser,
    publish,
    spread,
)
from megatron_lite.data.blend import build_blend_index
from megatron_lite.data.data_paths import normalized
from megatron_lite.data.gpt_dataset import GPTDataset, build_sample_index
from megatron_lite.data.indexed import HEADER, MAGIC, IndexedDataset
from megatron_lite.tools import preprocess_data

OURS, THEIRS = "megatron_lite", "megatron-core"
VOCAB_SIZE = 1000
DATASETS = 10  # of the blend
SEQ_LENGTH = 2048


def measured(action, clock):
    """Runs the action in a fork. Returns its milliseconds and the most bytes of memory it added."""
    reader, writer = multiprocessing.Pipe(duplex=False)

    def run():
        kept = []
        writer.send(anonymous_bytes("self"))
        ms = clock(lambda: kept.append(action()))
        writer.send((ms, anonymous_bytes("self")))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    writer.close()  # the fork has the only writing end: its death ends the wait
    before, most = reader.recv(), 0
    while not reader.poll(0.005):
        most = max(most, anonymous_bytes(process.pid))
    ms, last = reader.recv()
    process.join()
    return ms, max(most, last) - before


def anonymous_bytes(pid):
    """Returns the bytes of a process's memory without the pages of files."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"RssAnon:\s*(\d+)", status)
    return int(found[1]) * 1024 if found else 0  # of a process that has ended


def measure(actions, count, unit, what, repeats):
    """Returns a row for each engine.

    actions: return the milliseconds and bytes of each engine, by its name.
    per_second: how many of `unit` the engine does in a second, from the median of the rounds.
    ratio: its time over ours. peak_bytes: the most memory that it added, over the rounds.
    """
    found = {name: list(zip(*of, strict=True)) for name, of in in_rounds(actions, repeats).items()}
    return [
        dict(
            what=what,
            engine=name,
            unit=unit,
            ms=statistics.median(times),
            per_second=count / statistics.median(times) * 1000.0,
            ratio=spread(times, found[OURS][0]),
            peak_bytes=max(peaks),
            samples_ms=times,
        )
        for name, (times, peaks) in found.items()
    ]


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


class Engine:
    """What an engine works on. Its methods have the names of the rows.

    sizes: how much each row does: `lines` documents of a text, `documents` of the dataset that is
        opened and indexed, `reads` samples of it, `blend` samples of a blend.
    """

    def __init__(self, folder, sizes):
        self.sizes, self.folder = sizes, folder
        self.text, self.prefix = folder / "text.jsonl", folder / "data"
        self.lengths = np.array(IndexedDataset(str(self.prefix)).sequence_lengths)
        samples = (int(self.lengths.sum(dtype=np.int64)) - 1) // SEQ_LENGTH
        parts = np.random.RandomState(2).dirichlet(np.ones(DATASETS))
        self.weights = normalized(parts.tolist())
        self.order = np.random.RandomState(3).randint(samples, size=sizes.reads).tolist()

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
            seq_length=SEQ_LENGTH,
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
            self.lengths, first_document=0, num_samples=None, seq_length=SEQ_LENGTH, seed=1
        )

    def blend_index(self):
        return build_blend_index(self.weights, self.sizes.blend)


class Megatron(Engine):
    """megatron-core's functions for the same work. It is optional; its helper in C++ comes with its
    wheel."""

    def __init__(self, folder, sizes):
        super().__init__(folder, sizes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of each GPU library that is not there
            from megatron.core.datasets import gpt_dataset, helpers, indexed_dataset

        self.gpt, self.helpers, self.indexed = gpt_dataset, helpers, indexed_dataset
        config = self.gpt.GPTDatasetConfig(
            random_seed=1,
            sequence_length=SEQ_LENGTH,
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
            self.lengths, order, SEQ_LENGTH, 1, tokens, True, True
        )
        samples = len(starts) - 1
        return order, starts, self.gpt._build_shuffle_index(samples, samples, random)

    def blend_index(self):
        size, weights = self.sizes.blend, np.array(self.weights)
        datasets, samples = np.zeros(size, np.int16), np.zeros(size, np.int64)
        self.helpers.build_blending_indices(datasets, samples, weights, len(weights), size, False)
        return datasets, samples


def main(argv=None):
    """Runs the benchmark, without megatron-core's rows where it is not installed. Returns 0."""
    parser = plain_parser(__doc__, repeats=5)
    for flag, default, text in (
        ("--lines", 20_000, "documents to tokenize"),
        ("--documents", 10_000_000, "documents of the dataset"),
        ("--reads", 20_000, "samples to read"),
        ("--blend", 20_000_000, "samples of the blend"),
    ):
        add_number(parser, flag, default, text)
    parser.add_argument("--only", metavar="TEXT", default="", help="rows whose name contains it")
    parser.set_defaults(threads=1)  # each row runs in a fork
    args = parse_benchmark(parser, argv)
    report, clock = new_report(args), clock_of(args)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder / "text.jsonl", args.lines)
        write_dataset(folder / "data", args.documents)
        engines = {OURS: Ours(folder, args)}
        with contextlib.suppress(ImportError):
            engines[THEIRS] = Megatron(folder, args)
        for what, unit, count in (
            ("preprocess", "documents", args.lines),
            ("open", "documents", args.documents),
            ("sample_index", "documents", args.documents),
            ("load", "samples", args.reads),
            ("blend_index", "samples", args.blend),
        ):
            if args.only in what:
                actions = {
                    name: partial(measured, getattr(one, what), clock)
                    for name, one in engines.items()
                }
                publish(report, measure(actions, count, unit, what, args.repeats), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
