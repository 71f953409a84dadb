"""Runs the micro-batches of a step through the stages that this rank holds, alone or as a part of a pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_lite.config.run import RunConfig
from megatron_lite.model.gpt import GPTModel
from megatron_lite.model.stages import ModelStages
from megatron_lite.optim.loss_scale import scale_backward
from megatron_lite.parallel.state import ParallelState
from megatron_lite.pipeline.executor import run_actions
from megatron_lite.pipeline.links import Links
from megatron_lite.pipeline.order import Action, forwards_only, in_flight, keeping_all, order
from megatron_lite.recompute.plan import RecomputePlan, keep_everything
from megatron_lite.training.batches import Batches
from megatron_lite.training.observe import Observer


class _Step(NamedTuple):
    """What a rank does in a step. whole: forwards that keep everything. waiting: by stage, how many of its micro-batches wait for
    backward at once."""

    actions: list[Action]
    whole: frozenset[Action]
    waiting: list[int]


class StageRunner:
    """The stages of one rank, and how it talks to the ranks that hold the others.

    links: to the neighbours in the pipeline, None without one. num_kept: of as many micro-batches as can be in flight, so many
    keep everything (2205.05198, appendix C). overlap: receive what an action needs while the one before it computes.
    """

    def __init__(self, model: ModelStages, parallel: ParallelState, *, links: Links | None = None, num_kept: int = 0,
                 overlap: bool = True) -> None:
        self.model, self.parallel = model, parallel
        self.links, self._num_kept, self._overlap = links, num_kept, overlap
        self._chunks = list(model)
        self._steps: dict[int, _Step] = {}  # by number of micro-batches

    @classmethod
    def of(cls, config: RunConfig, model: ModelStages, parallel: ParallelState) -> StageRunner:
        """That of a run."""
        if parallel.pp_size == 1:
            return cls(model, parallel)
        context = next(iter(model)).context
        seq_length = config.data.seq_length // parallel.cp_size // (context.size if context.sequence_parallel else 1)
        links = Links(parallel.pp_lanes, device=parallel.device, dtype=context.params_dtype,
                      shape=(seq_length, config.training.micro_batch_size, config.model.hidden_size))
        return cls(model, parallel, links=links, overlap=config.parallel.overlap_p2p_comm,
                   num_kept=config.recompute.num_microbatches_with_partial_activation_checkpoints or 0)

    def train(self, batches: Batches, *, share: float, observer: Observer, loss_scale: Tensor | None = None,
              before_last: Callable[[Iterable[nn.Parameter]], None] | None = None,
              after: Callable[[Action], None] | None = None) -> Tensor:
        """Forward and backward of all micro-batches, whose mean losses count `share` each. Returns their sum, 0-d.

        0 on a rank without the last stage. loss_scale: 0-d, by which gradients are multiplied. observer: looks at the first
        micro-batch. before_last: called before the last backward through each stage, with the stage's parameters. after: called
        after each action of a pipeline.
        """
        def before_backward(number: int, chunk: GPTModel) -> None:
            if before_last is not None and number == len(batches) - 1:
                before_last(chunk.parameters())

        self.model.train()
        if self.links is None:
            (chunk,) = self._chunks
            loss_of = partial(_loss, chunk, batches, share=share, scale=loss_scale)
            losses = []
            for number in range(len(batches)):
                before_backward(number, chunk)
                losses.append((observer if number == 0 else Observer()).micro_batch(chunk, partial(loss_of, number)))
            return self._sum(losses)
        step = self._step_of(len(batches))
        for chunk, waiting in zip(self._chunks, step.waiting, strict=True):
            chunk.decoder.stores.micro_batches = waiting

        def forward(action: Action, hidden_states: Tensor | None) -> Tensor:
            chunk = self._chunks[action.chunk]
            plan = keep_everything(chunk.stage.num_layers) if action in step.whole else chunk.decoder.plan
            run = partial(_stage, chunk, batches, action.microbatch, share, hidden_states, plan, loss_scale)
            del hidden_states
            return observer.forward(chunk, plan, run) if action.microbatch == 0 else run()

        return self._sum(run_actions(step.actions, forward, stages=[chunk.stage for chunk in self._chunks], links=self.links,
                                     overlap=self._overlap, after=after,
                                     before_backward=lambda action: before_backward(action.microbatch,
                                                                                    self._chunks[action.chunk])))

    @torch.no_grad()
    def evaluate(self, batches: Batches) -> Tensor:
        """The sum of the micro-batches' mean losses, 0-d float64; 0 on a rank without the last stage."""
        self.model.eval()
        if self.links is None:
            (chunk,) = self._chunks
            total = self._sum((_loss(chunk, batches, number, 1.0) for number in range(len(batches))), torch.float64)
        else:
            def forward(action: Action, hidden_states: Tensor | None) -> Tensor:
                return _stage(self._chunks[action.chunk], batches, action.microbatch, 1.0, hidden_states, None)

            actions = forwards_only(size=self.parallel.pp_size, num_microbatches=len(batches), chunks=len(self._chunks))
            total = self._sum(run_actions(actions, forward, stages=[chunk.stage for chunk in self._chunks], links=self.links,
                                          overlap=self._overlap), torch.float64)
        self.model.train()
        return total

    def _step_of(self, num_microbatches: int) -> _Step:
        if num_microbatches not in self._steps:
            shape = dict(size=self.parallel.pp_size, rank=self.parallel.pp_rank, num_microbatches=num_microbatches,
                         chunks=len(self._chunks))
            actions = order(**shape)
            held = [Counter(action.chunk for action in waiting) for _, waiting in in_flight(actions)]
            self._steps[num_microbatches] = _Step(actions, keeping_all(**shape, num_kept=self._num_kept),
                                                  [max(counts[chunk] for counts in held) for chunk in range(len(self._chunks))])
        return self._steps[num_microbatches]

    def _sum(self, losses: Iterable[Tensor], at_least: torch.dtype = torch.float32) -> Tensor:
        dtype = torch.promote_types(at_least, self._chunks[0].context.params_dtype)  # the same on every rank
        total = torch.zeros((), dtype=dtype, device=self.parallel.device)
        for loss in losses:
            total += loss
        return total


def _loss(model: GPTModel, batches: Batches, number: int, share: float, scale: Tensor | None = None) -> Tensor:
    batch = batches[number]
    return scale_backward(model.loss(batch.tokens, batch.labels).mean() * share, scale)


def _stage(chunk: GPTModel, batches: Batches, number: int, share: float, hidden_states: Tensor | None,
           plan: RecomputePlan | None, scale: Tensor | None = None) -> Tensor:
    """What one stage makes of a micro-batch: hidden states, or the last one the loss."""
    inputs = batches[number].tokens if hidden_states is None else hidden_states
    if not chunk.stage.is_last:
        return chunk.run_stage(inputs, None, plan)
    return scale_backward(chunk.run_stage(inputs, batches[number].labels, plan).mean() * share, scale)
