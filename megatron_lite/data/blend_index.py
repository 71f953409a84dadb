"""The order in which a blend reads its datasets: Megatron's greedy rule, number for number.

Sample n comes from the dataset with the largest error, weight * max(n, 1) - count, and from the
first of several equal ones. count: how many samples that dataset has provided so far. Each sample
depends on the counts before it, so that the rule looks sequential. A Python loop over it takes 1 to
10 microseconds a sample.

Here the samples are cut into rows of equal length, and NumPy takes the same step of every row at
once. A row needs the counts at its start. They are guessed first: the shares, rounded, a few
thousand samples before the row. From there the rule itself runs up to the row. Two sequences of
counts that take different datasets at the same n come closer together by it, and once they are
equal they stay equal.

The result does not depend on the guess. A row whose counts at the start differ from those at the
end of the row before it is computed again from these, until no row differs. Row 0 starts from the
true counts, so by induction every row then has the values that the loop computes, in the same
float64 operations: one product, one difference, the first maximum.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_lite.data.index_cache import Allocate, Arrays, in_memory, kept_arrays

LOOPED = 1 << 16  # blends of fewer samples are not worth cutting
HEAD = 1 << 10  # samples before the first row; max(n, 1) is n after them
WARM_UP = 1 << 11  # samples before a row, from the guess to its start
SHORTEST_ROW = 4 * WARM_UP
STEPS = 256  # steps in which NumPy keeps the picks of all rows together
VALUES = 1 << 15  # rows times datasets: the arrays of a step fit the cache of a core
FEW_ROWS = 6  # so few rows are computed faster one by one, in Python
KEPT_FROM = 1 << 18  # blends of fewer samples are built faster than they are kept


class BlendIndex(NamedTuple):
    """The source of each sample of a blend.

    dataset: [n] int16, the number of the dataset.
    sample: [n] int64, the number of the sample within that dataset.
    """

    dataset: np.ndarray
    sample: np.ndarray


def kept_blend_index(
    weights: Sequence[float],
    size: int,
    *,
    data_cache_path: str | None,
    prefix: str,
    keep_from: int = KEPT_FROM,
) -> BlendIndex:
    """Returns `build_blend_index(weights, size)`. One process of a node builds and keeps it.

    It is kept where the sample index of `prefix` is (index_cache.kept_arrays). It depends on
    nothing but its two arguments.
    keep_from: a blend of fewer samples is built and not kept.
    """
    if size < keep_from:
        return build_blend_index(weights, size)

    def build(allocate: Allocate) -> Arrays:
        return build_blend_index(weights, size, allocate=allocate)._asdict()

    def fault(arrays: Arrays) -> str | None:
        return blend_index_fault(arrays, len(weights), size)

    key = {"kind": "blend index 1", "weights": [float(one).hex() for one in weights], "size": size}
    return BlendIndex(**kept_arrays(data_cache_path, prefix, key, build, fault=fault))


def build_blend_index(
    weights: Sequence[float], size: int, *, allocate: Allocate = in_memory
) -> BlendIndex:
    """Returns the sources of `size` samples.

    allocate: makes the two arrays of the result. Besides them a few MiB are used.
    """
    index = BlendIndex(
        allocate("dataset", (size,), np.int16), allocate("sample", (size,), np.int64)
    )
    shares = np.array(weights, np.float64)
    counts = np.zeros((1, len(shares)))
    rows = min(max(64, VALUES // len(shares)), (size - HEAD) // SHORTEST_ROW)
    head = size if size < LOOPED or rows <= max(1, FEW_ROWS) else HEAD
    index.dataset[:head], index.sample[:head] = _loop(shares, 0, counts[0], head)
    if head == size:
        return index
    length = (size - head) // rows
    stop = head + rows * length
    parts = BlendIndex(*(array[head:stop].reshape(rows, length) for array in index))
    last = _fill(shares, parts, head, counts)
    index.dataset[stop:], index.sample[stop:] = _loop(shares, stop, last, size - stop)
    return index


def blend_index_fault(arrays: Arrays, num_datasets: int, size: int) -> str | None:
    """Returns what is wrong with arrays that were read from files; None if nothing is."""
    expected = {"dataset": (np.int16, num_datasets), "sample": (np.int64, size)}
    if set(arrays) != set(expected):
        return f"found arrays {sorted(arrays)}, expected {sorted(expected)}"
    for name, (dtype, stop) in expected.items():
        array = arrays[name]
        if array.dtype != dtype or array.shape != (size,):
            return f"{name}: found {array.dtype} {array.shape}, expected {dtype.__name__} ({size},)"
        if not (array.min() >= 0 and array.max() < stop):
            return f"{name} holds {array.min()} to {array.max()}, expected 0 to {stop - 1}"
    return None


def _fill(shares: np.ndarray, parts: BlendIndex, head: int, counts: np.ndarray) -> np.ndarray:
    """Fills the rows [rows, length], which begin at sample `head`, where the counts are `counts`.

    Returns the counts behind the last row.
    """
    rows, length = parts.dataset.shape
    starts = head + length * np.arange(rows, dtype=np.float64)
    # `used` has the counts from which each row is filled, and `ends` those behind it. The rows are
    # right once each one begins with the counts behind the one before.
    used = np.concatenate([counts, _guessed(shares, starts[1:] - WARM_UP)])
    for before in range(-WARM_UP, 0, STEPS):
        _picks(shares, starts[1:] + before, used[1:], STEPS)
    ends = used.copy()
    for first in range(0, length, STEPS):
        last = min(first + STEPS, length)
        picks = _picks(shares, starts + first, ends, last - first)
        parts.dataset[:, first:last], parts.sample[:, first:last] = picks
    while (wrong := np.flatnonzero((used[1:] != ends[:-1]).any(axis=1)) + 1).size:
        if len(wrong) <= FEW_ROWS:
            wrong = wrong[:1]  # its end may decide whether the next one is wrong
        before_them = ends[wrong - 1]
        ends[wrong] += _refill(shares, parts, starts, wrong, before_them.copy(), used[wrong])
        used[wrong] = before_them
    return ends[-1]


def _refill(
    shares: np.ndarray,
    parts: BlendIndex,
    starts: np.ndarray,
    rows: np.ndarray,
    counts: np.ndarray,
    used: np.ndarray,
) -> np.ndarray:
    """Computes some rows again from `counts` at their starts, where they were filled from `used`.

    A row is finished as soon as its counts equal the former ones, because the rest of it is then
    correct. Returns by how much the counts behind the rows change, [rows, datasets].
    """
    length, k = parts.dataset.shape[1], len(shares)
    ahead = counts - used
    active = np.arange(len(rows))
    for first in range(0, length, STEPS):
        last = min(first + STEPS, length)
        now = rows[active]
        former = parts.dataset[now, first:last]
        mine = counts[active]
        picks = _picks(shares, starts[now] + first, mine, last - first)
        counts[active] = mine
        parts.dataset[now, first:last], parts.sample[now, first:last] = picks
        # One bincount for all rows: those of row i are the bins from i k on.
        place = k * np.arange(len(now))[:, None]
        for sign, taken in ((1, picks.dataset), (-1, former)):
            found = np.bincount((place + taken).ravel(), minlength=k * len(now))
            ahead[active] += sign * found.reshape(len(now), k)
        active = active[ahead[active].any(axis=1)]
        if not len(active):
            break
    return ahead


def _guessed(shares: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Returns counts near those of the rule at each of `starts`, whose sum is the start.

    The shares are rounded down, and those with the largest remainders up.
    """
    exact = starts[:, None] * shares
    counts = np.floor(exact)
    missing = starts - counts.sum(axis=1)
    order = np.argsort(counts - exact, axis=1, kind="stable")
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.arange(len(shares))[None, :], axis=1)
    counts += ranks < missing[:, None]
    # The shares' sum is 1 but for rounding, so that a few may be left over or missing.
    counts[:, int(np.argmax(shares))] += starts - counts.sum(axis=1)
    return counts


def _picks(shares: np.ndarray, starts: np.ndarray, counts: np.ndarray, steps: int) -> BlendIndex:
    """Returns the next `steps` samples of several rows, [rows, steps]. `counts` are advanced.

    starts: [rows], the number of each row's next sample, at least 1.
    counts: [rows, datasets], contiguous, the counts before it.
    """
    rows, k = counts.shape
    if rows <= FEW_ROWS:
        looped = [_loop(shares, int(starts[row]), counts[row], steps) for row in range(rows)]
        return BlendIndex(*map(np.stack, zip(*looped, strict=True)))
    # Every array is flat and full: NumPy is slow where it broadcasts over few values.
    weights, errors = np.tile(shares, (rows, 1)), np.empty((rows, k))
    numbers = np.repeat(starts[:, None], k, axis=1)
    first_places, places = np.arange(rows) * k, np.empty(rows, np.int64)
    flat_counts = counts.reshape(-1)
    dataset, sample = np.empty((steps, rows), np.int16), np.empty((steps, rows), np.int64)
    for step in range(steps):
        np.multiply(weights, numbers, out=errors)
        np.subtract(errors, counts, out=errors)
        chosen = errors.argmax(axis=1)
        dataset[step] = chosen
        np.add(first_places, chosen, out=places)
        taken = flat_counts[places]
        sample[step] = taken
        taken += 1.0
        flat_counts[places] = taken
        numbers += 1.0
    return BlendIndex(dataset.T, sample.T)


def _loop(shares: np.ndarray, start: int, counts: np.ndarray, steps: int) -> BlendIndex:
    """Returns the samples start <= n < start + steps by the rule as it is written.

    counts: [datasets], the counts before sample `start`; they are advanced.
    """
    weights, so_far = shares.tolist(), [int(count) for count in counts]
    dataset, sample = array("h"), array("q")
    for n in range(start, start + steps):
        scale = float(n or 1)
        # strict=True makes this a quarter slower.
        errors = [weight * scale - count for weight, count in zip(weights, so_far)]  # noqa: B905
        chosen = errors.index(max(errors))
        dataset.append(chosen)
        sample.append(so_far[chosen])
        so_far[chosen] += 1
    counts[:] = so_far
    return BlendIndex(np.array(dataset, np.int16), np.array(sample, np.int64))
