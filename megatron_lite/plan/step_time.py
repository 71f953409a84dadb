"""The predicted time of a training step of a RunConfig on a machine, term by term.

    time = max over pipeline ranks (computation + waits + reduction) + optimizer + gathers

docs/planning.md has the formulas and how well they predict published runs. The matmuls, bytes and
collectives come from description/, the replays from the plan that a run executes, and the order of
micro-batches from pipeline/order.py. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage, stages
from megatron_lite.description.sizes import ELEMENT_BYTES, Sizes, residual_bytes
from megatron_lite.memory.predict.flops import step_flops
from megatron_lite.pipeline.order import Action, keeping_all
from megatron_lite.plan.hardware import Group, Hardware
from megatron_lite.plan.operation_time import Clock, Memo, Seconds
from megatron_lite.plan.pipeline_time import Durations, run_pipeline, shortest_pipeline
from megatron_lite.plan.stage_time import StageTime, stage_time
from megatron_lite.plan.update_time import UpdateTime, update_time
from megatron_lite.recompute.recompute_plan import RecomputePlan, keep_everything
from megatron_lite.recompute.schedule import plan_stage

PIPELINE_WAITS = "waits of the pipeline"
REDUCTION = "reduction of gradients"
OPTIMIZER = "optimizer"
WEIGHT_GATHERS = "gathers of weights"


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The predicted time of a step.

    terms: the seconds of each term, on the pipeline rank that ends last. They add up to `seconds`.
    rank: that pipeline rank.
    model_flops: the model FLOPs of a step on all ranks, as the logs count them.
    peak_flops: the peak of one rank.
    """

    terms: Mapping[str, float]
    rank: int
    num_ranks: int
    tokens: int
    model_flops: int
    peak_flops: float

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return sum(self.terms.values())

    @property
    def tokens_per_second(self) -> float:
        """The tokens of all ranks per second."""
        return self.tokens / self.seconds

    @property
    def tflops_per_gpu(self) -> float:
        """The model TFLOP/s of one rank."""
        return self.model_flops / self.seconds / self.num_ranks / 1e12

    @property
    def mfu(self) -> float:
        """The share of the peak that the model FLOPs use, from 0 to 1."""
        return self.tflops_per_gpu * 1e12 / self.peak_flops


def step_time(
    config: RunConfig,
    hardware: Hardware,
    num_ranks: int,
    *,
    fused_accumulation: bool = False,
    all_stages: Sequence[Stage] | None = None,
    transfer_bytes: int | None = None,
    memo: Memo | None = None,
    bound: bool = False,
) -> StepTime:
    """Returns the time of one step of the full batch.

    fused_accumulation: whether NVIDIA apex's kernel adds weight gradients to their sums
        (`--no-gradient-accumulation-fusion` turns it off).
    all_stages: other stages than the flags describe, in the order of the model.
    transfer_bytes: the bytes that a rank sends to the next stage, if they are not its hidden
        states.
    memo: results for this model on this machine, which a search over layouts shares.
    bound: whether to return a lower bound, in less time: the pipeline's longest simple path instead
        of a simulation.
    Raises ValueError if the ranks or the batch do not divide, or if the vocabulary is not known.
    """
    parallel, model = config.parallel, config.model
    t, c, p = (
        parallel.tensor_model_parallel_size,
        parallel.context_parallel_size,
        parallel.pipeline_model_parallel_size,
    )
    dp_size = parallel.data_parallel_size(num_ranks)
    num_microbatches = config.training.num_microbatches(dp_size)
    # Ranks are numbered tensor-parallel first, then context-, data- and pipeline-parallel.
    clock = Clock.of(config, hardware, Memo() if memo is None else memo)
    data_parallel, pipeline = Group(dp_size * c, t), Group(p, t * c * dp_size)
    model_stages = tuple(all_stages or stages(parallel, model.num_layers))
    num_chunks = len(model_stages) // p
    times = _StageTimes(
        config,
        clock,
        model_stages,
        num_microbatches=num_microbatches,
        data_parallel=data_parallel,
        # torch's addmm does so for float32 weights, without apex
        fused_accumulation=config.training.gradient_accumulation_fusion
        and (fused_accumulation or clock.element_bytes == ELEMENT_BYTES["fp32"]),
    )
    hidden = residual_bytes(model, Sizes.of(config, device=hardware.device))
    transfer = hardware.transfer_seconds(
        transfer_bytes or hidden, inside=pipeline.is_inside_a_node(hardware)
    )
    durations = Durations(
        times.duration,
        transfer if p > 1 else 0.0,
        parallel.overlap_p2p_comm,
        # Micro-batches that keep everything have another backward than those that do not.
        alike=config.recompute.num_microbatches_with_partial_activation_checkpoints is None,
    )
    run = shortest_pipeline if bound else run_pipeline
    ran = run(durations, size=p, num_microbatches=num_microbatches, num_chunks=num_chunks)
    # A tied embedding is on the first and the last pipeline rank, which are p - 1 strides apart.
    updates = times.updates(data_parallel, Group(min(p, 2), (p - 1) * pipeline.stride or 1))
    last = max(range(p), key=lambda rank: ran[rank].end + updates[rank].reduction)
    terms = times.of_rank(last)
    terms[PIPELINE_WAITS] = ran[last].end - ran[last].busy
    terms[REDUCTION] = updates[last].reduction
    # The norm of all gradients makes every rank wait before its update.
    terms[OPTIMIZER] = max(one.update for one in updates)
    terms[WEIGHT_GATHERS] = max(one.gather for one in updates)
    batch = config.training.batch_size(dp_size)
    shape = dict(
        seq_length=config.data.seq_length, padded_vocab_size=config.tokenizer.padded_vocab_size(t)
    )
    flops = clock.memo.once(
        ("model FLOPs", *shape.values()), lambda: step_flops(model, batch=1, **shape)
    )
    return StepTime(
        terms={term: seconds for term, seconds in terms.items() if seconds > 0.0},
        rank=last,
        num_ranks=num_ranks,
        tokens=batch * config.data.seq_length,
        model_flops=batch * flops,
        peak_flops=hardware.matmuls(clock.element_bytes).peak_flops,
    )


class _StageTimes:
    """The times of every stage, each computed once."""

    def __init__(
        self,
        config: RunConfig,
        clock: Clock,
        all_stages: Sequence[Stage],
        *,
        num_microbatches: int,
        data_parallel: Group,
        fused_accumulation: bool,
    ) -> None:
        self._config, self._clock, self._stages = config, clock, all_stages
        self._data_parallel, self._fused = data_parallel, fused_accumulation
        self._size = config.parallel.pipeline_model_parallel_size
        self._microbatches = num_microbatches
        self._chunks = len(all_stages) // self._size
        num_kept = config.recompute.num_microbatches_with_partial_activation_checkpoints or 0
        # By rank: the forwards that keep everything, whose backward runs nothing again.
        self._whole = [
            keeping_all(
                size=self._size,
                rank=rank,
                num_microbatches=num_microbatches,
                num_kept=num_kept,
                num_chunks=self._chunks,
            )
            if num_kept
            else frozenset()
            for rank in range(self._size)
        ]
        self._totals: dict[tuple[int, bool, str], float] = {}

    def of(self, stage: Stage, keeps_all: bool) -> StageTime:
        """Returns the time of one micro-batch in a stage."""
        return stage_time(
            self._config,
            stage,
            self._plan(stage, keeps_all),
            self._clock,
            data_parallel=self._data_parallel,
            fused_accumulation=self._fused,
        )

    def _plan(self, stage: Stage, keeps_all: bool) -> RecomputePlan:
        recompute, memo, layers = self._config.recompute, self._clock.memo, stage.num_layers
        if keeps_all or not layers:
            return memo.once(("keep", layers), lambda: keep_everything(layers))
        policy = memo.once(("policy", recompute), lambda: recompute.policy)
        number = stage.number if any(rule.stage is not None for rule in policy.rules) else 0
        return memo.once(
            ("plan", recompute, layers, number),
            lambda: plan_stage(recompute, layers, number, policy=policy),
        )

    def duration(self, rank: int, action: Action) -> float:
        """Returns the seconds of one action of a rank."""
        number, keeps_all = action.chunk * self._size + rank, self._keeps_all(rank, action)
        key = (number, keeps_all, action.kind)
        if key not in self._totals:
            one = self.of(self._stages[number], keeps_all)
            self._totals[key] = (one.forward if action.kind == "forward" else one.backward).total()
        return self._totals[key]

    def of_rank(self, rank: int) -> Seconds:
        """Returns the seconds that a rank computes in a step, by term."""
        terms = Seconds()
        for chunk in range(self._chunks):
            kept = sum(action.chunk == chunk for action in self._whole[rank])
            for keeps_all, number in ((True, kept), (False, self._microbatches - kept)):
                if number:
                    one = self.of(self._stages[chunk * self._size + rank], keeps_all)
                    for term, seconds in (one.forward + one.backward).items():
                        terms[term] += number * seconds
        return terms

    def updates(self, data_parallel: Group, embeddings: Group) -> list[UpdateTime]:
        """Returns the times of all ranks after their last backward.

        embeddings: the ranks that share a tied embedding.
        """
        alike: dict[object, UpdateTime] = {}
        found = []
        for rank in range(self._size):
            own = self._stages[rank :: self._size]
            each = [self.of(stage, False) for stage in own]
            forward = sum(one.forward.total() for one in each)
            backward = sum(one.backward.total() for one in each)
            key = (own[0].is_first, own[-1].is_last, own[0].num_layers, forward, backward)
            if key not in alike:
                alike[key] = update_time(
                    self._config,
                    own,
                    self._clock,
                    data_parallel=data_parallel,
                    embeddings=embeddings,
                    forward=forward,
                    backward=backward,
                )
            found.append(alike[key])
        return found

    def _keeps_all(self, rank: int, action: Action) -> bool:
        return bool(self._whole[rank]) and action._replace(kind="forward") in self._whole[rank]
