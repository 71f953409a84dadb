"""The gradients of a rank in flat buckets, float32 (float64 for a float64 model).

    [ gradients that TP ranks must add | all others | padding ]       one bucket

Backward accumulates in the buckets, and a bucket is reduced over data-parallel ranks as a whole.

The first gradient of a step is copied into the parameter's view of its bucket, and `.grad` becomes
that view. The view therefore needs no zeroing. Later micro-batches add to it. The `.grad` of a
16-bit parameter is float32 too (`grad_dtype`): each micro-batch's gradient is rounded to 16 bits
once, and the sum is in float32.

Without overlap one bucket holds all gradients (a tied weight has its own), and it is reduced after
the last backward. With overlap the buckets are several, in the reverse order of the parameters'
use. Each is sent as soon as the last micro-batch has added to all of it, while backward goes on.

All sums commute. Without overlap gradients are summed over TP first and then over data-parallel
ranks. With overlap the order is the other way round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from megatron_lite.config.data_parallel import DataParallelConfig
from megatron_lite.parallel.collectives import (
    Started,
    all_reduce_,
    start_all_reduce_,
    start_reduce_scatter_own_part_,
)
from megatron_lite.parallel.parameter_spec import spec_of
from megatron_lite.parallel.state import ParallelState

ALIGNMENT = 32  # elements: 128 bytes, so that vectorised kernels take their fast path on every view


class Bucket:
    """Gradients that are reduced together.

    places[name]: the elements of `flat` that belong to a parameter.
    num_partial: the first `num_partial` elements are gradients that TP ranks must add.
    own: the elements of which this rank holds the sum: all of them, or 1/shards.
    awaited: the parameters whose last gradient of the step has not arrived.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        device: torch.device,
        rank: int,
        shards: int,
    ) -> None:
        # stable
        ordered = sorted(parameters.items(), key=lambda item: not spec_of(item[1]).sum_grad_over_tp)
        self.places: dict[str, slice] = {}
        self.num_partial = total = 0
        for name, parameter in ordered:
            self.places[name] = slice(total, total + parameter.numel())
            total = _round_up(total + parameter.numel(), ALIGNMENT)
            if spec_of(parameter).sum_grad_over_tp:
                self.num_partial = total
        # Every rank's part must be equally long, and each must start at an aligned element.
        total = _round_up(total, ALIGNMENT * shards) if shards > 1 else total
        self.tied = any(spec_of(parameter).tied for parameter in parameters.values())
        self.flat = torch.zeros(
            total, dtype=torch.promote_types(torch.float32, ordered[0][1].dtype), device=device
        )
        self.own = slice(rank * total // shards, (rank + 1) * total // shards)
        self.awaited = set(parameters)
        self.started: Started | None = None

    def own_part(self, name: str, rank: int | None = None) -> slice:
        """Returns the elements of a flattened parameter of which a rank holds the sum.

        rank: None for this rank. The slice has start >= stop if the rank holds none.
        """
        length = self.own.stop - self.own.start
        first = self.own.start if rank is None else rank * length
        place = self.places[name]
        return slice(max(first - place.start, 0), min(first + length, place.stop) - place.start)


class GradBuffer:
    """The owner of the gradients of the given parameters.

    grads[name]: the float32 view of a parameter's gradient. With a distributed optimizer only this
        rank's part of each bucket (`Bucket.own`) is valid after `reduce_`.
    own_norm: see Gradients. It costs another pass over the gradients.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        parallel: ParallelState,
        config: DataParallelConfig | None = None,
    ) -> None:
        self._parallel, self._config = parallel, config or DataParallelConfig()
        self._overlaps = self._config.overlap_grad_reduce and parallel.dp_cp_group is not None
        self.shards = parallel.dp_cp_size if self._config.use_distributed_optimizer else 1
        size = self._config.bucket_size(parallel.dp_cp_size) if self._overlaps else None
        self.buckets = [
            Bucket(
                chosen,
                device=parallel.device,
                rank=parallel.dp_cp_rank if self.shards > 1 else 0,
                shards=self.shards,
            )
            for chosen in _by_bucket(parameters, size)
        ]
        self._parameters = dict(parameters)
        self.bucket_of = {name: bucket for bucket in self.buckets for name in bucket.places}
        self.grads: dict[str, Tensor] = {}
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._last: set[str] = set()  # the parameters whose next gradient is the last of this step
        self._num_started = 0
        self._measures_own_norm = False
        self._own_norms: list[Tensor] = []
        self.own_norm: Tensor | None = None
        for name, parameter in parameters.items():
            bucket = self.bucket_of[name]
            self.grads[name] = bucket.flat[bucket.places[name]].view_as(parameter)
            self._accumulate(name, parameter, self.grads[name])

    def measure_own_norm(self) -> None:
        """See Gradients."""
        self._measures_own_norm = self._parallel.dp_cp_group is not None

    def forget(self) -> None:
        """Begins a step: drops the gradients that the buffer holds."""
        for name, parameter in self._parameters.items():
            parameter.grad = None
            if not _autograd_sums_into(parameter, self.grads[name]):
                self.grads[name].zero_()

    def sync_next_backward(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Declares that the next gradient of these parameters is the last of this step.

        With overlap a bucket is sent once all of its last gradients have arrived.
        parameters: None for all.
        """
        if self._overlaps:
            self._last.update(
                self._names.values()
                if parameters is None
                else (self._names[one] for one in parameters)
            )

    def reduce_(self) -> None:
        """Completes the gradients after the last backward.

        Sums partial gradients over the TP ranks, those of a tied weight over the first and last
        pipeline stage, and all of them over the data-parallel ranks.
        """
        # The view of a parameter without a gradient in this step still holds older values.
        for name, parameter in self._parameters.items():
            if parameter.grad is None and _autograd_sums_into(parameter, self.grads[name]):
                parameter.grad = self.grads[name].zero_()
        # The own norms are taken before any sum over ranks overwrites the buckets.
        for bucket in self.buckets[self._num_started :]:
            self._add_own_norm(bucket)
        if not self._overlaps:
            self._sum_over_model(slice(None))
        for bucket in self.buckets[self._num_started :]:
            self._start(bucket)
        for bucket in self.buckets:
            self._finish(bucket)
        if self._overlaps:
            self._sum_over_model(None)
        self._num_started = 0
        self._last.clear()
        self.own_norm = torch.stack(self._own_norms).norm() if self._own_norms else None
        self._own_norms.clear()

    def _sum_over_model(self, part: slice | None) -> None:
        """Sums over the TP ranks, and a tied weight's gradient over the first and last stage.

        part: which elements of each bucket; None: those of which this rank holds the sum. One
        all-reduce for each bucket with such gradients.
        """
        for bucket in self.buckets:
            first, last, _ = (bucket.own if part is None else part).indices(bucket.flat.numel())
            if first < bucket.num_partial:
                all_reduce_(
                    bucket.flat[first : min(last, bucket.num_partial)], self._parallel.tp_group
                )
            if bucket.tied:
                all_reduce_(bucket.flat[first:last], self._parallel.embedding_group)

    def _accumulate(self, name: str, parameter: nn.Parameter, view: Tensor) -> None:
        """Registers the hook that puts every gradient of the parameter into the view."""

        # For a 16-bit parameter in a torch without grad_dtype: `.grad` has the parameter's dtype,
        # so the hook adds it to the float32 view and frees it.
        def add_and_drop(owner: Tensor) -> None:
            assert owner.grad is not None
            view.add_(owner.grad)
            owner.grad = None
            self._arrived(name)

        # The first gradient of a step is a tensor of autograd's own. The hook copies it and makes
        # `.grad` the view, so autograd adds later gradients in place and nothing needs zeroing.
        def adopt_first(owner: Tensor) -> None:
            assert owner.grad is not None
            if owner.grad.data_ptr() != view.data_ptr():
                view.copy_(owner.grad)
                owner.grad = view
            self._arrived(name)

        if not _autograd_sums_into(parameter, view):
            parameter.register_post_accumulate_grad_hook(add_and_drop)
            return
        if parameter.dtype != view.dtype:
            parameter.grad_dtype = view.dtype
        parameter.register_post_accumulate_grad_hook(adopt_first)

    def _arrived(self, name: str) -> None:
        """Begins to reduce complete buckets, in their order.

        The order is the same on every rank; otherwise the ranks' collectives would not match.
        """
        bucket = self.bucket_of[name]
        if bucket.started is not None:
            raise RuntimeError(
                f"--overlap-grad-reduce: another gradient of {name} came after its bucket was "
                "sent: a parameter must get all of its gradient at once in the last micro-batch of "
                "a step"
            )
        if name in self._last:
            bucket.awaited.discard(name)
            while (
                self._num_started < len(self.buckets)
                and not self.buckets[self._num_started].awaited
            ):
                self._add_own_norm(self.buckets[self._num_started])
                self._start(self.buckets[self._num_started])
                self._num_started += 1

    def _add_own_norm(self, bucket: Bucket) -> None:
        if self._measures_own_norm:
            self._own_norms.append(bucket.flat.norm())

    def _start(self, bucket: Bucket) -> None:
        """Begins the sum over the data-parallel ranks.

        It is a reduce-scatter with a distributed optimizer, else an all-reduce.
        """
        group = self._parallel.dp_cp_group
        sent = (
            bucket.flat.bfloat16()
            if self._config.grad_reduce_in_bf16 and group is not None
            else bucket.flat
        )
        if group is not None and self.shards > 1:
            bucket.started = start_reduce_scatter_own_part_(sent, group)
        else:
            bucket.started = start_all_reduce_(sent, group)

    def _finish(self, bucket: Bucket) -> None:
        assert bucket.started is not None
        reduced = bucket.started.wait()
        if reduced.dtype != bucket.flat.dtype:
            bucket.flat[bucket.own].copy_(reduced)
        bucket.started, bucket.awaited = None, set(bucket.places)


def _by_bucket(
    parameters: Mapping[str, nn.Parameter], size: int | None
) -> list[dict[str, nn.Parameter]]:
    """Splits the parameters into buckets.

    size: None puts all into one bucket. Otherwise the parameters go in reverse order, and a bucket
        is closed as soon as it has `size` elements.
    A parameter that two pipeline stages share has a bucket of its own. Otherwise the two stages
    would cut it into different pieces.
    """
    buckets: list[dict[str, nn.Parameter]] = [{}]
    tied = {name: parameter for name, parameter in parameters.items() if spec_of(parameter).tied}
    others = [item for item in parameters.items() if item[0] not in tied]
    for name, parameter in others if size is None else reversed(others):
        if size is not None and sum(one.numel() for one in buckets[-1].values()) >= size:
            buckets.append({})
        buckets[-1][name] = parameter
    # On the first stage the embedding's gradient arrives last, so its bucket comes last. The two
    # stages reduce over different groups of ranks, so their orders need not match.
    return [
        bucket
        for bucket in (*buckets, *({name: parameter} for name, parameter in tied.items()))
        if bucket
    ]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _autograd_sums_into(parameter: nn.Parameter, view: Tensor) -> bool:
    """Returns whether `.grad` may be the view.

    It may not for a 16-bit parameter in a torch without `grad_dtype`.
    """
    return parameter.dtype == view.dtype or hasattr(parameter, "grad_dtype")
