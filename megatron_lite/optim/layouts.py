"""The layouts of gradients and master weights over data-parallel ranks, and the pieces in them.

    Replicated      a piece is a whole parameter; the ranks sum their gradients and make the same
                    update
    Zero1           a piece is the part of a parameter in this rank's part of a bucket; the weights
                    are gathered after the update
    FullySharded    a piece is this rank's rows of a parameter; the rank holds no other rows
                    (fsdp_layout.py)

A "whole" parameter is the shard that one tensor-parallel rank holds. Pieces do not depend on tensor
parallelism, except that some gradients are summed over its ranks.

ZeRO-1 (arXiv 1910.02054, `--use-distributed-optimizer`):

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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_lite.config.parallel import DataParallelConfig
from megatron_lite.optim.grad_buffer import Bucket, GradBuffer
from megatron_lite.parallel.collectives import Started, all_gather_first_dim, start_all_gather_into_
from megatron_lite.parallel.parameter_spec import ParameterSpec, spec_of
from megatron_lite.parallel.state import ParallelState
from megatron_lite.parallel.torch_internals import foreach_copy_
from megatron_lite.parallel.weights import READER

if TYPE_CHECKING:
    from megatron_lite.optim.fsdp_layout import FullySharded

Layout: TypeAlias = "Replicated | FullySharded"
# The weights that --decoupled-lr is for, by the ends of their names.
ENDS = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Elements [start, stop) of a flattened parameter; at least one.

    master: their float32 (float64) weights, which the optimizer updates. It has the parameter's
        shape if the piece is the whole parameter. Its `.grad` is the gradient, which is complete
        after the `reduce_` of the layout's gradients.
    decays: whether weight decay applies.
    at_an_end: whether it belongs to the word embedding or the output layer (--decoupled-lr).
    """

    name: str
    spec: ParameterSpec
    start: int
    stop: int
    master: Tensor
    decays: bool
    at_an_end: bool = False

    @classmethod
    def of(cls, name: str, parameter: nn.Parameter, master: Tensor, *, start: int = 0) -> Piece:
        """Returns the piece of a parameter that begins at element `start` and has this master.

        By Megatron's rule biases and one-dimensional parameters (norms) do not decay.
        """
        return cls(
            name=name,
            spec=spec_of(parameter),
            start=start,
            stop=start + master.numel(),
            master=master,
            decays=parameter.dim() > 1 and not name.endswith(".bias"),
            at_an_end=name.endswith(ENDS),
        )

    @property
    def grad(self) -> Tensor:
        """The gradient of the master."""
        assert self.master.grad is not None, self.name
        return self.master.grad

    @torch.no_grad()
    def take_(self, target: Tensor, whole: Tensor) -> None:
        """Overwrites `target` with this piece's elements of a whole tensor.

        target: a tensor in the master's shape.
        """
        target.copy_(whole.reshape(-1)[self.start : self.stop].view(target.shape))


class Replicated:
    """The layout in which each data-parallel rank holds all weights, gradients and states.

    Every rank must make every call except `set_weight`, because most calls of the other layouts
    issue collectives. Here only `gradients` issues some: one all-reduce for each bucket.

    gradients: where backward accumulates.
    pieces: this rank's pieces, in the order of the model's parameters.
    shard_group: the ranks that hold different pieces; None if every rank holds all pieces.
    replicates_weights: whether every rank of `dp_cp_group` holds all weights.
    keeps_masters: whether masters are more precise than a checkpoint's weights, and so are saved
        too.
    """

    shard_group: ProcessGroup | None = None
    replicates_weights = True

    def __init__(
        self, model: nn.Module, parallel: ParallelState, config: DataParallelConfig
    ) -> None:
        self._parameters = dict(model.named_parameters())
        self.keeps_masters = any(is_rounded(one.dtype) for one in self._parameters.values())
        self.gradients = GradBuffer(self._parameters, parallel, config)
        self.pieces = self._new_pieces()

    def _new_pieces(self) -> list[Piece]:
        pieces = []
        for name, parameter in self._parameters.items():
            master = parameter.detach().float() if is_rounded(parameter.dtype) else parameter
            master.grad = self.gradients.grads[name]
            pieces.append(Piece.of(name, parameter, master))
        return pieces

    @torch.no_grad()
    def publish(self) -> None:
        """Makes the updated masters the weights that the model computes with.

        It may return while gathers run: the forward of each module waits for its own weights.
        """
        if self.keeps_masters:
            weights = list(self._parameters.values())
            foreach_copy_(weights, [piece.master for piece in self.pieces])

    def finish(self) -> None:
        """Waits for the gathers that `publish` has begun."""

    def whole(self, name: str, value: Tensor | None) -> Tensor:
        """Returns a whole tensor, such as a moment, from the parts of all ranks.

        value: this rank's part, the elements of its piece; None if it has no piece.
        """
        assert value is not None, name
        return value

    def weight(self, name: str) -> Tensor:
        """Returns a whole weight, as a checkpoint holds it."""
        return self._parameters[name]

    @torch.no_grad()
    def set_weight(self, name: str, values: Tensor) -> None:
        """Overwrites a weight with a whole tensor, and its master without rounding."""
        self.weight(name).copy_(values)
        for piece in self.pieces:
            if piece.name == name:
                piece.take_(piece.master, values)


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
        self.gather = Started(self.flat)

    def finish(self) -> None:
        """Waits for the current gather, if one runs."""
        self.gather.wait()
        self.gather = Started(self.flat)


class Zero1(Replicated):
    """The layout of ZeRO-1. A step issues one reduce-scatter and one all-gather for each bucket."""

    def __init__(
        self, model: nn.Module, parallel: ParallelState, config: DataParallelConfig
    ) -> None:
        assert parallel.dp_cp_group is not None
        self._group = self.shard_group = parallel.dp_cp_group
        self._overlaps = config.overlap_param_gather
        super().__init__(model, parallel, config)
        if self._overlaps:
            self._wait_before_use(model)

    @torch.no_grad()
    def _new_pieces(self) -> list[Piece]:
        self._weights = [_Weights(one, self._parameters) for one in self.gradients.buckets]
        self._weights_of = {
            name: weights
            for weights, bucket in zip(self._weights, self.gradients.buckets, strict=True)
            for name in bucket.places
        }
        pieces = []
        for name, parameter in self._parameters.items():
            bucket = self.gradients.bucket_of[name]
            # The part's border may cut the parameter, or leave this rank none of it.
            part, first = bucket.own_part(name), bucket.places[name].start
            if part.start < part.stop:
                place = slice(first + part.start, first + part.stop)
                own = slice(place.start - bucket.own.start, place.stop - bucket.own.start)
                master = self._weights_of[name].masters[own]
                # a view, which holds the summed gradient once the bucket is reduced
                master.grad = bucket.flat[place]
                pieces.append(Piece.of(name, parameter, master, start=part.start))
        return pieces

    @torch.no_grad()
    def publish(self) -> None:
        """Rounds the masters of a 16-bit model, and gathers all weights in the order of use."""
        # The buckets are in the reverse order of their use; a tied embedding is the last bucket.
        for weights in reversed(self._weights):
            if weights.masters is not weights.own:
                weights.own.copy_(weights.masters)
            # A module that took no part in the step has not waited for the gather before this one.
            weights.finish()
            weights.gather = start_all_gather_into_(weights.flat, weights.own, self._group)
            if not self._overlaps:
                weights.finish()

    def finish(self) -> None:
        """Waits for the gathers that `publish` has begun."""
        for weights in self._weights:
            weights.finish()

    def whole(self, name: str, value: Tensor | None) -> Tensor:
        """Implements Replicated.whole. Issues one all-gather."""
        bucket = self.gradients.bucket_of[name]
        parts = [bucket.own_part(name, rank) for rank in range(self._group.size())]
        lengths = [max(part.stop - part.start, 0) for part in parts]
        flat = gather_parts(value, lengths, self._group, like=bucket.flat)
        return flat.view(self._parameters[name].shape)

    def weight(self, name: str) -> Tensor:
        """Returns the parameter itself, once its gather is complete."""
        self._weights_of[name].finish()
        return self._parameters[name]

    def _wait_before_use(self, model: nn.Module) -> None:
        """Makes every module that owns parameters wait for their gathers.

        A module waits before its forward, and before `weight_of` reads its weight alone.
        """
        names = {parameter: name for name, parameter in self._parameters.items()}
        for module in model.modules():
            own = module.parameters(recurse=False)
            awaited = list(dict.fromkeys(self._weights_of[names[one]] for one in own))
            if awaited:
                module.register_forward_pre_hook(partial(_finish, awaited))
                module.__dict__[READER] = partial(_finish_and_read, awaited, module)


def _finish(awaited: Iterable[_Weights], *_: object) -> None:
    for weights in awaited:
        weights.finish()


def _finish_and_read(awaited: Iterable[_Weights], module: nn.Module) -> Tensor:
    _finish(awaited)
    return module.weight  # type: ignore[return-value]


def is_rounded(dtype: torch.dtype) -> bool:
    """Returns whether weights of this dtype need a float32 master."""
    return torch.promote_types(dtype, torch.float32) != dtype


def gather_parts(
    part: Tensor | None, lengths: Sequence[int], group: ProcessGroup, *, like: Tensor
) -> Tensor:
    """Returns the parts of all ranks one after the other: [sum of lengths].

    The function issues one all-gather of parts padded to the longest length.
    part: this rank's part; None if it is empty. Rank i's part has lengths[i] elements.
    like: a tensor with the dtype and the device of the parts.
    """
    padded = torch.zeros(max(lengths), dtype=like.dtype, device=like.device)
    if part is not None:
        padded[: part.numel()].copy_(part.detach().reshape(-1))
    gathered = all_gather_first_dim(padded, group).view(len(lengths), -1)
    return torch.cat([row[:length] for row, length in zip(gathered, lengths, strict=True)])
