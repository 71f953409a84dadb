"""The datasets of a run that reads token files, and their identity.

Every rank builds them by itself. Only the hashes of the .idx files can come from another rank.

The identity is taken from the content of the files. Two runs have equal identities if they read the
same documents and split, weight and cut them alike. It covers every byte of the .idx, the size of
the .bin, and a sample of its bytes: a .bin can hold terabytes. Files that were moved or copied keep
their identity. The seed and the length of a run are not part of it.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_lite.config.checks import InputError
from megatron_lite.config.data_settings import DataConfig
from megatron_lite.data.blend import BlendedDataset, Dataset, kept_blend_index
from megatron_lite.data.data_paths import (
    SPLITS,
    DataPath,
    normalized,
    parse_split,
    read_data_paths,
    split_documents,
)
from megatron_lite.data.datasets import DataIdentity, Datasets
from megatron_lite.data.gpt_dataset import GPTDataset
from megatron_lite.data.indexed import IndexedDataset

SAMPLES, SAMPLE_BYTES = 64, 4096  # of a .bin, for its identity
SURPLUS = 0.005  # of the samples of a part of a blend, besides its share


def token_datasets(
    data: DataConfig,
    vocab_size: int,
    seed: int,
    num_samples: Sequence[int],
    shared: Callable[..., Any],
) -> Datasets:
    """Returns the datasets of `build_datasets`."""
    paths = read_data_paths(data)
    # Each prefix is opened once, also if several splits name it.
    names = dict.fromkeys(name for path in paths if path for name in path.prefixes)
    indexed = [IndexedDataset(name) for name in names]
    found = shared(lambda: [[*one.sizes, one.fingerprint] for one in indexed])
    for one, (*sizes, fingerprint) in zip(indexed, found, strict=True):
        one.take_fingerprint(sizes, fingerprint)
    opened = {one.prefix: _Part(one, data, vocab_size, seed) for one in indexed}
    built = [
        path and _build_split(path, [opened[name] for name in path.prefixes], data, place, count)
        for place, (path, count) in enumerate(zip(paths, num_samples, strict=True))
    ]
    if built[0] is None:
        raise InputError(
            "the data of the training split holds no documents: give another prefix"
            if data.is_per_split
            else f"--split {data.split!r} leaves no documents for training in {' '.join(names)}"
        )
    parts = [  # of the identity of each split, in their order
        {
            "weights": path and path.weights and list(path.weights),
            "files": [_content(opened[name].indexed) for name in path.prefixes] if path else [],
        }
        for path in paths
    ]
    identity: DataIdentity = (
        {"source": "--train-data-path", **dict(zip(SPLITS, parts, strict=True))}
        if data.is_per_split
        else {"source": "--data-path", "split": list(parse_split(data.split)), **parts[0]}
    )
    if data.dataloader_type != "single":
        how = "a range for each rank" if data.data_sharding else "all"
        identity["order"] = f"{data.dataloader_type}, {how}"
    identity["seq_length"] = data.seq_length
    return Datasets(built[0], built[1], built[2], identity)


class _Part(NamedTuple):
    """One prefix, opened and split. Without a split, every split is the whole of it."""

    indexed: IndexedDataset
    data: DataConfig
    vocab_size: int
    seed: int

    def documents(self, split: int) -> tuple[int, int]:
        number = len(self.indexed)
        whole = self.data.is_per_split
        return (0, number) if whole else split_documents(self.data.split, number)[split]

    def is_empty(self, split: int) -> bool:
        start, stop = self.documents(split)
        return start >= stop

    def of(self, split: int, num_samples: int | None) -> GPTDataset:
        return GPTDataset(
            self.indexed,
            documents=self.documents(split),
            num_samples=num_samples,
            seq_length=self.data.seq_length,
            seed=self.seed,
            vocab_size=self.vocab_size,
            cache_path=self.data.data_cache_path,
        )


def _build_split(
    path: DataPath, parts: Sequence[_Part], data: DataConfig, split: int, num_samples: int
) -> Dataset | None:
    """Returns the dataset of split 0, 1 or 2.

    Returns None if no part has documents for it. For splits 1 and 2 it also returns None if no
    samples are requested.

    Without weights each part is read once, in proportion to its size. A run that needs more samples
    reads them again, in the same shares.
    """
    if all(part.is_empty(split) for part in parts) or (num_samples == 0 and split > 0):
        return None
    # As in Megatron, the weight of a split's only prefix is ignored if the splits are given one by
    # one; otherwise it is a blend of one.
    if len(parts) == 1 and (path.weights is None or data.is_per_split):
        return parts[0].of(split, num_samples)
    for part in parts:
        if part.is_empty(split):
            raise InputError(
                f"{part.indexed.prefix} has no documents for the {SPLITS[split]} split, but other "
                "prefixes of that split do: leave it out, set that share of --split to 0, or "
                "enlarge it"
            )
    weights, size = path.weights, num_samples
    index_of = functools.partial(
        kept_blend_index, data_cache_path=data.data_cache_path, prefix=parts[0].indexed.prefix
    )
    if weights is None:
        # The shares follow the sizes, which are known only after one epoch of each part is built.
        datasets = [part.of(split, None) for part in parts]
        sizes = [len(dataset) for dataset in datasets]
        if num_samples <= sum(sizes):
            return BlendedDataset(datasets, sizes, num_samples, index_of=index_of)
        weights = normalized(sizes)
    elif data.dataloader_type == "cyclic":
        # Megatron's blend is a few samples longer than requested. A shuffle of all samples shows
        # it; a run that reads them in order never reaches the end.
        size = sum(math.ceil(num_samples * weight) for weight in weights)
    datasets = [
        part.of(split, math.ceil(math.ceil(num_samples * weight) * (1 + SURPLUS)))
        for part, weight in zip(parts, weights, strict=True)
    ]
    blend = BlendedDataset(datasets, weights, size, index_of=index_of)
    if size > num_samples:
        blend.check_sizes()
    return blend


def _content(dataset: IndexedDataset) -> str:
    digest = hashlib.sha256(dataset.fingerprint.encode())
    content = dataset.tokens.view(np.uint8)
    for start in np.linspace(
        0, max(0, content.nbytes - SAMPLE_BYTES), SAMPLES, dtype=np.int64
    ).tolist():
        digest.update(content[start : start + SAMPLE_BYTES].tobytes())
    return digest.hexdigest()[:16]
