"""ZeRO-1 (arXiv 1910.02054): each data-parallel rank holds a part of optimizer states and masters.

The flag is `--use-distributed-optimizer`.

    backward     each rank has all gradients of a bucket; a reduce-scatter gives rank i the sum of
                 part i
    step         rank i alone updates part i of the bucket's masters and moments, and rounds its
                 masters into the weights
    afterwards   an all-gather in place completes the bucket's weights [ part 0 | part 1 | .. ];
                 parameters are views of the bucket

The border between two parts may lie inside a parameter. The two collectives send as many bytes as
the all-reduce that they replace; the all-gather sends half of its part if weights are in 16 bits.
With `--overlap-param-gather` the gathers run during the next forward, in the order of their use.
The forward of each module first waits for the buckets that hold its own parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from megatron_lite.config.parallel import DataParallelConfig
from megatron_lite.optim.grad_buffer import Bucket, GradBuffer
from megatron_lite.optim.pieces import gather_parts, is_rounded, new_piece
from megatron_lite.parallel.collectives import Started, start_all_gather_parts_
from megatron_lite.parallel.state import ParallelState
from megatron_lite.parallel.weights import READER


class _Weights:
    """The parameters of a bucket as one tensor, and the masters of this rank's part.

    The parameters become views of this tensor, so a gather into it needs no copy.
    """

    def __init__(self, bucket: Bucket, parameters: dict[str, nn.Parameter]) -> None:
        dtypes = {parameters[name].dtype for name in bucket.places}
        assert len(dtypes) == 1, f"parameters of one dtype: {dtypes}"
        self.flat = torch.zeros(bucket.flat.numel(), dtype=dtypes.pop(), device=bucket.flat.device)
        # Assigning `.data` keeps the Parameter objects, on which the gradient hooks are registered.
        for name, place in bucket.places.items():
            self.flat[place].copy_(parameters[name].detach().view(-1))
            parameters[name].data = self.flat[place].view(parameters[name].shape)
        self.own = self.flat[bucket.own]
        self.masters = self.own.float() if is_rounded(self.flat.dtype) else self.own
        self.gather: Started | None = None

    def finish(self) -> None:
        """Waits for the current gather, if one runs."""
        if self.gather is not None:
            self.gather.wait()
            self.gather = None


class Zero1:
    """The Layout of ZeRO-1. A step issues one reduce-scatter and one all-gather for each bucket."""

    def __init__(
        self, model: nn.Module, parallel: ParallelState, config: DataParallelConfig
    ) -> None:
        assert parallel.dp_cp_group is not None
        self._parameters = dict(model.named_parameters())
        self._rank, self.shard_group = parallel.dp_cp_rank, parallel.dp_cp_group
        self._overlaps, self.replicates_weights = config.overlap_param_gather, True
        self.gradients = GradBuffer(self._parameters, parallel, config)
        with torch.no_grad():
            self._weights = {
                id(bucket): _Weights(bucket, self._parameters) for bucket in self.gradients.buckets
            }
        self.keeps_masters = any(
            weights.masters is not weights.own for weights in self._weights.values()
        )
        self.pieces = []
        for name, parameter in self._parameters.items():
            bucket = self.gradients.bucket_of[name]
            # The part's border may cut the parameter, or leave this rank none of it.
            part = bucket.own_part(name)
            if part.start < part.stop:
                place = slice(
                    bucket.places[name].start + part.start, bucket.places[name].start + part.stop
                )
                master = self._of(name).masters[
                    place.start - bucket.own.start : place.stop - bucket.own.start
                ]
                # a view, which holds the summed gradient once the bucket is reduced
                master.grad = bucket.flat[place]
                self.pieces.append(
                    new_piece(name, parameter, master, start=part.start, stop=part.stop)
                )
        if self._overlaps:
            self._wait_before_use(model)

    @torch.no_grad()
    def publish(self) -> None:
        """Rounds the masters of a 16-bit model, and gathers all weights in the order of use."""
        # The buckets are in the reverse order of their use; a tied embedding is the last bucket.
        for weights in reversed(self._weights.values()):
            if weights.masters is not weights.own:
                weights.own.copy_(weights.masters)
            # A module that took no part in the step has not waited for the gather before this one.
            weights.finish()
            weights.gather = start_all_gather_parts_(weights.flat, self.shard_group)
            if not self._overlaps:
                weights.finish()

    def finish(self) -> None:
        """Implements Layout.finish."""
        for weights in self._weights.values():
            weights.finish()

    def whole(self, name: str, value: Tensor | None) -> Tensor:
        """Implements Layout.whole. Issues one all-gather."""
        bucket, parameter = self.gradients.bucket_of[name], self._parameters[name]
        parts = [bucket.own_part(name, rank) for rank in range(self.shard_group.size())]
        lengths = [max(part.stop - part.start, 0) for part in parts]
        return gather_parts(value, lengths, self.shard_group, like=bucket.flat).view(
            parameter.shape
        )

    def weight(self, name: str) -> Tensor:
        """Returns the parameter itself, once its gather is complete."""
        self._of(name).finish()
        return self._parameters[name]

    @torch.no_grad()
    def set_weight(self, name: str, values: Tensor) -> None:
        """Implements Layout.set_weight."""
        self._of(name).finish()
        self._parameters[name].copy_(values)
        piece = next((piece for piece in self.pieces if piece.name == name), None)
        if piece is not None:
            piece.take_(piece.master, values)

    def _of(self, name: str) -> _Weights:
        return self._weights[id(self.gradients.bucket_of[name])]

    def _wait_before_use(self, model: nn.Module) -> None:
        """Makes every module that owns parameters wait for their gathers.

        A module waits before its forward, and before `weight_of` reads its weight alone.
        """
        names = {parameter: name for name, parameter in self._parameters.items()}
        for module in model.modules():
            awaited = list(
                dict.fromkeys(self._of(names[one]) for one in module.parameters(recurse=False))
            )
            if awaited:
                module.register_forward_pre_hook(partial(_finish, awaited))
                module.__dict__[READER] = partial(_finish_and_read, awaited, module)


def _finish(awaited: Iterable[_Weights], *_: object) -> None:
    for weights in awaited:
        weights.finish()


def _finish_and_read(awaited: Iterable[_Weights], module: nn.Module) -> Tensor:
    _finish(awaited)
    return module.weight  # type: ignore[return-value]
