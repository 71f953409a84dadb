"""The datasets of a run that reads token files, and their identity.

Every rank builds them by itself. The trainer compares the identities of all ranks.

The identity is taken from the content of the files. Two runs have equal identities if they read the
same documents and split, weight and cut them alike. It covers every byte of the .idx, the size of
the .bin, and a sample of its bytes: a .bin can hold terabytes. Files that were moved or copied keep
their identity. The seed and the length of a run are not part of it.

`FimDataset` rearranges documents for filling in the middle (2207.14255), as Megatron-LM's
--fim-data. The text of a document is cut at two characters, and its parts stand in one of two
orders, with a token before each:

    PSM    <prefix> prefix <suffix> suffix <middle> middle
    SPM    <prefix> <suffix> suffix <middle> prefix middle

A sample keeps its length: what is too long is cut, and what is too short is filled up. The random
numbers are drawn in Megatron's order. Megatron draws for one sample after another, in the order in
which a process reads them. Here each sample has a generator of its own, with the seed (--seed,
split, number of the sample). Therefore a sample is the same on every rank and in a resumed run. As
in Megatron, an empty document or part is left out with the token behind it, unless it is the last
one of the sample.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy import ndarray

from megatron_lite.config.checks import InputError
from megatron_lite.config.data_settings import DataConfig, TokenizerConfig

from .blend import BlendedDataset, kept_blend_index
from .data_paths import SPLITS, DataPath, normalized, parse_split, read_data_paths, split_documents
from .datasets import DataIdentity, Dataset, Datasets
from .gpt_dataset import GPTDataset
from .indexed import IndexedDataset

SAMPLES, SAMPLE_BYTES = 64, 4096  # of a .bin, for its identity
SURPLUS = 0.005  # of the samples of a part of a blend, besides its share


def token_datasets(
    data: DataConfig,
    vocab_size: int,
    seed: int,
    num_samples: Sequence[int],
    tokenizer: TokenizerConfig | None,
) -> Datasets:
    """Returns the datasets of `build_datasets`."""
    paths = read_data_paths(data)
    # Each prefix is opened once, also if several splits name it.
    names = dict.fromkeys(name for path in paths if path for name in path.prefixes)
    opened = {name: IndexedDataset(name) for name in names}
    built = [
        path and _build_split(path, opened, data, place, count, vocab_size=vocab_size, seed=seed)
        for place, (path, count) in enumerate(zip(paths, num_samples, strict=True))
    ]
    if data.fim_data and tokenizer is not None:
        from .tokenizers import build_tokenizer

        backend = build_tokenizer(tokenizer).backend
        built = [
            split and FimDataset(split, data, backend, seed, place)
            for place, split in enumerate(built)
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
            "files": [_content(opened[name], vocab_size) for name in path.prefixes] if path else [],
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


def _build_split(
    path: DataPath,
    opened: Mapping[str, IndexedDataset],
    data: DataConfig,
    split: int,
    num_samples: int,
    **ids: int,
) -> Dataset | None:
    """Returns the dataset of split 0, 1 or 2. ids: `vocab_size` and `seed`.

    Returns None if no part has documents for it. For splits 1 and 2 it also returns None if no
    samples are requested.

    Without weights each part is read once, in proportion to its size. A run that needs more samples
    reads them again, in the same shares.
    """
    parts, empty = list[Callable[..., GPTDataset]](), list[str]()
    for name in path.prefixes:
        start, stop = 0, len(opened[name])
        if not data.is_per_split:
            start, stop = split_documents(data.split, stop)[split]
        if start >= stop:
            empty.append(name)
        parts.append(
            partial(
                GPTDataset,
                opened[name],
                documents=(start, stop),
                seq_length=data.seq_length,
                cache_path=data.data_cache_path,
                **ids,
            )
        )
    if len(empty) == len(parts) or (num_samples == 0 and split > 0):
        return None
    # As in Megatron, the weight of a split's only prefix is ignored if the splits are given one by
    # one; otherwise it is a blend of one.
    if len(parts) == 1 and (path.weights is None or data.is_per_split):
        return parts[0](num_samples=num_samples)
    if empty:
        raise InputError(
            f"{empty[0]} has no documents for the {SPLITS[split]} split, but other prefixes of "
            "that split do: leave it out, set that share of --split to 0, or enlarge it"
        )
    weights, size = path.weights, num_samples

    def blend(datasets: Sequence[Dataset], weights: Sequence[float]) -> BlendedDataset:
        # Weights from --data-path are divided by their sum a second time here, as in Megatron. This
        # can change their last bit, and so decide which of two nearly equal errors is larger.
        shares, prefix = normalized(weights), path.prefixes[0]
        index = kept_blend_index(shares, size, data_cache_path=data.data_cache_path, prefix=prefix)
        return BlendedDataset(datasets, index)

    if weights is None:
        # The shares follow the sizes, which are known only after one epoch of each part is built.
        datasets = [part(num_samples=None) for part in parts]
        sizes = [len(dataset) for dataset in datasets]
        if num_samples <= sum(sizes):
            return blend(datasets, sizes)
        weights = normalized(sizes)
    elif data.dataloader_type == "cyclic":
        # Megatron's blend is a few samples longer than requested. A shuffle of all samples shows
        # it; a run that reads them in order never reaches the end.
        size = sum(math.ceil(num_samples * weight) for weight in weights)
    datasets = [
        part(num_samples=math.ceil(math.ceil(num_samples * weight) * (1 + SURPLUS)))
        for part, weight in zip(parts, weights, strict=True)
    ]
    found = blend(datasets, weights)
    if size > num_samples:
        found.check_sizes()
    return found


def _content(dataset: IndexedDataset, vocab_size: int) -> str:
    """Returns the identity of a file. Raises InputError if an id of its sample of bytes is outside
    the vocabulary."""
    digest = hashlib.sha256(dataset.fingerprint.encode())
    content = dataset.tokens.view(np.uint8)
    for start in np.linspace(
        0, max(0, content.nbytes - SAMPLE_BYTES), SAMPLES, dtype=np.int64
    ).tolist():
        digest.update(content[start : start + SAMPLE_BYTES].tobytes())
        first, size = start // dataset.dtype.itemsize, SAMPLE_BYTES // dataset.dtype.itemsize
        dataset.check_ids(dataset.tokens[first : first + size], vocab_size)
    return digest.hexdigest()[:16]


class FimDataset:
    """The samples of a dataset with rearranged documents.

    backend: the tokenizer of the library `tokenizers`.
    seed: the first numbers of the seed of each sample.
    Raises InputError if a token is not in the vocabulary.
    """

    def __init__(self, dataset: Dataset, data: DataConfig, backend: Any, *seed: int) -> None:
        self.dataset, self.data, self.backend, self.seed = dataset, data, backend, seed
        self.documents = dataset.documents
        self.untouched = () if data.fim_no_prefix is None else (data.fim_no_prefix,)
        ids: list[Any] = []
        for flag, name in {
            "--fim-prefix-token": data.fim_prefix_token,
            "--fim-middle-token": data.fim_middle_token,
            "--fim-suffix-token": data.fim_suffix_token,
            "--fim-pad-token": data.fim_pad_token,
            "--fim-eod-token": data.fim_eod_token,
            "--fim-split-sample": data.fim_split_sample,
        }.items():
            ids.append(None if name is None else backend.token_to_id(name))
            if name is not None and ids[-1] is None:
                raise InputError(f"{flag} {name} is no token of the tokenizer: name one")
        self.prefix, self.middle, self.suffix, self.pad, self.eod, self.split = ids

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> ndarray:
        """Returns the token ids of a sample, [seq_length + 1] int64."""
        sample = self.dataset[index]
        random = np.random.RandomState([*self.seed, index])
        found = [*_joined(sample, self.eod, self._document, random), *[self.pad] * len(sample)]
        return np.array(found[: len(sample)])

    def _document(self, ids: ndarray, random: Any) -> ndarray:
        data = self.data
        if self.split not in ids:
            return self._rearranged(ids, random, data.fim_rate)
        if not random.binomial(1, data.fim_rate):
            return ids
        return _joined(ids, self.split, self._rearranged, random, data.fim_fragment_rate)

    def _rearranged(self, ids: ndarray, random: Any, rate: float) -> ndarray:
        if not random.binomial(1, rate):
            return ids
        text = self.backend.decode(ids)  # without special tokens
        if text.startswith(self.untouched):
            return ids
        start, stop = sorted(random.randint(0, len(text) + 1, size=2))
        prefix, middle, suffix = (
            self.backend.encode(part, add_special_tokens=False).ids
            for part in (text[:start], text[start:stop], text[stop:])
        )
        if random.binomial(1, self.data.fim_spm_rate):
            before = [self.prefix, self.suffix, *suffix, self.middle, *prefix]
        else:
            before = [self.prefix, *prefix, self.suffix, *suffix, self.middle]
        return np.array([*before, *middle])


def _joined(ids: ndarray, token: int, rearrange: Callable[..., ndarray], *others: Any) -> ndarray:
    """Returns the parts between the tokens, each of them rearranged, and the tokens."""
    *parts, last = np.split(ids, np.flatnonzero(ids == token) + 1)
    found = [np.append(rearrange(part[:-1], *others), token) for part in parts if len(part) > 1]
    return np.concatenate([*found, rearrange(last, *others)])
