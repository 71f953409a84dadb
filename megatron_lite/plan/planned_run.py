"""A run whose layout is given and whose policy is looked for, with the machine that it is for."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.memory.predict.step_peak import StepPeak, fullest_step_peak, step_peak
from megatron_lite.plan.hardware import Hardware


class Run(NamedTuple):
    """A run without a policy, and the machine that it is planned for.

    host_bytes: the host memory of a rank in which a policy may keep tensors. 0: none.
    """

    config: RunConfig
    hardware: Hardware
    num_ranks: int
    host_bytes: int = 0

    @property
    def dp_cp_size(self) -> int:
        """The ranks that share out the states, over data and context parallelism together."""
        parallel = self.config.parallel
        return parallel.data_parallel_size(self.num_ranks) * parallel.context_parallel_size

    @property
    def most_microbatches(self) -> int:
        """The micro-batches on one rank of a step with the run's largest batch."""
        size = self.config.parallel.data_parallel_size(self.num_ranks)
        return self.config.training.most_microbatches(size)

    def rank_peak(self, config: RunConfig, rank: int) -> StepPeak:
        """Returns the peak of a pipeline rank. config: this run with a policy."""
        return step_peak(
            config,
            rank,
            device=self.hardware.device,
            dp_cp_size=self.dp_cp_size,
            num_microbatches=self.most_microbatches,
        )

    def chosen(self, config: RunConfig) -> Chosen:
        """Returns the run with a policy and the peak of its fullest rank."""
        peak = fullest_step_peak(
            config,
            device=self.hardware.device,
            dp_cp_size=self.dp_cp_size,
            num_microbatches=self.most_microbatches,
        )
        return Chosen(config, peak)


class Chosen(NamedTuple):
    """A run with its policy, and the peak of its fullest rank."""

    config: RunConfig
    peak: StepPeak


def with_policy(config: RunConfig, text: str | None) -> RunConfig:
    """Returns the run with another policy, or with none. Other recompute settings stay."""
    own = config.recompute
    recompute = RecomputeConfig(
        recompute_policy=text,
        recompute_tail_skip=own.recompute_tail_skip,
        recompute_verify=own.recompute_verify,
    )
    return replace(config, recompute=recompute)
