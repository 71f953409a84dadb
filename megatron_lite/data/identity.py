"""The identity of the data that a run reads, taken from the content of the files.

Two runs have equal identities if they read the same documents and split, weight and cut them alike.
The identity covers every byte of the .idx, the size of the .bin, and a sample of its bytes: a .bin
can hold terabytes. Files that were moved or copied keep their identity. The seed and the length of
a run are not part of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_lite.config.data_settings import DataConfig
from megatron_lite.data.blend import DataPath
from megatron_lite.data.data_paths import SplitPaths
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.splits import parse_split

SAMPLES, SAMPLE_BYTES = 64, 4096

DataIdentity = dict[str, Any]  # plain values, as JSON holds them


def identity_of_mock(data: DataConfig) -> DataIdentity:
    """Returns the identity of `--mock-data`."""
    return {"source": "--mock-data", "seq_length": data.seq_length}


def identity_of_files(
    data: DataConfig,
    paths: DataPath | SplitPaths,
    datasets: Sequence[Sequence[IndexedDataset] | None],
) -> DataIdentity:
    """Returns the identity of the parts of each split, in their order.

    datasets: the opened parts of each of the three splits; None for a split without data.
    """
    order = {} if data.dataloader_type == "single" else {"order": _order(data)}
    if isinstance(paths, DataPath):
        return {
            "source": "--data-path",
            "seq_length": data.seq_length,
            "split": list(parse_split(data.split)),
            **_parts(paths, datasets[0]),
            **order,
        }
    return {
        "source": "--train-data-path",
        "seq_length": data.seq_length,
        **{
            name: _parts(path, parts)
            for name, path, parts in zip(SplitPaths._fields, paths, datasets, strict=True)
        },
        **order,
    }


def _order(data: DataConfig) -> str:
    return f"{data.dataloader_type}, {'a range for each rank' if data.data_sharding else 'all'}"


def _parts(path: DataPath | None, datasets: Sequence[IndexedDataset] | None) -> dict[str, Any]:
    weights = None if path is None or path.weights is None else list(path.weights)
    return {"weights": weights, "files": [_content(one) for one in datasets or ()]}


def _content(dataset: IndexedDataset) -> str:
    digest = hashlib.sha256(dataset.fingerprint.encode())
    content = dataset.tokens.view(np.uint8)
    for start in np.linspace(
        0, max(0, content.nbytes - SAMPLE_BYTES), SAMPLES, dtype=np.int64
    ).tolist():
        digest.update(content[start : start + SAMPLE_BYTES].tobytes())
    return digest.hexdigest()[:16]
