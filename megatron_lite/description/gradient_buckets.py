"""The places of gradients in the flat buckets of a rank.

    [ gradients that TP ranks must add | all others | padding ]       one bucket

optim/grad_buffer.py allocates the buckets, and memory/predict/states.py counts their bytes.
Standard library only.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .operations import Parameter

ALIGNMENT = 32  # elements: 128 bytes, so that vectorised kernels take their fast path on every view


class BucketLayout(NamedTuple):
    """The places of the gradients of one bucket. All numbers are elements.

    places[name]: the elements of one gradient.
    num_partial: the first `num_partial` elements are gradients that TP ranks must add.
    num_elements: the elements of the bucket, with padding.
    shards: the number of ranks that each hold an equal part of the sums.
    """

    places: dict[str, slice]
    num_partial: int
    num_elements: int
    shards: int

    def own(self, rank: int) -> slice:
        """Returns the elements of which a rank holds the sum."""
        return slice(
            rank * self.num_elements // self.shards, (rank + 1) * self.num_elements // self.shards
        )

    def own_part(self, name: str, rank: int) -> slice:
        """Returns the elements of a flattened parameter of which a rank holds the sum.

        The slice has start >= stop if the rank holds none.
        """
        own, place = self.own(rank), self.places[name]
        return slice(max(own.start - place.start, 0), min(own.stop, place.stop) - place.start)


def bucket_layouts(
    gradients: Sequence[Parameter], *, bucket_size: int | None, shards: int, expert_shards: int
) -> list[BucketLayout]:
    """Returns the layouts of all buckets of a rank, in the order in which they are reduced.

    gradients: the parameters whose gradients these are, in the order of the model. `of_experts`
        are those whose gradients another group of ranks adds than all others.
    bucket_size: None puts all gradients into one bucket. Otherwise they go in reverse order, and a
        bucket is closed as soon as it has `bucket_size` elements.
    shards, expert_shards: the number of ranks that share the sums, and those of `of_experts`.
        Such gradients have buckets of their own.
    A parameter that two pipeline stages share has a bucket of its own. Otherwise the two stages
    would cut it into different pieces.
    """
    filled = []
    others = [one for one in gradients if not one.tied]
    others = others if bucket_size is None else others[::-1]
    for of_experts in (False, True):
        bucket: list[Parameter] = []
        for gradient in others:
            if gradient.of_experts != of_experts:
                continue
            if bucket_size is not None and sum(one.num_elements for one in bucket) >= bucket_size:
                bucket = []
            if not bucket:
                filled.append(bucket)
            bucket.append(gradient)
    # A bucket is complete with its last gradient.
    filled.sort(key=lambda bucket: others.index(bucket[-1]))
    # On the first stage the embedding's gradient arrives last, so its bucket comes last. The two
    # stages reduce over different groups of ranks, so their orders need not match.
    tied = [[one] for one in gradients if one.tied]
    return [
        _layout(bucket, expert_shards if bucket[0].of_experts else shards)
        for bucket in (*filled, *tied)
    ]


def _layout(gradients: Iterable[Parameter], shards: int) -> BucketLayout:
    places = {}
    num_partial = total = 0
    for gradient in sorted(gradients, key=lambda one: not one.partial):  # the sort is stable
        places[gradient.name] = slice(total, total + gradient.num_elements)
        total = _round_up(total + gradient.num_elements, ALIGNMENT)
        if gradient.partial:
            num_partial = total
    # Every rank's part must be equally long, and each must start at an aligned element.
    total = _round_up(total, ALIGNMENT * shards)
    return BucketLayout(places, num_partial, total, shards)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
