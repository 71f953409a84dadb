"""The bytes that a rank holds while it saves a checkpoint, and the most of an evaluation.

A save copies the weights, main weights and optimizer states to host memory before it writes them.
On a GPU the copy takes no device memory. On a CPU it lies beside the originals, and under
--async-save also beside the steps that follow.

An evaluation has no term of its own: its forward holds no more than the forward of a step, which
keeps tensors for backward in addition. Standard library only.
"""

from __future__ import annotations

from megatron_lite.config.run import RunConfig
from megatron_lite.memory.predict.states import rank_states
from megatron_lite.memory.predict.step_peak import PeakTerm, StepPeak


def save_peak(
    config: RunConfig, step: StepPeak, *, device: str, dp_cp_size: int, dp_cp_rank: int = 0
) -> StepPeak | None:
    """Returns the peak of a rank while it saves; None if it saves nothing or needs no memory.

    step: the peak of a step of the same rank. With --async-save it counts too, because a step may
        run while the copy is written.
    The copy is a bound: a rank may write less than it holds.
    """
    if config.checkpoint.save is None or device != "cpu":
        return None
    states = rank_states(config, step.rank, dp_cp_size=dp_cp_size, dp_cp_rank=dp_cp_rank)
    copy = PeakTerm(
        "copy that a save writes", states.weights + states.masters + states.optimizer, "bound"
    )
    if config.checkpoint.async_save:
        return StepPeak(step.rank, f"{step.moment}, during a save", (*step.terms, copy))
    held = (
        PeakTerm("weights", states.weights, "exact"),
        PeakTerm("main weights", states.masters, "exact"),
        PeakTerm("gradients", states.gradients, "exact"),
        PeakTerm("optimizer states", states.optimizer, "exact"),
    )
    return StepPeak(step.rank, "a save", (*(term for term in held if term.num_bytes), copy))
