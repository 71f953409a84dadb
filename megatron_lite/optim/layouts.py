"""The layouts of gradients and master weights over data-parallel ranks, and the pieces in them.

    Bucketed        a piece is the part of a parameter in this rank's part of a bucket. Without
                    ZeRO-1 that is the whole parameter: the ranks sum their gradients and make the
                    same update. With it the weights are gathered after the update.
    FullySharded    a piece is this rank's rows of a parameter; the rank holds no other rows (FSDP2)

A "whole" parameter is the shard that one tensor-parallel rank holds. Pieces do not depend on tensor
parallelism, except that some gradients are summed over its ranks.

ZeRO-1 (arXiv 1910.02054, `--use-distributed-optimizer`):

    backward     each rank has all gradients of a bucket; a reduce-scatter gives rank i the sum of
                 part i
    step         rank i alone updates part i of the bucket's masters and moments, and rounds its
                 masters into the weights
    afterwards   an all-gather in place completes the bucket's weights [ part 0 | part 1 | .. ];
                 parameters are views of the bucket

With `--num-distributed-optimizer-instances` the ranks above are those of one instance. Ranks with
the same part add up their sums before the step. FSDP2 does likewise over a mesh of two axes.

The border between two parts may lie inside a parameter. The two collectives send as many bytes as
the all-reduce that they replace; the all-gather sends half of its part if weights are in 16 bits.
With `--overlap-param-gather` the gathers run during the next forward, in the order of their use.
The forward of each module first waits for the buckets that hold its own parameters.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_lite.config.optimizer_settings import WORDS, OptimizerConfig
from megatron_lite.config.parallel import DataParallelConfig
from megatron_lite.parallel.collectives import (
    Group,
    Started,
    all_gather_first_dim,
    all_reduce_,
    start_all_gather_into_,
)
from megatron_lite.parallel.compiled import at_least_float32
from megatron_lite.parallel.parameter_spec import ParameterSpec, spec_of
from megatron_lite.parallel.state import ParallelState
from megatron_lite.parallel.torch_internals import address_of, foreach_copy_
from megatron_lite.parallel.weights import READER, gathered_dtype, local_part

from .grad_buffer import Bucket, GradBuffer
from .host_link import HostLink
from .stored import new_state, write_whole_

SUMS_ACROSS = "set_requires_all_reduce"  # a method of FSDP2's units
# The weights that --decoupled-lr is for, by the ends of their names.
ENDS = (WORDS, "output_layer.weight")


class Piece(NamedTuple):
    """Elements [start, stop) of a flattened parameter; at least one.

    weight: the elements with which the model computes.
    master: their float32 (float64) weights, which the optimizer updates. It has the parameter's
        shape if the piece is the whole parameter. It may be `weight`, and it may be stored on the
        host or as float16 (stored.py).
    gradient: the view of the buffer that becomes their gradient. None under FSDP2: the master's
        `.grad`.
    states: those of the rule, by name, stored where the master is and in its shape.
    apart: whether the rule updates and publishes it part by part, since something of it is on the
        host or rounded.
    """

    name: str
    spec: ParameterSpec
    start: int
    weight: Tensor
    master: Tensor
    states: dict[str, Tensor]
    gradient: Tensor | None = None
    apart: bool = False
    on_host: bool = False

    @property
    def stop(self) -> int:
        """The end of the elements."""
        return self.start + self.master.numel()

    @property
    def decays(self) -> bool:
        """Tells whether weight decay applies: by Megatron's rule not to biases and to parameters of
        one dimension (norms)."""
        return len(self.spec.global_shape) > 1 and not self.name.endswith(".bias")

    @property
    def at_an_end(self) -> bool:
        """Tells whether it belongs to the word embedding or the output layer (--decoupled-lr)."""
        return self.name.endswith(ENDS)

    @property
    def grad(self) -> Tensor:
        """The gradient, which is complete after the `reduce_` of the layout's gradients."""
        if self.gradient is not None:
            return self.gradient
        assert self.master.grad is not None, self.name
        return self.master.grad

    @torch.no_grad()
    def take_(self, target: Tensor, whole: Tensor) -> None:
        """Overwrites `target` with this piece's elements of a whole tensor.

        target: the master or a state.
        """
        write_whole_(target, whole.reshape(-1)[self.start : self.stop])


def _joined(bucket: Bucket, parameters: dict[str, nn.Parameter]) -> Tensor:
    """Returns the parameters of a bucket as one tensor. They become views of it, so a gather into
    it needs no copy."""
    (dtype,) = {parameters[name].dtype for name in bucket.places}
    flat = torch.zeros(bucket.flat.numel(), dtype=dtype, device=bucket.flat.device)
    # Assigning `.data` keeps the Parameter objects, on which the gradient hooks are registered.
    for name, place in bucket.places.items():
        flat[place].copy_(parameters[name].detach().view(-1))
        parameters[name].data = flat[place].view(parameters[name].shape)
    return flat


class Bucketed:
    """The layout in which each data-parallel rank holds all weights and gradients, in buckets.

    With ZeRO-1 it holds the states of its part of each bucket, and a step issues one reduce-scatter
    and one all-gather for each bucket. Otherwise it holds all states, and a step issues one
    all-reduce for each bucket. Every rank must make every call except `set_weight`.

    gradients: where backward accumulates.
    link: the way of weights from the host; None if no piece is there.
    pieces: this rank's pieces, in the order of the model's parameters.
    shard_group: the ranks that hold different pieces; None if every rank holds all pieces.
    specs: those of all parameters, also those of which this rank has no piece.
    replicates_weights: whether every rank of `dp_cp_group` holds all weights.
    keeps_masters: whether masters are more precise than a checkpoint's weights, and so are saved
        too.
    """

    gradients: Any  # a GradBuffer, or what has its methods
    link: HostLink | None = None
    replicates_weights = True

    def __init__(
        self,
        model: nn.Module,
        parallel: ParallelState,
        config: DataParallelConfig,
        optimizer: OptimizerConfig,
    ) -> None:
        self._parallel, self._config, self._optimizer = parallel, config, optimizer
        self.shard_group = parallel.shard_group if config.shares_out else None
        self._weights: dict[Bucket, Tensor] = {}  # of ZeRO-1
        self._gathers: dict[Bucket, Started] = {}  # those under way
        self._parameters = dict(model.named_parameters())
        self.specs = {name: spec_of(one) for name, one in self._parameters.items()}
        self.keeps_masters = any(
            is_rounded(gathered_dtype(one)) for one in self._parameters.values()
        )
        with torch.no_grad():
            self.pieces = self._new_pieces(model)
        if hosted := [piece for piece in self.pieces if piece.on_host]:
            overlaps = optimizer.overlap_cpu_optimizer_d2h_h2d
            self.link = HostLink(hosted, overlaps=overlaps)
            self.gradients.host = self.link if overlaps else None
        self._rounded = [
            piece for piece in self.pieces if not piece.apart and is_rounded(piece.weight.dtype)
        ]

    def _new_pieces(self, model: nn.Module) -> list[Piece]:
        """Makes `gradients`, and returns the pieces."""
        config = self._optimizer
        gathers = self.shard_group is not None and self._config.overlap_param_gather
        if gathers or config.overlap_cpu_optimizer_d2h_h2d:
            self._wait_before_use(model)
        self.gradients = GradBuffer(
            self._parameters, self._parallel, self._config, config.main_grads_dtype
        )
        if self.shard_group is not None:
            self._weights = {one: _joined(one, self._parameters) for one in self.gradients.buckets}
        views = list(self._views())
        hosted = config.on_host(
            (one.name, bool(one.spec.matrices), one.weight.numel()) for one in views
        )
        return list(map(self._with_master, views, hosted))

    def _views(self) -> Iterator[Piece]:
        """Yields what this rank updates of each parameter, with the weight as the master."""
        for name, parameter in self._parameters.items():
            bucket = self.gradients.bucket_of[name]
            if bucket not in self._weights:
                gradient = self.gradients.grads[name]
                yield Piece(name, self.specs[name], 0, parameter, parameter, {}, gradient)
                continue
            # The part's border may cut the parameter, or leave this rank none of it.
            part = bucket.layout.own_part(name, bucket.rank)
            if part.start < part.stop:
                first = bucket.places[name].start
                place = slice(first + part.start, first + part.stop)
                weight = self._weights[bucket][place]
                # The gradient is a view, which holds the sum once the bucket is reduced.
                gradient = bucket.flat[place]
                yield Piece(name, self.specs[name], part.start, weight, weight, {}, gradient)

    def _with_master(self, piece: Piece, on_host: bool) -> Piece:
        config, weight = self._optimizer, piece.weight
        rounded = is_rounded(weight.dtype)
        master = weight
        if on_host or rounded:
            device = torch.device("cpu") if on_host else weight.device
            master = new_state(weight, config.main_params_dtype if rounded else "fp32", device)
            write_whole_(master, weight)
        return piece._replace(master=master, apart=on_host or config.is_rounded, on_host=on_host)

    def _wait_before_use(self, model: nn.Module) -> None:
        """Makes every module that owns parameters wait until they have arrived.

        A module waits before its forward, and before `weight_of` reads its weight alone.
        """
        names = {parameter: name for name, parameter in self._parameters.items()}

        def finish_(module: nn.Module, *_: object) -> None:
            for parameter in module.parameters(recurse=False):
                self.weight(names[parameter])

        def read(module: nn.Module) -> Tensor:
            finish_(module)
            return module.weight  # type: ignore[return-value]

        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(finish_)
                module.__dict__[READER] = partial(read, module)

    def _shares(self, name: str) -> tuple[Group, list[int]]:
        """Returns the ranks that hold different pieces of a parameter, and how many elements each
        has; None if every rank holds the whole parameter."""
        bucket = self.gradients.bucket_of[name]
        parts = [bucket.layout.own_part(name, rank) for rank in range(bucket.layout.shards)]
        return bucket.shard_group, [max(part.stop - part.start, 0) for part in parts]

    @torch.no_grad()
    def publish(self) -> None:
        """Makes the updated masters the weights that the model computes with: rounds those of a
        16-bit model, and gathers the buckets in the order of use.

        It may return while weights are on their way: the forward of each module waits for its own.
        """
        if self._gathers:  # a module that took no part in the step has not waited for them
            self.finish()
        if self._rounded:
            weights = [piece.weight for piece in self._rounded]
            foreach_copy_(weights, [piece.master for piece in self._rounded])
        # The buckets are in the reverse order of their use; a tied embedding is the last bucket.
        for bucket, flat in reversed(self._weights.items()):
            for name in bucket.places:
                self.weight(name)
            if (group := bucket.shard_group) is not None:
                self._gathers[bucket] = start_all_gather_into_(flat, flat[bucket.own], group)
                if not self._config.overlap_param_gather:
                    self.finish()

    def finish(self) -> None:
        """Waits for the weights that are on their way."""
        if self.link is not None:
            self.link.finish()
        for bucket in [*self._gathers]:
            self._gathers.pop(bucket).wait()

    def whole(self, name: str, value: Tensor | None) -> Tensor:
        """Returns a whole tensor, such as a moment, from the parts of all ranks.

        Issues one all-gather of parts padded to the longest one, if the ranks hold different parts.
        value: this rank's part, the elements of its piece; None if it has no piece.
        """
        parameter, (group, lengths) = self._parameters[name], self._shares(name)
        if group is None:
            assert value is not None, name
            return value.view(parameter.shape)
        dtype = at_least_float32(parameter.dtype)
        padded = torch.zeros(max(lengths), dtype=dtype, device=parameter.device)
        if value is not None:
            padded[: value.numel()].copy_(value.detach().reshape(-1))
        rows = all_gather_first_dim(padded, group).view(len(lengths), -1)
        parts = [row[:length] for row, length in zip(rows, lengths, strict=True)]
        return torch.cat(parts).view(parameter.shape)

    def weight(self, name: str) -> Tensor:
        """Returns a whole weight, as a checkpoint holds it, once it has arrived."""
        if self.link is not None:
            self.link.wait_for(name)
        if gather := self._gathers.pop(self.gradients.bucket_of[name], None):
            gather.wait()
        return self._parameters[name]

    @torch.no_grad()
    def set_weight(self, name: str, values: Tensor) -> None:
        """Overwrites a weight with a whole tensor, and its master without rounding."""
        if self.replicates_weights:
            self.weight(name).copy_(values)
        for piece in self.pieces:
            if piece.name == name:
                piece.take_(piece.master, values)


class FullySharded(Bucketed):
    """The layout, and its `gradients`, of a model that FSDP2 has sharded (parallel/fsdp.py).

    The sharded parameters are the float32 masters themselves, since FSDP2 rounds the weights that
    it gathers. It reduces the gradients of every micro-batch while backward runs, and adds up the
    rows' gradients in float32. Before the reduction gradients have the dtype of the gathered
    weights. The gradient of a tied weight is therefore the sum of two rounded ones.

    Instances add up their rows after the last micro-batch, or after each one if sums of rows are
    sent in bfloat16, in which FSDP2 would sum the micro-batches too.

    In a step the layout issues only the sums over the TP ranks and over the pipeline's first and
    last stage, because torch's functions know one mesh only. FSDP2 issues the others.
    """

    replicates_weights = False
    own_norm: Tensor | None = None

    def _new_pieces(self, model: nn.Module) -> list[Piece]:
        self.gradients = self
        sums_once = self._parallel.num_instances > 1 and not self._config.grad_reduce_in_bf16
        self._units: list[Any] = [
            unit for unit in model.modules() if sums_once and hasattr(unit, SUMS_ACROSS)
        ]
        self._waiting: set[Any] = set()  # the units that sum over instances in a later backward
        pieces = []
        for name, parameter in self._parameters.items():
            rows = local_part(parameter)
            assert rows is not parameter, f"{name} is not sharded: fully_shard_ comes first"
            start = sum(self._shares(name)[1][: self._parallel.shard_rank])
            if rows.numel():
                own = rows.detach()
                pieces.append(Piece(name, self.specs[name], start, own, own, {}))
        return pieces

    def _shares(self, name: str) -> tuple[Group, list[int]]:
        # FSDP2 splits the rows like torch.chunk.
        shape, size = self._parameters[name].shape, self._parallel.shard_size
        rows = -(-shape[0] // size)
        return self.shard_group, [
            max(0, min(rows, shape[0] - rank * rows)) * shape[1:].numel() for rank in range(size)
        ]

    def measure_own_norm(self) -> None:
        """Does nothing: FSDP2 sums the gradients before anyone can read them."""

    def forget(self) -> None:
        """Implements GradBuffer.forget. Frees the rows' gradients, those of FSDP2 and those of
        the optimizer."""
        for holder in (*self._parameters.values(), *(piece.master for piece in self.pieces)):
            holder.grad = None
        self._waiting.update(self._units)
        for unit in self._units:
            getattr(unit, SUMS_ACROSS)(False, recurse=False)

    def sync_next_backward(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Implements GradBuffer.sync_next_backward for the sums over instances. FSDP2 reduces to
        rows in every backward."""
        chosen = None if parameters is None else {*parameters}
        for unit in [*self._waiting]:
            if chosen is None or chosen >= {*unit.parameters()}:
                getattr(unit, SUMS_ACROSS)(True, recurse=False)
                self._waiting.remove(unit)

    def reduce_(self) -> None:
        """Implements GradBuffer.reduce_. Issues one all-reduce over TP for all partial gradients
        together.

        A tied weight's gradient needs another all-reduce, over the first and last stage.
        """
        assert not self._waiting, "sync_next_backward comes before the last backward"
        for piece in self.pieces:
            parameter, master = self._parameters[piece.name], piece.master
            # The master must be the rows that FSDP2 gathers. torch 2.8 and 2.9 copy the rows of an
            # uneven shard to new memory in the first forward.
            rows = local_part(parameter).detach()
            if address_of(rows.untyped_storage()) != address_of(master.untyped_storage()):
                master.data = rows.view(master.shape)
            # A parameter that took no part in the step has no gradient. Its piece gets zeros.
            grad = parameter.grad
            master.grad = torch.zeros_like(master) if grad is None else local_part(grad)
        partial_sums = [one.grad.view(-1) for one in self.pieces if one.spec.sum_grad_over_tp]
        if partial_sums and self._parallel.tp_group is not None:
            summed = all_reduce_(torch.cat(partial_sums), self._parallel.tp_group)
            foreach_copy_(partial_sums, summed.split([*map(len, partial_sums)]))
        for piece in self.pieces:
            if piece.spec.tied:
                all_reduce_(piece.grad, self._parallel.embedding_group)

    def publish(self) -> None:
        """Does nothing: the next forward gathers the masters themselves."""

    def weight(self, name: str) -> Tensor:
        """Implements Bucketed.weight. Issues one all-gather."""
        parameter = self._parameters[name]
        return self.whole(name, local_part(parameter)).to(gathered_dtype(parameter))


def is_rounded(dtype: torch.dtype) -> bool:
    """Returns whether weights of this dtype need a float32 master."""
    return at_least_float32(dtype) != dtype
