"""The functions for your own scripts: describe a run, explain it, plan it, train it, and put a
recompute policy on any model.

    config = run_config(num_layers=4, hidden_size=256, ...)
    train(config)

Importing this module loads nothing else: each function imports what it needs. A policy on a model
of another library loads torch and a part of megatron_lite/recompute. docs/training.md has
examples.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from megatron_lite.config.checks import InputError
    from megatron_lite.config.run import RunConfig
    from megatron_lite.fit.memory_fit import fit_memory_
    from megatron_lite.fit.trainer_callback import MemoryBudgetCallback
    from megatron_lite.model.gpt import ModelStages
    from megatron_lite.plan.verdict import FitVerdict
    from megatron_lite.recompute.apply import apply_policy_, remove_policy_

__all__ = [
    "InputError",
    "MemoryBudgetCallback",
    "RunConfig",
    "TrainedRun",
    "apply_policy_",
    "explain",
    "fit_memory_",
    "peak_bytes",
    "plan",
    "remove_policy_",
    "run_config",
    "train",
]


# what is defined elsewhere, with its description
_ELSEWHERE = {
    "InputError": "config.checks",
    "MemoryBudgetCallback": "fit.trainer_callback",
    "RunConfig": "config.run",
    "apply_policy_": "recompute.apply",
    "remove_policy_": "recompute.apply",
    "fit_memory_": "fit.memory_fit",
}


def __getattr__(name: str) -> Any:
    """Returns a class or function of this interface that is defined elsewhere."""
    if name not in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"megatron_lite.{_ELSEWHERE[name]}"), name)


class TrainedRun(NamedTuple):
    """The result of `train` on this rank.

    config: the run's settings, with those that were derived at its start.
    model: this rank's stages of the model, with the trained weights.
    iteration: the last iteration. It is before the end if a setting such as exit_interval ended
        the run.
    consumed_samples: the samples that all ranks have read.
    """

    config: RunConfig
    model: ModelStages
    iteration: int
    consumed_samples: int


def run_config(*, preset: str | None = None, **settings: Any) -> RunConfig:
    """Returns the configuration of a run.

    preset: the name of a model of `megatron-lite plan --model`, such as "llama3-8b". It gives the
        shape of the model and the vocabulary; settings override it.
    settings: fields of the configuration by name, such as num_layers=4. Each is a flag of
        pretrain_gpt.py with underscores for dashes: --recompute-policy is recompute_policy. A flag
        that turns something off is a field that is False: --disable-bias-linear is
        add_bias_linear=False.

    Raises TypeError for a name that is no field, or for a field without a default that is missing.
    Raises ValueError for a value that breaks a rule; the message names the flag.
    """
    from megatron_lite.config.run_flags import build_run, run_fields

    if preset is not None:
        from megatron_lite.config import known_models

        settings = {**known_models.model_of("--model", preset)[0], **settings}
    fields = run_fields()
    if unknown := settings.keys() - fields.keys():
        raise TypeError(f"no setting of a run: {', '.join(sorted(unknown))}")
    needed = [name for name, one in fields.items() if one.is_required and name not in settings]
    if needed:
        raise TypeError(f"missing settings of a run: {', '.join(needed)}")
    return build_run(settings)


def train(config: RunConfig) -> TrainedRun:
    """Trains in this process, and returns when the run has ended.

    Under torchrun or srun every rank calls this function with the same configuration, and the
    function forms and leaves the process groups. The log goes to standard output. Unlike
    `megatron-lite train`, nothing watches over other ranks: if one dies, the launcher must end the
    others, or their collectives fail after distributed_timeout_minutes.

    Raises InputError for faults in files, in the launch or in the configuration, and TrainingError
    if the run cannot go on, for example because the loss is not finite.
    """
    from megatron_lite.cli.supervised import ready_to_train
    from megatron_lite.parallel.launch import read_launch
    from megatron_lite.parallel.state import parallel_state
    from megatron_lite.training.build_trainer import build_trainer
    from megatron_lite.training.out_of_memory import memory_limited

    launch = read_launch()
    config, _ = ready_to_train(config, (), launch)
    seed = config.training.seed
    with (
        parallel_state(config.parallel, seed=seed, launch=launch, run=config) as parallel,
        memory_limited(config, parallel.device),
    ):
        trainer = build_trainer(config, parallel)
        progress = trainer.run()
        return TrainedRun(
            trainer.config, trainer.model, progress.iteration, progress.consumed_samples
        )


def explain(config: RunConfig, *, num_ranks: int = 1) -> str:
    """Returns the text of `megatron-lite explain`, about what each layer keeps and rebuilds.

    num_ranks: the ranks of the run. 1: those of one replica of the model.
    Raises InputError if the run does not divide over the ranks.
    """
    from megatron_lite.cli.explanation import explanation

    return "\n".join(explanation(config, (), num_ranks))


def peak_bytes(config: RunConfig, *, num_ranks: int | None = None, device: str = "cuda") -> int:
    """Returns the predicted peak of a training step on the fullest rank, in bytes.

    It counts what the step allocates through torch: weights, gradients, optimizer states,
    activations and temporaries.

    num_ranks: the ranks of the run; by default those of one replica of the model.
    device: "cuda" or "cpu". Kernels of the two keep different tensors.
    Raises ValueError if the run does not divide over the ranks.
    """
    from megatron_lite.memory.predict.step_peak import fullest_step_peak

    parallel = config.parallel
    dp_size = parallel.data_parallel_size(num_ranks or parallel.model_ranks)
    return fullest_step_peak(config, device=device, dp_size=dp_size).num_bytes


def plan(
    config: RunConfig,
    *,
    gpu: str,
    num_gpus: int,
    memory: str | None = None,
    fixed: Mapping[str, Any] | None = None,
) -> FitVerdict:
    """Returns the fastest layouts and recompute policies with which the run fits.

    The model, the batch and the precision are those of `config`. Its layout and its policy are
    searched, so they do not count, unless they are in `fixed`.

    gpu: a name of `megatron-lite plan --gpu`, such as "h100-80gb", or a JSON file of
        megatron_lite.tools.calibrate.
    memory: such as "40GiB", instead of the card's memory.
    fixed: settings that a plan must have, by name, such as {"tensor_model_parallel_size": 4}.

    The result's `plan` is the best plan, or None; `plan.config` can be trained, and `word` is
    "fits", "tight" (with a part of the reserve only) or "does not fit".
    Raises InputError if training would refuse every layout.
    """
    from megatron_lite.config.units import parse_bytes
    from megatron_lite.plan.auto_policy import Budget, default_reserve
    from megatron_lite.plan.hardware import load_hardware
    from megatron_lite.plan.problem import problem_of
    from megatron_lite.plan.verdict import verdict

    hardware = load_hardware(gpu)
    num_bytes = hardware.memory_bytes if memory is None else parse_bytes("memory", memory)
    problem = problem_of(config.values, dict(fixed or {}), hardware, notes=[])
    return verdict(problem, num_gpus, Budget(num_bytes, default_reserve(num_bytes)))
