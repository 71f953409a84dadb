"""Small runs that save, and what a run would begin with when it loads."""

from megatron_lite.checkpointing.start import find_start
from megatron_lite.checkpointing.state import load_checkpoint
from megatron_lite.config.checks import InputError
from megatron_lite.parallel.state import parallel_state
from megatron_lite.training.build_trainer import build_trainer
from tests.support.runs import run_to_end, tiny_run


def saving_run(folder, last, *, stop=None, load=True, tp_size=1, metrics=None, **checkpoint):
    """Returns a run of `last` iterations that saves to a folder, and loads from there.

    stop: the iteration after which this start ends.
    """
    where = dict(save=folder, save_interval=1, load=folder if load else None)
    return tiny_run(
        tp_size=tp_size,
        train_iters=last,
        eval_iters=0,
        exit_interval=stop,
        metrics=metrics,
        **({**where, **checkpoint}),
    )


def train(rank, world_size, config):
    """Runs the config on this rank. Returns type and text of the InputError that ended it."""
    try:
        run_to_end(config)
    except InputError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def loaded_into(trainer, parallel, run):
    """Loads the step that the run would begin with. Returns its notices."""
    start = find_start(run.checkpoint, parallel)
    parts = (trainer.model, trainer.optimizer)
    return load_checkpoint(start, run, parallel, *parts, data=trainer.datasets.identity)


def state_of(model, optimizer, **others):
    """Returns copies of this rank's weights and optimizer states."""
    optimizer.finish()
    states = {
        f"{name}/{key}": value
        for name, state in optimizer.states.items()
        for key, value in state.items()
    }
    found = {**dict(model.named_parameters()), **states}
    return others | {
        name: (value.to_local() if hasattr(value, "to_local") else value).detach().clone()
        for name, value in found.items()
    }


def loaded_state(run):
    """Returns all that a run would begin with."""
    with parallel_state(run.parallel, seed=1) as parallel:
        trainer = build_trainer(run, parallel)
        loaded_into(trainer, parallel, run)
        return state_of(trainer.model, trainer.optimizer, **parallel.rng.snapshot().states)


def same(found, wanted):
    """Returns whether all tensors are equal to the bit."""
    return found.keys() == wanted.keys() and all(
        found[name].equal(value) for name, value in wanted.items()
    )
