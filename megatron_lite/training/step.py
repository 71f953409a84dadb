"""One training step: the forward and backward of every micro-batch, and one update.

`train_step` is the step. `StageRunner` runs the micro-batches through the stages that this rank
holds: those of the whole model, or those of one rank of a pipeline.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_lite.config.run import RunConfig
from megatron_lite.model.embedding import residual_dtype
from megatron_lite.model.gpt import LossGradient, ModelStages
from megatron_lite.optim.optimizer import Optimizer, OptimizerStep
from megatron_lite.parallel.collectives import Timed, all_reduce, not_timed
from megatron_lite.parallel.state import ParallelState
from megatron_lite.pipeline.executor import Forward, Links, run_actions
from megatron_lite.pipeline.order import Action, StepOrder
from megatron_lite.recompute.recompute_plan import keep_everything

from .batches import Batches, MaskedMean
from .observe import Look


class TrainingError(RuntimeError):
    """A run that cannot go on, through no fault of its input.

    The process prints the message and exits with status 1.
    """


class StepResult(NamedTuple):
    """The figures of one step, as tensors on the device that the log reads later.

    loss: 0-d, the mean over the global batch.
    update: the figures of the update. With own_loss they show where a NaN came from.
    loss_scale: 0-d, the scale that was used; 1.0 if the loss is not scaled.
    mean_loss: the running mean of the loss, against which spikes are judged. None if the run looks
        for no spikes.
    own_loss: this rank's part of the loss, 0-d. The others that are 0-d are equal on all ranks.
    """

    loss: Tensor
    update: OptimizerStep
    loss_scale: Tensor
    mean_loss: Tensor | None
    own_loss: Tensor


class StepEnd:
    """A point in the work of a device: its time, and figures that are copied to the host there.

    On a GPU the copy to pinned memory and an event are launched behind the work so far. Reading
    waits for that event alone, so that a step launched later goes on meanwhile, and the time is the
    event's. On a CPU the work is done at once.
    figures: 0-d tensors on the device, by their names in IterationRecord.
    """

    ON_TIME = ("cpu",)  # the devices that do their work when the host launches it

    def __init__(self, device: torch.device, **figures: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._names, self._values = tuple(figures), torch.empty(0)
        if figures:
            # float64 holds every figure exactly, counts included.
            self._values = torch.stack(list(map(Tensor.double, figures.values())))
        if device.type not in self.ON_TIME:
            if figures:
                on_host = torch.empty(len(figures), dtype=torch.float64, pin_memory=True)
                self._values = on_host.copy_(self._values, non_blocking=True)
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        self._seconds = time.perf_counter()

    def read(self, earlier: StepEnd) -> tuple[dict[str, float], float]:
        """Returns the figures, and the seconds from an earlier end, which has been read.

        On a GPU it waits until the work has come to this point.
        """
        seconds = self._seconds - earlier._seconds
        if self._event is not None:
            self._event.synchronize()
            if earlier._event is not None:
                seconds = earlier._event.elapsed_time(self._event) / 1000.0
        return dict(zip(self._names, self._values.tolist(), strict=True)), seconds


def train_step(
    runner: StageRunner,
    optimizer: Optimizer,
    batches: Batches,
    *,
    learning_rate: float | Tensor,
    decoupled_learning_rate: float | Tensor | None = None,
    look: Look | None = None,
    masked: MaskedMean | None = None,
) -> StepResult:
    """Runs all micro-batches forward and backward and updates the weights once.

    The loss is the mean over micro-batches and over the ranks of `dp_cp_group`. These ranks hold
    equally many tokens, so the gradients are those of the global batch.
    Issues two all-reduces of the 0-d loss: over `dp_cp_group` and over `pp_group`.
    learning_rate: a 0-d tensor in a CUDA graph, which reads it anew in every step.
    decoupled_learning_rate: the rate of the word embedding and the output layer; None: the same.
    look: runs each stage of the first micro-batch.
    masked: how the losses of micro-batches with a loss mask become one. The loss is then the mean
        over the tokens of the global batch that count.
    """
    optimizer.zero_grad()
    parallel = runner.parallel
    # Copies of the states that the update writes into: they are this step's figures.
    scale = None if optimizer.loss_scale is None else optimizer.loss_scale.scale.clone()
    with runner.timed("forward-backward"):
        loss = runner.train(
            batches,
            loss_factor=1.0 / (len(batches) * parallel.dp_cp_size),
            look=look,
            mask_factors=None if masked is None else masked.factors,
            loss_scale=scale,
            before_last=optimizer.sync_next_backward,
        )
    own_loss = loss
    # Pipeline ranks without the last stage add 0.
    loss = all_reduce(all_reduce(loss, parallel.dp_cp_group), parallel.pp_group)
    if masked is not None:
        loss = loss / masked.num_tokens.to(loss.dtype)
    with runner.timed("optimizer"):
        update = optimizer.step(
            learning_rate, loss, decoupled_learning_rate=decoupled_learning_rate
        )
    for router in runner.routers:
        router.update_bias(update.skipped)
    return StepResult(
        loss,
        update,
        torch.ones_like(loss) if scale is None else scale,
        None if optimizer.spikes is None else optimizer.spikes.mean.clone(),
        own_loss,
    )


class MicroBatchLoss(NamedTuple):
    """How the token losses of each micro-batch of a step become its loss.

    The loss is linear in the token losses. The gradient of each one is therefore known before the
    forward, from the factors and the loss mask alone. A loss in one pass
    (linear_cross_entropy.py) computes the gradients of the head from it in forward.

    factor: the factor on each micro-batch's mean loss.
    mask_factors: [m], for micro-batches with a loss mask: the factor on the gradients of each one's
        sum of masked losses. The sum itself has no factor. None: no factor on the gradients either.
    scale: the 0-d factor on all gradients. None leaves them as they are.
    dtype: that of the token losses.
    """

    factor: float
    mask_factors: Tensor | None = None
    scale: Tensor | None = None
    dtype: torch.dtype = torch.float32

    def of(self, losses: Tensor, mask: Tensor | None, number: int) -> Tensor:
        """Returns the loss of micro-batch `number`, 0-d, from its token losses [b, s].

        mask: [b, s], the loss mask. None: all tokens count.
        """
        if mask is None:
            loss = losses.mean() * self.factor
        else:
            loss = (losses * mask).sum()
            if self.mask_factors is not None:
                loss.register_hook(self.mask_factors[number].mul)
        # The hook has the effect of a product with the scale, which would keep one more tensor.
        if self.scale is not None:
            loss.register_hook(self.scale.mul)
        return loss

    def gradient(self, labels: Tensor, mask: Tensor | None, number: int) -> LossGradient:
        """Returns a function that computes the gradient of the token losses, for GPTModel.losses.

        labels, mask: [b, s], those of micro-batch `number`.
        """

        def of_any_losses() -> Tensor:
            # The loss is linear, so its gradient is that at any values of the token losses.
            with torch.enable_grad():
                losses = torch.zeros(
                    labels.shape, dtype=self.dtype, device=labels.device, requires_grad=True
                )
                return torch.autograd.grad(self.of(losses, mask, number), losses)[0]

        return of_any_losses


class StageRunner:
    """The stages of one rank, and the links to the ranks that hold the other stages.

    links: send and receive hidden states along the pipeline. None without a pipeline.
    num_kept: how many micro-batches of each window save all activations. A window is as long as the
        number of micro-batches in flight on this rank (2205.05198, appendix C).
    overlap: receive the input of an action while the action before it computes.
    everywhere: whether stages in the middle of a pipeline read the micro-batches too, for the
        places of their documents.
    loss_in_one_pass: whether the forward of a loss in chunks also computes the gradients of the
        head (RunConfig.loss_in_one_pass).
    timed: times the parts of a step, by the names of training/profiler.py; none of evaluations.
    """

    def __init__(
        self,
        model: ModelStages,
        parallel: ParallelState,
        *,
        links: Links | None = None,
        num_kept: int = 0,
        overlap: bool = True,
        everywhere: bool = False,
        loss_in_one_pass: bool = False,
    ) -> None:
        self.model, self.parallel = model, parallel
        self.links = links
        self._everywhere, self._loss_in_one_pass = everywhere, loss_in_one_pass
        self._chunks = list(model)
        self.routers: list[Any] = [one for one in model.modules() if hasattr(one, "update_bias")]
        # All ranks need one dtype for the all-reduce of the loss, also those that have no loss.
        self._loss_dtype = torch.promote_types(torch.float32, self._chunks[0].context.params_dtype)
        # By number of micro-batches: a rank's actions, and the forwards that save all activations.
        place = parallel.pp_size, parallel.pp_rank
        self._order = partial(StepOrder, *place, num_chunks=len(self._chunks))
        self._actions = cache(lambda count: self._order(count).actions())
        self._whole = cache(lambda count: self._order(count).keeping_all(num_kept))
        self.timed: Timed = not_timed
        if links is not None:
            stages = [chunk.stage for chunk in self._chunks]
            self._run = partial(run_actions, stages=stages, links=links, overlap=overlap)

    @classmethod
    def of(cls, config: RunConfig, model: ModelStages, parallel: ParallelState) -> StageRunner:
        """Returns the runner of a run.

        Raises ValueError for a batch that does not divide over ranks and micro-batches.
        """
        links = None
        if parallel.pp_size > 1:
            context = next(iter(model)).context
            # Between stages: [s/c, b, h], or [s/(c t), b, h] under sequence parallelism.
            shards = context.tp_size if context.sequence_parallel else 1
            seq_length = config.data.seq_length // parallel.cp_size // shards
            links = Links(
                parallel.pp_direction_groups,
                device=parallel.device,
                dtype=residual_dtype(config.model, context),
                shape=(seq_length, config.training.micro_batch_size, config.model.hidden_size),
            )
        return cls(
            model,
            parallel,
            links=links,
            overlap=config.parallel.overlap_p2p_comm,
            everywhere=config.data.reset_attention_mask,
            num_kept=config.recompute.num_microbatches_with_partial_activation_checkpoints or 0,
            loss_in_one_pass=config.loss_in_one_pass,
        )

    def train(
        self,
        batches: Batches,
        *,
        loss_factor: float,
        look: Look | None = None,
        mask_factors: Tensor | None = None,
        loss_scale: Tensor | None = None,
        before_last: Callable[[Iterable[nn.Parameter]], None] = lambda parameters: None,
    ) -> Tensor:
        """Runs forward and backward of all micro-batches. Returns the sum of their losses, 0-d.

        The sum is 0 on a rank without the last stage.
        loss_factor: the factor on each micro-batch's mean loss.
        mask_factors: [m], for micro-batches with a loss mask: the factor on the gradients of each
            one's sum of masked losses. The result is then the sum of these sums, without factors.
        look: runs each stage of the first micro-batch. Without a pipeline it may run the backward
            too, and returns a loss without a graph then.
        loss_scale: the 0-d factor on the gradients. None leaves them as they are.
        before_last: called with a stage's parameters before the last backward through that stage.
        """
        if not self.model.training:  # it visits every module: 3 % of the smallest model's step
            self.model.train()
        # A rank's part of a router's losses counts as its part of the loss does: each micro-batch,
        # and each data-parallel rank, has an equal share.
        share = loss_factor * self.parallel.cp_size
        for router in self.routers:
            router.start_step(share if loss_scale is None else loss_scale * share)
        count, dtype = len(batches), self._loss_dtype
        step_loss = MicroBatchLoss(
            factor=loss_factor,
            mask_factors=None if mask_factors is None else mask_factors.to(dtype),
            scale=loss_scale,
            dtype=dtype,
        )
        forward: Forward = partial(
            self._stage, batches, step_loss, self._whole(count), self.timed, look
        )

        def before_backward(action: Action) -> None:
            if action.microbatch == count - 1:
                before_last(self._chunks[action.chunk].parameters())

        if self.links is not None:
            self._reserve(count)
            losses = self._run(
                self._actions(count), forward, timed=self.timed, before_backward=before_backward
            )
        else:
            losses = []
            for number in range(count):
                action = Action("forward", number)
                before_backward(action)
                loss = forward(action, None)
                if look is None or loss.requires_grad:  # else `look` has run it
                    with self.timed("backward-compute"):
                        loss.backward()
                losses.append(loss.detach())
                del loss  # else its graph would live on during the next forward
        if losses:
            return sum(losses[1:], start=losses[0])
        return torch.zeros((), dtype=dtype, device=self.parallel.device)

    @torch.no_grad()
    def evaluate(self, batches: Batches) -> Tensor:
        """Returns the sum of the micro-batches' mean losses, 0-d float64.

        With loss masks it is the sum of the losses that count.
        The sum is 0 on a rank without the last stage.
        """
        self.model.eval()
        forward = partial(self._stage, batches, MicroBatchLoss(factor=1.0), (), not_timed, None)
        actions = self._order(len(batches)).forwards()
        if self.links is None:
            losses = [forward(action, None) for action in actions]
        else:
            losses = self._run(actions, forward)
        self.model.train()
        return sum(losses, start=torch.zeros((), dtype=torch.float64, device=self.parallel.device))

    def _stage(
        self,
        batches: Batches,
        step_loss: MicroBatchLoss,
        whole: Collection[Action],
        timed: Timed,
        look: Look | None,
        action: Action,
        hidden_states: Tensor | None,
    ) -> Tensor:
        """Runs one stage on a micro-batch. Returns hidden states, or the loss on the last stage.

        whole: the forwards that save all activations.
        look: runs the first micro-batch.
        """
        chunk, number = self._chunks[action.chunk], action.microbatch
        plan, is_last = chunk.decoder.plan, chunk.stage.is_last
        if action in whole:
            plan = keep_everything(chunk.stage.num_layers)

        def run() -> Tensor:
            with timed("forward-compute"):
                if hidden_states is not None and not is_last and not self._everywhere:
                    return chunk(hidden_states, plan=plan)
                # The stage holds only those tensors of the micro-batch that it uses.
                with timed("batch-generator"):
                    inputs, labels, mask, documents = batches[number]
                inputs = inputs if hidden_states is None else hidden_states
                if not is_last:
                    del labels, mask  # they would live on while the stage runs
                    return chunk(inputs, None, documents, plan=plan)
                gradient = None
                if self._loss_in_one_pass and self.model.training:
                    gradient = step_loss.gradient(labels, mask, number)
                losses = chunk(inputs, labels, documents, gradient, plan)
                return step_loss.of(losses, mask, number)

        return run() if look is None or number else look(chunk, plan, run)

    def _reserve(self, num_microbatches: int) -> None:
        """Reserves memory for the inputs that a step of so many micro-batches keeps at once."""
        if not any(chunk.decoder.plan.contiguous for chunk in self._chunks):
            return
        # The order repeats after 2p micro-batches. More micro-batches do not raise the maximum.
        actions = self._actions(min(num_microbatches, 2 * self.parallel.pp_size))
        held, most = Counter[int](), Counter[int]()  # by chunk: now, and at any time
        for action in actions:
            held[action.chunk] += 1 if action.kind == "forward" else -1
            most |= held
        for number, chunk in enumerate(self._chunks):
            chunk.decoder.stores.reserve(most[number])
