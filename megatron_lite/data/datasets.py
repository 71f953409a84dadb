"""Builds the three datasets of a run from a DataConfig (token_datasets.py: those of token files).

Mock data (`--mock-data`) needs no files. It follows a rule that a model can learn, so that a
falling loss shows that training works. It uses up to 64 ids, spread evenly over the vocabulary so
that every tensor-parallel rank owns some of them. The id at place i is followed by the id at place
i + 7 (mod their number), but one time in ten by a random id. A model that has learned this rule
reaches a loss of about 0.73 nats per token. A model that does not know which of the 64 ids comes
next has 4.16.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np

from megatron_lite.config.data_settings import DataConfig, TokenizerConfig

DataIdentity = dict[str, Any]  # plain values, as JSON holds them


class Dataset(Protocol):
    """A map from a sample's number to its token ids [seq_length + 1], int64."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> np.ndarray: ...

    def documents(self, index: int, /) -> dict[str, list[int]]:
        """Returns the numbers of a sample's documents, by .bin file; {} if no file exists."""


class Datasets(NamedTuple):
    """The datasets of a run, and their identity.

    valid and test are None if the split holds no documents, or if no samples were requested.
    """

    train: Dataset
    valid: Dataset | None
    test: Dataset | None
    identity: DataIdentity


def build_datasets(
    data: DataConfig,
    *,
    vocab_size: int,
    seed: int,
    num_samples: tuple[int, int, int],
    tokenizer: TokenizerConfig | None = None,
) -> Datasets:
    """Returns datasets of at least `num_samples` samples each, for train, valid and test.

    tokenizer: that of the files, for --fim-data.
    Raises InputError if the config names no data, or if its files are faulty.
    """
    if data.mock_data:
        # numpy's seeds have 32 bits
        train, *others = (
            MockDataset(count, data.seq_length, vocab_size, (seed + place) % 2**32)
            for place, count in enumerate(num_samples)
        )
        valid, test = (one if len(one) else None for one in others)
        mock = {"source": "--mock-data", "seq_length": data.seq_length}
        return Datasets(train, valid, test, mock)
    # Imported late: mock data need no reader of files.
    from .token_datasets import token_datasets

    return token_datasets(data, vocab_size, seed, num_samples, tokenizer)


NUM_IDS, STEP, JUMP_PROBABILITY = 64, 7, 0.1


class MockDataset:
    """`num_samples` samples of seq_length + 1 ids.

    Each sample depends only on (seed, index), in every version of numpy.
    """

    def __init__(self, num_samples: int, seq_length: int, vocab_size: int, seed: int) -> None:
        self.num_samples, self.seq_length, self.seed = num_samples, seq_length, seed
        count = min(NUM_IDS, vocab_size)
        self.ids = np.arange(count, dtype=np.int64) * vocab_size // count

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> np.ndarray:
        """Returns the token ids of a sample, [seq_length + 1] int64."""
        random = np.random.RandomState([self.seed, range(self.num_samples)[index]])
        length = self.seq_length + 1
        # A jump lands on a random id, and each later place follows it by the rule until the next
        # jump. The first place counts as a jump, so that every sample begins at a random id.
        jumps = random.random_sample(length) < JUMP_PROBABILITY
        jumps[0] = True
        landings = random.randint(len(self.ids), size=length)
        positions = np.arange(length)
        last_jump = np.maximum.accumulate(np.where(jumps, positions, 0))
        return self.ids[(landings[last_jump] + STEP * (positions - last_jump)) % len(self.ids)]

    def documents(self, index: int) -> dict[str, list[int]]:
        """Returns {}, because mock data has no files."""
        return {}
