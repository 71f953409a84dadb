"""Makes one rank fail in one iteration of a run, and returns how the run ends on each rank."""

from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.distributed as dist

from megatron_lite.config.checks import InputError
from megatron_lite.config.parallel import DataParallelConfig
from megatron_lite.model.gpt import GPTModel
from megatron_lite.parallel.state import parallel_state
from megatron_lite.parallel.weight_gradient import own_sum
from megatron_lite.training import loop
from megatron_lite.training.build_trainer import build_trainer
from megatron_lite.training.step import TrainingError
from tests.support.layouts import LAYOUTS

NO_DROPOUT = dict(hidden_dropout=0.0, attention_dropout=0.0)


@dataclass(frozen=True)
class Shape:
    """A layout of ranks."""

    ranks: int
    parallel: dict[str, int] = field(default_factory=dict)
    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)


SHAPES = {
    "alone": Shape(1),
    "tp2": Shape(2, {"tensor_model_parallel_size": 2}),
    "pp2": Shape(2, {"pipeline_model_parallel_size": 2}),
    "cp2": Shape(2, {"context_parallel_size": 2}),
    "dp2": Shape(2),
    "dp2-overlap": Shape(2, data_parallel=LAYOUTS["overlap"]),
    "zero1": Shape(2, data_parallel=LAYOUTS["zero1"]),
    "zero1-overlap": Shape(2, data_parallel=LAYOUTS["zero1, overlap"]),
    "zero1-instances": Shape(4, {"num_distributed_optimizer_instances": 2}, LAYOUTS["zero1"]),
    "fsdp2": Shape(2, data_parallel=LAYOUTS["fsdp2"]),
}


def in_shape(config, name):
    """Returns the run's config in a layout of SHAPES."""
    shape = SHAPES[name]
    return replace(
        config,
        parallel=replace(config.parallel, **shape.parallel),
        data_parallel=shape.data_parallel,
    )


def run_until_it_ends(config, prepare=None):
    """Runs the config on this rank. Returns its trainer, and the error that ended it or None.

    After an error the rank leaves the default group, as the program does.
    """
    error = None
    with parallel_state(config.parallel, seed=config.training.seed) as parallel:
        trainer = build_trainer(config, parallel)
        if prepare is not None:
            prepare(trainer)
        try:
            trainer.run()
        except (TrainingError, InputError, RuntimeError) as failure:
            error = failure
            if dist.is_initialized():
                dist.destroy_process_group()
    return trainer, error


def during_iteration(monkeypatch, iterations, hook):
    """Puts `hook()`, a context manager, around the train_step of these iterations.

    The run must start at iteration 0.
    """
    step, count = loop.train_step, iter(range(1, 10**6))

    def hooked(*args, **options):
        if next(count) not in iterations:
            return step(*args, **options)
        with hook():
            return step(*args, **options)

    monkeypatch.setattr(loop, "train_step", hooked)


def first_step_fails(monkeypatch, error):
    """Raises the error in the first train_step from now on."""

    def fails():
        raise error

    during_iteration(monkeypatch, (1,), fails)


class Poison:
    """A context manager that spoils one value of this rank inside its block.

    where: the spoiled value.
        "loss": the first loss in the block, by the factor `value`, which gradients have too.
        "loss alone": the first loss in the block, by adding `value`, which changes no gradient.
        "gradient": the gradient of the hidden states that this rank's last layer returns.
        Any other text is the end of a parameter's name and means its gradient.
    """

    def __init__(self, where, value):
        self.where, self.value = where, value

    def __enter__(self):
        self._monkeypatch = pytest.MonkeyPatch()
        spoiled = False

        def losses(model, hidden_states, *others):
            nonlocal spoiled
            is_first, spoiled = not spoiled, True
            if is_first and not self.where.startswith("loss"):
                named = {"gradient": hidden_states, **dict(model.named_parameters())}
                self._spoil_gradient_of(
                    next(value for name, value in named.items() if name.endswith(self.where))
                )
            found = true_losses(model, hidden_states, *others)
            if not is_first or not self.where.startswith("loss"):
                return found
            return found * self.value if self.where == "loss" else found + self.value

        true_losses = GPTModel.losses
        self._monkeypatch.setattr(GPTModel, "losses", losses)

    def __exit__(self, *_):
        self._monkeypatch.undo()

    def _spoil_gradient_of(self, target):
        """Spoils the next gradient of the tensor, once."""
        if own_sum(target) is None:
            handle = target.register_hook(lambda grad: (handle.remove(), self._spoil(grad))[1])
            return

        # The matmul adds the gradient of such a weight to its sum, and autograd sees none.
        def spoil(owner):
            added.remove()
            assert owner.grad is not None
            owner.grad.view(-1)[3] = self.value

        added = target.register_post_accumulate_grad_hook(spoil)

    def _spoil(self, grad):
        return torch.where(
            torch.arange(grad.numel(), device=grad.device).view_as(grad) == 3, self.value, grad
        )


def differing(one, other):
    """Returns the names of tensors that are not equal to the bit."""
    return sorted(
        name
        for name in one.keys() | other.keys()
        if not (name in one and name in other and torch.equal(one[name], other[name]))
    )
