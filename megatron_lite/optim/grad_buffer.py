"""The gradients of a rank in flat buckets, float32 (float64 for a float64 model).

description/gradient_buckets.py defines the place of each gradient in its bucket. Backward
accumulates in the buckets, and a bucket is reduced over data-parallel ranks as a whole.

The first gradient of a step is copied into the parameter's view of its bucket, and `.grad` becomes
that view. The view therefore needs no zeroing. Later micro-batches add to it. The `.grad` of a
16-bit parameter is float32 too (`grad_dtype`): each micro-batch's gradient is rounded to 16 bits
once, and the sum is in float32.

Without overlap one bucket holds all gradients (a tied weight has its own), and it is reduced after
the last backward. With overlap the buckets are several, in the reverse order of the parameters'
use. Each is sent as soon as the last micro-batch has added to all of it, while backward goes on.

With `host` each final gradient is given to it: while backward goes on, if no sum over TP ranks or
the pipeline's ends follows, and no sum over data-parallel ranks without overlap. A bucket is given
when the next one has been sent.

All sums commute. Without overlap gradients are summed over TP first and then over data-parallel
ranks. With overlap the order is the other way round.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_lite.config.parallel import DataParallelConfig
from megatron_lite.description.gradient_buckets import BucketLayout, bucket_layouts
from megatron_lite.description.operations import Parameter
from megatron_lite.parallel.collectives import (
    Started,
    all_reduce_,
    start_all_reduce_,
    start_reduce_scatter_into_,
)
from megatron_lite.parallel.parameter_spec import spec_of
from megatron_lite.parallel.state import ParallelState
from megatron_lite.parallel.torch_internals import foreach_copy_

from .host_link import HostLink


class Bucket:
    """Gradients that are reduced together.

    layout: the places of the gradients in `flat`; `places` has them by parameter.
    own: the elements of which this rank holds the sum: all of them, or 1/shards.
    shard_group: the ranks that share out the sums; None for none. rank: this rank's place in it.
    others: the ranks that hold the same sums and add up theirs; None for none.
    tied: whether it holds the gradient that the first and the last pipeline stage add.
    awaited: the parameters whose last gradient of the step has not arrived.
    """

    def __init__(
        self, layout: BucketLayout, flat: Tensor, place: ParallelState, *, tied: bool
    ) -> None:
        self.layout, self.flat, self.tied = layout, flat, tied
        self.shard_group, self.others, self.rank = None, place.dp_cp_group, 0
        if layout.shards > 1:
            self.shard_group, self.others = place.shard_group, place.replica_group
            self.rank = place.shard_rank
        self.places, self.own = layout.places, layout.own(self.rank)
        self.awaited = set(layout.places)


class _Gradient(NamedTuple):
    """The gradient of one parameter, and its view of a bucket.

    adds: whether a hook adds each gradient to the view. Otherwise `.grad` becomes the view. It
        cannot for 16-bit parameters in a torch without `grad_dtype`.
    """

    parameter: nn.Parameter
    view: Tensor
    adds: bool


class GradBuffer:
    """The owner of the gradients of the given parameters. Every rank must make every call.

    sums_in: "fp32", or "bf16" for sums over micro-batches and ranks in bfloat16.
    grads[name]: the float32 view of a parameter's gradient. With a distributed optimizer only this
        rank's part of each bucket (`Bucket.own`) is valid after `reduce_`.
    own_norm: the 2-norm, 0-d, of this rank's gradients before the sum over data-parallel ranks. It
        is None without `measure_own_norm`.
    host: takes a copy of each gradient once it is final.
    """

    host: HostLink | None = None

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        parallel: ParallelState,
        config: DataParallelConfig | None = None,
        sums_in: str = "fp32",
    ) -> None:
        config = config or DataParallelConfig()
        self._parallel, experts = parallel, parallel.experts
        self._overlaps = config.overlap_grad_reduce and parallel.dp_cp_group is not None
        # On a GPU one launch at the end of a step copies the gradients of all vectors into place.
        self._vectors_wait = parallel.device.type != "cpu" and not self._overlaps
        self._sums_over_model = parallel.tp_size * parallel.pp_size > 1
        self._in_bf16 = config.grad_reduce_in_bf16
        sharded = config.use_distributed_optimizer and parallel.shard_group is not None
        specs = {name: spec_of(parameter) for name, parameter in parameters.items()}
        self.buckets = []
        for layout in bucket_layouts(
            [
                Parameter(
                    name,
                    parameters[name].shape,
                    spec.sum_grad_over_tp,
                    spec.tied,
                    spec.of_experts and experts is not None,
                )
                for name, spec in specs.items()
            ],
            bucket_size=config.bucket_size(parallel.dp_cp_size) if self._overlaps else None,
            shards=parallel.shard_size if sharded else 1,
            expert_shards=experts.shard_size if sharded and experts is not None else 1,
        ):
            first = next(iter(layout.places))
            wide = torch.promote_types(torch.float32, parameters[first].dtype)
            dtype = torch.bfloat16 if sums_in == "bf16" else wide
            flat = torch.zeros(layout.num_elements, dtype=dtype, device=parallel.device)
            spec = specs[first]
            self.buckets.append(Bucket(layout, flat, parallel.holding(spec), tied=spec.tied))
        self._reduces = any(one.shard_group or one.others for one in self.buckets)
        # The sum over others begins once this rank's share is there: a stream waits, not backward.
        on_gpu = parallel.device.type == "cuda"
        follows = sharded and on_gpu and self._overlaps and parallel.num_instances > 1
        self._side = torch.cuda.Stream(parallel.device) if follows else None
        self.bucket_of = {name: bucket for bucket in self.buckets for name in bucket.places}
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._last: set[str] = set()  # the parameters whose next gradient is the last of this step
        self._unsent = [*self.buckets]  # those whose sums have not begun
        self._sums: dict[Bucket, Started] = {}  # those under way
        self._given: set[str] = set()  # the parameters whose gradients the host has
        self._measures_own_norm = False
        self._own_norms: list[Tensor] = []
        self.own_norm: Tensor | None = None
        self._gradients = {name: self._new(name, one) for name, one in parameters.items()}
        self.grads = {name: one.view for name, one in self._gradients.items()}

    def measure_own_norm(self) -> None:
        """Makes each `reduce_` set `own_norm`, at the cost of a pass over the gradients.

        It has no effect without other data-parallel ranks.
        """
        self._measures_own_norm = self._reduces

    def forget(self) -> None:
        """Begins a step: drops the gradients that the buffer holds."""
        for one in self._gradients.values():
            one.parameter.grad = None
            if one.adds:  # from the first gradient on
                one.view.zero_()

    def sync_next_backward(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Declares that the next gradient of these parameters is the last of this step.

        With overlap a bucket is sent once all of its last gradients have arrived. Without this call
        `reduce_` begins the reductions. parameters: None for all.
        """
        if self._overlaps or self.host is not None:
            chosen = self._names if parameters is None else parameters
            self._last.update(self._names[one] for one in chosen)

    def reduce_(self) -> None:
        """Completes the gradients after the last backward.

        Sums partial gradients over the TP ranks, those of a tied weight over the first and last
        pipeline stage, and all of them over the data-parallel ranks.
        """
        if self.host is not None:
            self.host.join()
        # Gradients that are tensors of autograd's own are copied into the views.
        own = [
            one
            for one in self._gradients.values()
            if self._waits(one) and one.parameter.grad is not None
        ]
        if own:
            foreach_copy_([one.view for one in own], [one.parameter.grad for one in own])
        for parameter, view, adds in self._gradients.values():
            if adds:
                continue
            if parameter.grad is None:  # the view still holds an older step's values
                view.zero_()
            parameter.grad = view
        # The own norms are taken before any sum over ranks overwrites the buckets.
        if self._measures_own_norm:
            self._own_norms += [bucket.flat.norm() for bucket in self._unsent]
        if self._sums_over_model and not self._overlaps:
            self._sum_over_model()
        if self._reduces:
            for bucket in self._unsent:
                self._start(bucket)
            self._complete([*self._sums])
            for bucket in self.buckets:
                bucket.awaited = set(bucket.places)
        if self._sums_over_model and self._overlaps:
            self._sum_over_model()
        if self.host is not None:
            for name in self.grads.keys() - self._given:
                self.host.take(name)
            self.host.join()
        self._unsent = [*self.buckets]
        self._given.clear()
        self._last.clear()
        self.own_norm = torch.stack(self._own_norms).norm() if self._own_norms else None
        self._own_norms.clear()

    def _waits(self, gradient: _Gradient) -> bool:
        """Returns whether the gradient is copied into its view at the end of the step."""
        return self._vectors_wait and gradient.view.dim() == 1 and not gradient.adds

    def _sum_over_model(self) -> None:
        """Sums over the TP ranks, and a tied weight's gradient over the first and last stage.

        Issues one all-reduce for each bucket with such gradients. With overlap it sums the
        elements of which this rank holds the sum over data-parallel ranks, else all.
        """
        for bucket in self.buckets:
            part = bucket.own if self._overlaps else slice(None)
            first, last, _ = part.indices(bucket.flat.numel())
            # The gradients that TP ranks must add come first in a bucket.
            if first < bucket.layout.num_partial:
                all_reduce_(
                    bucket.flat[first : min(last, bucket.layout.num_partial)],
                    self._parallel.tp_group,
                )
            if bucket.tied:
                all_reduce_(bucket.flat[first:last], self._parallel.embedding_group)

    def _new(self, name: str, parameter: nn.Parameter) -> _Gradient:
        """Registers the hook that puts every gradient of the parameter into its view."""
        bucket = self.bucket_of[name]
        view = bucket.flat[bucket.places[name]].view_as(parameter)
        adds = parameter.dtype != view.dtype and not hasattr(parameter, "grad_dtype")
        if parameter.dtype != view.dtype and not adds:
            parameter.grad_dtype = view.dtype
        own = _Gradient(parameter, view, adds)

        # The first gradient of a step is a tensor of autograd's own. The hook copies it and makes
        # `.grad` the view, so autograd adds later gradients in place and nothing needs zeroing.
        # For a 16-bit parameter in a torch without grad_dtype, `.grad` has the parameter's dtype,
        # so the hook adds every gradient to the float32 view and frees it.
        def collect(owner: Tensor) -> None:
            assert owner.grad is not None
            if owner.grad is not view and not self._waits(own):
                (view.add_ if adds else view.copy_)(owner.grad)
                owner.grad = None if adds else view
            if self._overlaps or self.host is not None:
                self._arrived(name)

        parameter.register_post_accumulate_grad_hook(collect)
        return own

    def _arrived(self, name: str) -> None:
        """Begins to reduce complete buckets, in their order, and gives the host what is final.

        The order is the same on every rank; otherwise the ranks' collectives would not match.
        """
        if self.bucket_of[name] not in self._unsent or name in self._given:
            raise RuntimeError(
                f"--overlap-grad-reduce, --overlap-cpu-optimizer-d2h-h2d: another gradient of "
                f"{name} came after it was sent: a parameter must get all of its gradient at once "
                "in the last micro-batch of a step"
            )
        if name not in self._last:
            return
        if not self._reduces and not self._waits(self._gradients[name]):
            self._give(name)
        self.bucket_of[name].awaited.discard(name)
        while self._overlaps and self._unsent and not self._unsent[0].awaited:
            bucket = self._unsent.pop(0)
            if self._measures_own_norm:
                self._own_norms.append(bucket.flat.norm())
            self._start(bucket)
            if self.host is not None:
                with self.host.aside():
                    self._complete([*self._sums][:-1])

    def _complete(self, buckets: Iterable[Bucket]) -> None:
        """Waits for the sums of the buckets, and gives them to the host."""
        for bucket in buckets:
            reduced = self._sums.pop(bucket).wait()
            if reduced.dtype != bucket.flat.dtype:  # it was sent in bf16
                bucket.flat[bucket.own].copy_(reduced)
            for name in bucket.places:
                self._give(name)

    def _give(self, name: str) -> None:
        """Gives a gradient to the host, unless `_sum_over_model` changes it yet."""
        bucket = self.bucket_of[name]
        is_partial = bucket.places[name].start < bucket.layout.num_partial
        group = self._parallel.embedding_group if bucket.tied else None
        group = self._parallel.tp_group if is_partial and group is None else group
        if self.host is not None and group is None:
            self.host.take(name)
            self._given.add(name)

    def _start(self, bucket: Bucket) -> None:
        """Begins the sum over the data-parallel ranks.

        It is a reduce-scatter with a distributed optimizer, and an all-reduce over all others that
        hold the same sums.
        """
        sends = bucket.shard_group is not None or bucket.others is not None
        sent = bucket.flat.bfloat16() if self._in_bf16 and sends else bucket.flat
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):  # None: the current stream
            started = Started(sent)
            if bucket.shard_group is not None:
                started = start_reduce_scatter_into_(sent[bucket.own], sent, bucket.shard_group)
            if bucket.others is not None:
                started = start_all_reduce_(started.wait(), bucket.others)
            self._sums[bucket] = started._replace(operand=sent)
