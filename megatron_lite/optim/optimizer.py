"""The optimizer: reduces and clips gradients, updates the masters by a rule, publishes the weights.

The rule (adam_update.py or muon_update.py) works on pieces of parameters. Masters are float32 even
if the model is bf16 or fp16. A step whose gradient norm or loss is not finite changes nothing.
Every rank decides that alike from the same global norm, on the device, without waiting for it. Such
a step lowers the loss scale, if the run has one. A step whose loss is a spike changes nothing
either, if the run looks for spikes (loss_scale.py). The layout decides what a piece is and which
collectives run: see layouts.py.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lite.config.optimizer_settings import ADAM, MUON, SGD, OptimizerConfig
from megatron_lite.config.parallel import DataParallelConfig
from megatron_lite.parallel.collectives import Timed, all_reduce, all_reduce_, not_timed
from megatron_lite.parallel.compiled import Kernels
from megatron_lite.parallel.parameter_spec import ParameterSpec
from megatron_lite.parallel.state import ParallelState
from megatron_lite.parallel.torch_internals import foreach_mul_, foreach_norm

from . import stored
from .adam_update import AdamW, Sgd
from .layouts import Bucketed, FullySharded, Piece
from .loss_scale import LossScale, SpikeGuard
from .muon_update import Muon

# By the name of --optimizer, a function of (layout, config, parallel). The result has the methods
# of AdamW.
RULES = {ADAM: AdamW, SGD: Sgd, MUON: Muon}


class OptimizerStep(NamedTuple):
    """The figures of one step, on the device.

    grad_norm: the global 2-norm before clipping, 0-d. It is not finite if the loss was not finite.
    skipped: 0-d, 1.0 if the step changed nothing, else 0.0.
    piece_norms: the 2-norms of the gradients of this rank's pieces.
    own_grad_norm: the 2-norm, 0-d, of this rank's gradients before the sum over data-parallel
        ranks. It is None unless `measure_own_grad_norm` asked for it.
    """

    grad_norm: Tensor
    skipped: Tensor
    piece_norms: Tensor
    own_grad_norm: Tensor | None = None


class Optimizer:
    """The owner of the gradients, the master weights and the rule's states.

    states[name]: the rule's states of this rank's piece of a parameter and, for a 16-bit model,
        "master", each float32, or as stored.py has it. A parameter of which this rank has no piece
        has no entry.
    loss_scale: the factor by which backward multiplied the gradients; `step` divides them by it.
    spikes: decides whether a loss is a spike; None: no loss is one.
    kernels: compiled kernels, which update states that are rounded.
    timed: times the parts of `step`, by the names of training/profiler.py.

    These methods are those of its parts:
        zero_grad, sync_next_backward, measure_own_grad_norm    GradBuffer
        weight, set_weight, finish                              layouts.Bucketed
        state_names                                             AdamW
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        parallel: ParallelState,
        data_parallel: DataParallelConfig | None = None,
        *,
        loss_scale: LossScale | None = None,
        spikes: SpikeGuard | None = None,
        kernels: Kernels = None,
    ) -> None:
        self._parallel = parallel
        self._clip_grad = config.clip_grad
        self.loss_scale, self.spikes = loss_scale, spikes
        self.timed: Timed = not_timed
        data_parallel = data_parallel or DataParallelConfig()
        is_sharded = parallel.shard_group is not None and data_parallel.use_torch_fsdp2
        layout = FullySharded if is_sharded else Bucketed
        self.layout = layout(model, parallel, data_parallel, config)
        self._pieces = self.layout.pieces
        self._counts_here = [self._counts(piece.spec) for piece in self._pieces]
        self._rule = RULES[config.optimizer](self.layout, config, parallel)
        self._rule.kernels = kernels
        if self.layout.keeps_masters:
            for piece in self._pieces:
                piece.states["master"] = piece.master
        self.states = {piece.name: piece.states for piece in self._pieces}
        gradients = self.layout.gradients
        self.zero_grad, self.sync_next_backward = gradients.forget, gradients.sync_next_backward
        self.measure_own_grad_norm = gradients.measure_own_norm
        self.weight, self.set_weight = self.layout.weight, self.layout.set_weight
        self.finish, self.state_names = self.layout.finish, self._rule.state_names

    def step(
        self,
        learning_rate: float | Tensor,
        loss: Tensor | None = None,
        *,
        decoupled_learning_rate: float | Tensor | None = None,
    ) -> OptimizerStep:
        """Reduces and clips the gradients and updates the weights.

        It changes no weight if the global norm is not finite or the loss is a spike.
        decoupled_learning_rate: the rate of the word embedding and the output layer; None: the
            rate of all other weights.
        loss: 0-d, already summed over the data-parallel and pipeline ranks. If the run looks for
            spikes, the step issues one all-reduce of it over the TP group.
        """
        with self.timed("all-grads-sync"):
            self.layout.gradients.reduce_()
        grads = [piece.grad for piece in self._pieces]
        factors = []
        if self.loss_scale is not None and grads:
            factors.append(self.loss_scale.inverse())
            foreach_mul_(grads, factors[-1])
        grad_norm, piece_norms = self._global_norms(grads, loss)
        # `skipped` stays on the device: reading it would make the host wait for backward. A spike
        # must not lower the loss scale, so the scale is updated before the spike is judged.
        # Inf - Inf and NaN - NaN are NaN, which is not 0.
        skipped = (grad_norm - grad_norm).ne(0.0).float()
        if self.loss_scale is not None:
            self.loss_scale.update(skipped)
        if self.spikes is not None and loss is not None:
            skipped = self.spikes.judge(
                all_reduce(loss, self._parallel.tp_group, dist.ReduceOp.MAX), skipped
            )
        # A norm that is not finite spoils the gradients here. That is harmless: the rule skips the
        # step, and the next step begins with new gradients.
        if self._clip_grad > 0.0 and grads:
            with self.timed("optimizer-clip-main-grad"):
                # 1e-6 as in torch.nn.utils.clip_grad_norm_
                factors.append((self._clip_grad / (grad_norm + 1e-6)).clamp(max=1.0))
                foreach_mul_(grads, factors[-1])
        if self.layout.link is not None:
            self.layout.link.factors = factors
        with self.timed("optimizer-inner-step"):
            self._rule.step(
                learning_rate,
                learning_rate if decoupled_learning_rate is None else decoupled_learning_rate,
                skipped,
            )
        sharded = self.layout.shard_group is not None
        with self.timed("params-all-gather" if sharded else "optimizer-copy-main-to-model-params"):
            self.layout.publish()
        return OptimizerStep(grad_norm, skipped, piece_norms, self.layout.gradients.own_norm)

    @property
    def num_updates(self) -> int:
        """The number of updates made so far. Reading it waits for the device."""
        return int(self._rule.count.item())

    def host_tensors(self) -> list[Tensor]:
        """Returns the states in host memory, and the buffers of the copies, if a GPU is elsewhere
        or not."""
        link = self.layout.link
        hosted = [piece for piece in self._pieces if piece.on_host]
        states = [one for piece in hosted for one in piece.states.values()]
        return [*(piece.master for piece in hosted), *states, *(link.buffers if link else ())]

    def params_norm(self) -> Tensor:
        """Returns the 2-norm of all weights, 0-d."""
        self.finish()
        return self._global_norms(
            [piece.weight if piece.apart else piece.master for piece in self._pieces]
        )[0]

    def num_zeros_in_grad(self) -> Tensor:
        """Returns the number of zeros in the gradients of the last step, 0-d int64.

        It covers the whole model without padding. Issues the same all-reduces as a norm.
        """
        zeros = torch.zeros((), dtype=torch.int64, device=self._parallel.device)
        for piece, counts in zip(self._pieces, self._counts_here, strict=True):
            if counts:
                true = piece.grad.reshape(-1)[: self._true_elements(piece)]
                zeros += true.numel() - true.count_nonzero()
        return self._sum_over_model(zeros)

    def whole_states(self, name: str) -> dict[str, Tensor]:
        """Returns the states of a whole parameter, in its shape.

        Every data-parallel rank must call this.
        """
        keys = (*self.state_names(name), *(("master",) if self.layout.keeps_masters else ()))
        held = {key: stored.whole(state) for key, state in self.states.get(name, {}).items()}
        return {key: self.layout.whole(name, held.get(key)) for key in keys}

    @torch.no_grad()
    def load(self, states: Mapping[str, Mapping[str, Tensor]], *, num_updates: int) -> None:
        """Loads the states of whole parameters, their master weights if present, and `num_updates`.

        States without masters come from a float32 run. The masters then stay the weights that the
        model has loaded. The masters of a 16-bit run become the weights of a float32 run, without
        rounding.
        KeyError: a state is missing.
        """
        for name, whole in states.items():
            if "master" in whole and not self.layout.keeps_masters:
                self.layout.set_weight(name, whole["master"])
        for piece in self._pieces:
            for key, own in piece.states.items():
                if key != "master" or key in states[piece.name]:
                    piece.take_(own, states[piece.name][key])
        for count in (self._rule.count, self._rule.count_on_host):
            count.fill_(num_updates)

    def _counts(self, spec: ParameterSpec) -> bool:
        """Returns whether a piece adds to the figures on this rank.

        A sharded parameter counts on every TP rank, a replicated one on TP rank 0 only, the last
        stage's copy of a tied weight never.
        """
        place = self._parallel.holding(spec)
        # With groups of experts the sums cover all data-parallel ranks (`_sum_over_model`).
        shares = 1 if self.layout.shard_group is None else place.shard_size
        is_another = self._parallel.experts is not None and place.dp_cp_rank >= shares
        if spec.is_copy or is_another:
            return False
        return place.tp_rank == 0 or spec.tp_dim is not None

    def _global_norms(
        self, values: list[Tensor], loss: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the true 2-norm of the pieces' `values` (gradients, or the masters), 0-d, and
        the norms of this rank's pieces, one each.

        The norm is NaN or infinite if any value of any rank is, or the loss (0-d) of any rank.
        Replicated parameters add to the norm on TP rank 0 only, but every rank checks its copy for
        NaN. Issues one all-reduce of one number over the ranks that hold different pieces, over the
        TP group and over the pipeline each.
        """
        narrow = min([one.dtype.itemsize for one in values], default=4) < 4
        dtype = torch.float32 if narrow else None
        norms = foreach_norm(values, dtype=dtype) if values else ()
        counted: list[Tensor] = []
        others: list[Tensor] = []
        for counts, norm in zip(self._counts_here, norms, strict=bool(norms)):
            (counted if counts else others).append(norm)
        every = torch.stack(norms) if norms else torch.zeros(1, device=self._parallel.device)
        summed = every
        if others:
            summed = torch.stack(counted) if counted else every.new_zeros(1)
        total = summed.square().sum()
        if others:
            total = total + (torch.stack(others) * 0.0).sum()  # 0, or NaN if one is not finite
        if loss is not None:  # as above: 0, or NaN if the loss is not finite
            total = torch.add(total, loss.to(total.dtype), alpha=0.0)
        return self._sum_over_model(total).sqrt(), every

    def _sum_over_model(self, value: Tensor) -> Tensor:
        # Each sum covers the ranks of one axis, so the three together cover every shard once.
        parallel, sharded = self._parallel, self.layout.shard_group
        if parallel.experts is not None:  # data-parallel ranks hold different experts
            sharded = parallel.dp_cp_group
        for group in (sharded, parallel.tp_group, parallel.pp_group):
            value = all_reduce_(value, group)
        return value

    def _true_elements(self, piece: Piece) -> int:
        """Returns how many elements come before the vocabulary padding, whose gradient is 0."""
        spec, stop = piece.spec, piece.stop
        if spec.padded_length is not None:  # of a vocabulary, along dim 0
            spans = spec.spans(self._parallel.tp_rank, self._parallel.tp_size)
            rows = sum(span.length for span in spans)
            stop = min(stop, rows * math.prod(spec.global_shape[1:]))
        return max(0, stop - piece.start)
