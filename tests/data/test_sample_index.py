from __future__ import annotations

import numpy as np

from megatron_lite.data.gpt_dataset import SampleIndex, build_sample_index
from tests.support.pairs import in_one_test


def naive(
    lengths: list[int], first: int, num_samples: int | None, seq_length: int, seed: int
) -> SampleIndex:
    """The rules, one token at a time."""
    tokens = sum(lengths)
    epochs = 1
    while num_samples is not None and epochs * tokens < num_samples * seq_length + 1:
        epochs += 1
    whole = ((epochs - 1) * tokens - 1) // seq_length
    apart = (
        epochs > 1
        and num_samples is not None
        and num_samples - whole < int(0.8 * ((tokens - 1) // seq_length))
    )
    random = np.random.RandomState(seed)
    order = []
    for repeats in (epochs - 1, 1) if apart else (epochs,):
        part = np.array(
            [first + place for _ in range(repeats) for place in range(len(lengths))], dtype=np.int32
        )
        random.shuffle(part)
        order += part.tolist()
    tape = [
        (place, offset)
        for place, document in enumerate(order)
        for offset in range(lengths[document - first])
    ]
    starts = [tape[start] for start in range(0, len(tape), seq_length)]
    samples = (len(tape) - 1) // seq_length
    shuffled = []
    for part in (np.arange(whole), np.arange(whole, samples)) if apart else (np.arange(samples),):
        part = part.astype(np.uint32)
        random.shuffle(part)
        shuffled += part.tolist()
    return SampleIndex(np.array(order), np.array(starts[: samples + 1]), np.array(shuffled))


@in_one_test("case", range(300))
def test_index_equals_a_walk_over_every_token(case: int) -> None:
    random = np.random.RandomState(case)
    lengths = random.randint(1, 12, size=random.randint(1, 9))
    seq_length = int(random.randint(1, 8))
    num_samples = None if case % 10 == 0 else int(random.randint(1, 40))
    if lengths.sum() < seq_length + 1:
        seq_length = 1
        lengths[0] += 1
    first = int(random.randint(5))
    built = build_sample_index(
        lengths.astype(np.int32),
        first_document=first,
        num_samples=num_samples,
        seq_length=seq_length,
        seed=case,
    )
    expected = naive(lengths.tolist(), first, num_samples, seq_length, case)
    for array, reference in zip(built, expected, strict=True):
        np.testing.assert_array_equal(array, reference)
    assert num_samples is None or len(built.sample_order) >= num_samples
