"""Optimizer states and float32 master weights over data-parallel ranks (ZeRO-1, arXiv 1910.02054): `--use-distributed-optimizer`.

    backward     gradients of a bucket  [ whole on every rank ]       reduce-scatter: rank i gets the sum of the i-th part
    step         part i of the bucket's masters and moments is updated by rank i alone, from masters to weights
    afterwards   weights of the bucket  [ part 0 | part 1 | .. ]      all-gather, in place: parameters are views of the bucket

Parts are cut through parameters wherever they fall. The bytes sent are those of the all-reduce that they replace (and half of
the gather's where weights are bf16). With `--overlap-param-gather` the gathers run beside the next forward, in the order in which
it needs them: the forward of each module first waits for the buckets that hold its own parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from megatron_lite.config.data_parallel import DataParallelConfig
from megatron_lite.optim.grad_buffer import Bucket, GradBuffer
from megatron_lite.optim.pieces import gather_parts, is_rounded, new_piece
from megatron_lite.parallel.collectives import Started, start_all_gather_parts_
from megatron_lite.parallel.state import ParallelState
from megatron_lite.parallel.weights import READER


class _Weights:
    """The parameters of a bucket as one tensor, and the masters of this rank's part of it."""

    def __init__(self, bucket: Bucket, parameters: dict[str, nn.Parameter]) -> None:
        dtypes = {parameters[name].dtype for name in bucket.places}
        assert len(dtypes) == 1, f"parameters of one dtype: {dtypes}"
        self.flat = torch.zeros(bucket.flat.numel(), dtype=dtypes.pop(), device=bucket.flat.device)
        for name, place in bucket.places.items():
            self.flat[place].copy_(parameters[name].detach().view(-1))
            parameters[name].data = self.flat[place].view(parameters[name].shape)
        self.own = self.flat[bucket.own]
        self.masters = self.own.float() if is_rounded(self.flat.dtype) else self.own
        self.gather: Started | None = None

    def finish(self) -> None:
        """Waits for the gather under way, if there is one."""
        if self.gather is not None:
            self.gather.wait()
            self.gather = None


class Zero1:
    """A Layout. Sends one reduce-scatter and one all-gather of each bucket."""

    def __init__(self, model: nn.Module, parallel: ParallelState, config: DataParallelConfig) -> None:
        assert parallel.data_group is not None
        self._parameters = dict(model.named_parameters())
        self._rank, self.shard_group = parallel.data_rank, parallel.data_group
        self._overlaps, self.replicates_weights = config.overlap_param_gather, True
        self.gradients = GradBuffer(self._parameters, parallel, config)
        with torch.no_grad():
            self._weights = {id(bucket): _Weights(bucket, self._parameters) for bucket in self.gradients.buckets}
        self.keeps_masters = any(weights.masters is not weights.own for weights in self._weights.values())
        self.pieces = []
        for name, parameter in self._parameters.items():
            bucket = self.gradients.bucket_of[name]
            part = bucket.own_part(name)
            if part.start < part.stop:
                place = slice(bucket.places[name].start + part.start, bucket.places[name].start + part.stop)
                master = self._of(name).masters[place.start - bucket.own.start : place.stop - bucket.own.start]
                master.grad = bucket.flat[place]
                self.pieces.append(new_piece(name, parameter, master, start=part.start, stop=part.stop))
        if self._overlaps:
            self._wait_before_use(model)

    @torch.no_grad()
    def publish(self) -> None:
        """Rounds the masters of a bf16 model, and gathers all weights in the order of their use."""
        for weights in reversed(self._weights.values()):
            if weights.masters is not weights.own:
                weights.own.copy_(weights.masters)
            weights.finish()
            weights.gather = start_all_gather_parts_(weights.flat, self.shard_group)
        if not self._overlaps:
            self.finish()

    def finish(self) -> None:
        """See Layout."""
        for weights in self._weights.values():
            weights.finish()

    def whole(self, name: str, value: Tensor | None) -> Tensor:
        """See Layout. One all-gather."""
        bucket, parameter = self.gradients.bucket_of[name], self._parameters[name]
        parts = [bucket.own_part(name, rank) for rank in range(self.shard_group.size())]
        lengths = [max(part.stop - part.start, 0) for part in parts]
        return gather_parts(value, lengths, self.shard_group, like=bucket.flat).view(parameter.shape)

    def weight(self, name: str) -> Tensor:
        """The parameter itself."""
        self._of(name).finish()
        return self._parameters[name]

    @torch.no_grad()
    def set_weight(self, name: str, values: Tensor) -> None:
        """See Layout."""
        self._of(name).finish()
        self._parameters[name].copy_(values)
        piece = next((piece for piece in self.pieces if piece.name == name), None)
        if piece is not None:
            piece.take_(piece.master, values)

    def _of(self, name: str) -> _Weights:
        return self._weights[id(self.gradients.bucket_of[name])]

    def _wait_before_use(self, model: nn.Module) -> None:
        """Has every module that owns parameters wait for them, before its forward and before its weight is read alone."""
        names = {parameter: name for name, parameter in self._parameters.items()}
        for module in model.modules():
            awaited = list(dict.fromkeys(self._of(names[one]) for one in module.parameters(recurse=False)))
            if awaited:
                module.register_forward_pre_hook(partial(_finish_before_forward, awaited))
                module.__dict__[READER] = partial(_finish_and_read, awaited, module)


def _finish(awaited: Iterable[_Weights]) -> None:
    for weights in awaited:
        weights.finish()


def _finish_before_forward(awaited: Iterable[_Weights], *_: object) -> None:
    _finish(awaited)


def _finish_and_read(awaited: Iterable[_Weights], module: nn.Module) -> Tensor:
    _finish(awaited)
    return module.weight  # type: ignore[return-value]
