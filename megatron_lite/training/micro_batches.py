"""Runs the micro-batches of a step through the stages that this rank holds.

The rank may hold the whole model, or be one rank of a pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from megatron_lite.config.run import RunConfig
from megatron_lite.model.embedding import residual_dtype
from megatron_lite.model.gpt import GPTModel
from megatron_lite.model.stage_models import ModelStages
from megatron_lite.parallel.state import ParallelState
from megatron_lite.parallel.timed import Timed, not_timed
from megatron_lite.pipeline.executor import run_actions
from megatron_lite.pipeline.links import Links
from megatron_lite.pipeline.order import Action, forwards_only, in_flight, keeping_all, order
from megatron_lite.recompute.recompute_plan import RecomputePlan, keep_everything
from megatron_lite.training.batches import Batches
from megatron_lite.training.micro_batch_loss import MicroBatchLoss
from megatron_lite.training.observe import Observer

Runner = TypeVar("Runner", bound="StageRunner")


class _Step(NamedTuple):
    """The actions of a rank in a step. whole: the forwards that save all activations."""

    actions: list[Action]
    whole: frozenset[Action]


class StageRunner:
    """The stages of one rank, and the links to the ranks that hold the other stages.

    links: send and receive hidden states along the pipeline. None without a pipeline.
    num_kept: how many micro-batches of each window save all activations. A window is as long as the
        number of micro-batches in flight on this rank (2205.05198, appendix C).
    overlap: receive the input of an action while the action before it computes.
    everywhere: whether stages in the middle of a pipeline read the micro-batches too, for the
        places of their documents.
    most_microbatches: the most micro-batches of any step of the run. The memory for saved inputs is
        allocated for this number at once, and not again when the batch grows. A step with more
        micro-batches enlarges it.
    loss_in_one_pass: whether the forward of a loss in chunks also computes the gradients of the
        head (RunConfig.loss_in_one_pass).
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
        most_microbatches: int | None = None,
        loss_in_one_pass: bool = False,
    ) -> None:
        self.model, self.parallel = model, parallel
        self.links, self._num_kept, self._overlap = links, num_kept, overlap
        self._everywhere, self._loss_in_one_pass = everywhere, loss_in_one_pass
        self._chunks = list(model)
        self._steps: dict[int, _Step] = {}  # by number of micro-batches
        self.timed: Timed = not_timed
        if links is not None and most_microbatches is not None:
            self._reserve(most_microbatches)

    @classmethod
    def of(
        cls: type[Runner], config: RunConfig, model: ModelStages, parallel: ParallelState
    ) -> Runner:
        """Returns the runner of a run.

        Raises ValueError for a batch that does not divide over ranks and micro-batches.
        """
        if parallel.pp_size == 1:
            return cls(model, parallel, loss_in_one_pass=config.loss_in_one_pass)
        batches = config.batch_schedule(parallel.dp_size)
        most = (
            batches.num_microbatches(batches.largest)
            if config.training.global_batch_size is not None
            else None
        )
        context = next(iter(model)).context
        # Hidden states between stages: [s/c, b, h], or [s/(c t), b, h] under sequence parallelism.
        shards = context.size if context.sequence_parallel else 1
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
            most_microbatches=most,
            num_kept=config.recompute.num_microbatches_with_partial_activation_checkpoints or 0,
            loss_in_one_pass=config.loss_in_one_pass,
        )

    def train(
        self,
        batches: Batches,
        *,
        loss_factor: float,
        observer: Observer,
        mask_factors: Tensor | None = None,
        loss_scale: Tensor | None = None,
        before_last: Callable[[Iterable[nn.Parameter]], None] | None = None,
        after: Callable[[Action], None] | None = None,
    ) -> Tensor:
        """Runs forward and backward of all micro-batches. Returns the sum of their losses, 0-d.

        The sum is 0 on a rank without the last stage.
        loss_factor: the factor on each micro-batch's mean loss.
        mask_factors: [m], for micro-batches with a loss mask: the factor on the gradients of each
            one's sum of masked losses. The result is then the sum of these sums, without factors.
        observer: looks at the first micro-batch.
        loss_scale: the 0-d factor on the gradients. None leaves them as they are.
        before_last: called with a stage's parameters before the last backward through that stage.
        after: called after each action of a pipeline.
        """

        def before_backward(number: int, chunk: GPTModel) -> None:
            if before_last is not None and number == len(batches) - 1:
                before_last(chunk.parameters())

        if not self.model.training:  # it visits every module: 3 % of the smallest model's step
            self.model.train()
        if mask_factors is not None:
            mask_factors = mask_factors.to(self._loss_dtype())
        step_loss = MicroBatchLoss(
            factor=loss_factor,
            mask_factors=mask_factors,
            scale=loss_scale,
            in_one_pass=self._loss_in_one_pass,
            dtype=self._loss_dtype(),
        )
        if self.links is None:
            (chunk,) = self._chunks
            loss_of = partial(_loss, chunk, batches, step_loss)
            losses = []
            for number in range(len(batches)):
                before_backward(number, chunk)
                seeing = observer if number == 0 else Observer()
                seeing.timed = self.timed
                losses.append(seeing.micro_batch(chunk, partial(loss_of, number)))
            return self._sum(losses)
        step = self._step_of(len(batches))
        self._reserve(len(batches))

        def forward(action: Action, hidden_states: Tensor | None) -> Tensor:
            chunk = self._chunks[action.chunk]
            plan = (
                keep_everything(chunk.stage.num_layers)
                if action in step.whole
                else chunk.decoder.plan
            )
            run = partial(
                _stage,
                chunk,
                batches,
                step_loss,
                action.microbatch,
                hidden_states,
                plan,
                everywhere=self._everywhere,
            )
            del hidden_states  # `run` holds the only reference that this function still needs
            with self.timed("forward-compute"):
                return observer.forward(chunk, plan, run) if action.microbatch == 0 else run()

        losses = run_actions(
            step.actions,
            forward,
            stages=[chunk.stage for chunk in self._chunks],
            links=self.links,
            overlap=self._overlap,
            timed=self.timed,
            after=after,
            before_backward=lambda action: before_backward(
                action.microbatch, self._chunks[action.chunk]
            ),
        )
        return self._sum(losses)

    @torch.no_grad()
    def evaluate(self, batches: Batches) -> Tensor:
        """Returns the sum of the micro-batches' mean losses, 0-d float64.

        With loss masks it is the sum of the losses that count.
        The sum is 0 on a rank without the last stage.
        """
        self.model.eval()
        mean = MicroBatchLoss(factor=1.0)
        if self.links is None:
            (chunk,) = self._chunks
            total = self._sum(
                (_loss(chunk, batches, mean, number) for number in range(len(batches))),
                torch.float64,
            )
        else:

            def forward(action: Action, hidden_states: Tensor | None) -> Tensor:
                return _stage(
                    self._chunks[action.chunk],
                    batches,
                    mean,
                    action.microbatch,
                    hidden_states,
                    None,
                    everywhere=self._everywhere,
                )

            actions = forwards_only(
                size=self.parallel.pp_size,
                num_microbatches=len(batches),
                num_chunks=len(self._chunks),
            )
            total = self._sum(
                run_actions(
                    actions,
                    forward,
                    stages=[chunk.stage for chunk in self._chunks],
                    links=self.links,
                    overlap=self._overlap,
                ),
                torch.float64,
            )
        self.model.train()
        return total

    def _reserve(self, num_microbatches: int) -> None:
        """Reserves memory for the inputs that a step of so many micro-batches keeps at once."""
        for chunk, waiting in zip(self._chunks, self._waiting(num_microbatches), strict=True):
            chunk.decoder.stores.reserve(waiting)

    def _waiting(self, num_microbatches: int) -> list[int]:
        """Returns, for each of the rank's stages, how many micro-batches await backward at most."""
        size, num_chunks = self.parallel.pp_size, len(self._chunks)
        # The order repeats after 2p micro-batches. More micro-batches do not raise the maximum.
        actions = order(
            size=size,
            rank=self.parallel.pp_rank,
            num_microbatches=min(num_microbatches, 2 * size),
            num_chunks=num_chunks,
        )
        held = [Counter(action.chunk for action in waiting) for _, waiting in in_flight(actions)]
        return [max(counts[chunk] for counts in held) for chunk in range(num_chunks)]

    def _step_of(self, num_microbatches: int) -> _Step:
        if num_microbatches not in self._steps:
            shape = dict(
                size=self.parallel.pp_size,
                rank=self.parallel.pp_rank,
                num_microbatches=num_microbatches,
                num_chunks=len(self._chunks),
            )
            self._steps[num_microbatches] = _Step(
                order(**shape), keeping_all(**shape, num_kept=self._num_kept)
            )
        return self._steps[num_microbatches]

    def _sum(self, losses: Iterable[Tensor], at_least: torch.dtype = torch.float32) -> Tensor:
        # All ranks need one dtype for the all-reduce, also those that have no loss to take it from.
        dtype = self._loss_dtype(at_least)
        total = torch.zeros((), dtype=dtype, device=self.parallel.device)
        for loss in losses:
            total += loss
        return total

    def _loss_dtype(self, at_least: torch.dtype = torch.float32) -> torch.dtype:
        return torch.promote_types(at_least, self._chunks[0].context.params_dtype)


def _loss(model: GPTModel, batches: Batches, step_loss: MicroBatchLoss, number: int) -> Tensor:
    batch = batches[number]
    gradient = step_loss.gradient(batch.labels, batch.loss_mask, number)
    losses = model.loss(batch.tokens, batch.labels, batch.documents, gradient)
    return step_loss.of(losses, batch.loss_mask, number)


def _stage(
    chunk: GPTModel,
    batches: Batches,
    step_loss: MicroBatchLoss,
    number: int,
    hidden_states: Tensor | None,
    plan: RecomputePlan | None,
    *,
    everywhere: bool = False,
) -> Tensor:
    """Runs one stage on a micro-batch. Returns hidden states, or the loss on the last stage."""
    is_last = chunk.stage.is_last
    if hidden_states is not None and not is_last and not everywhere:
        return chunk.run_stage(hidden_states, None, plan)
    # The stage holds only those tensors of the micro-batch that it uses.
    inputs, labels, mask, documents = batches[number]
    inputs = inputs if hidden_states is None else hidden_states
    if not is_last:
        del labels, mask  # they would live on while the stage runs
        return chunk.run_stage(inputs, None, plan, documents)
    gradient = step_loss.gradient(labels, mask, number)
    losses = chunk.run_stage(inputs, labels, plan, documents, gradient)
    return step_loss.of(losses, mask, number)
