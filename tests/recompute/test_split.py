"""--distribute-saved-activations: each rank keeps its part of a unit's input, and backward gathers
them, one ahead."""

from contextlib import contextmanager

import pytest
import torch

from megatron_lite.recompute import checkpoint as engine
from megatron_lite.recompute.checkpoint import checkpoint
from megatron_lite.recompute.phase import is_recomputing
from tests.support.models import build_tiny_model, sample_tokens, tiny_config, tp_state
from tests.support.ranks import run_ranks

NUM_LAYERS, FIRST_LAYERS = 5, (0, 2, 4)  # units of 2, 2 and 1 layers
CONFIG = tiny_config(num_layers=NUM_LAYERS, hidden_dropout=0.1)


def _callers_tensor(rank, world_size, grad):
    with tp_state(world_size) as parallel, torch.set_grad_enabled(grad):
        hidden = torch.arange(24.0).view(4, 6).requires_grad_()
        kept, memory = hidden.detach().clone(), hidden.data_ptr()
        output = checkpoint(torch.tanh, hidden, rng=parallel.rng, split_group=parallel.tp_group)
        if grad:
            output.sum().backward()
        return torch.equal(hidden, kept) and hidden.data_ptr() == memory, torch.equal(
            output, kept.tanh()
        )


@pytest.mark.parametrize("grad", [True, False])
def test_the_callers_tensor_is_left_alone(grad):
    assert run_ranks(_callers_tensor, 2, grad) == [(True, True)] * 2


@contextmanager
def noted_gathers(events):
    start = engine.start_all_gather_first_dim
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            engine,
            "start_all_gather_first_dim",
            lambda *args: (events.append("gather"), start(*args))[1],
        )
        yield


def step_of(parallel, policy):
    """What a backward did, "gather" where one starts and "layer N" where a unit's replay does, and
    the gradients after another one."""
    model = build_tiny_model(CONFIG, parallel, dtype=torch.float32, plan=policy)
    events = []

    def before_layer(number):
        return lambda *_: events.append(f"layer {number}") if is_recomputing() else None

    for number in FIRST_LAYERS:
        model.decoder.layers[number].register_forward_pre_hook(before_layer(number))
    loss = model(*sample_tokens()).mean()
    with noted_gathers(events):
        loss.backward(retain_graph=True)
    first = [*events]
    loss.backward()
    return first, [parameter.grad for parameter in model.parameters()]


def _steps(rank, world_size):
    steps = []
    for policy in ("*:none", "*:full/2@split"):
        with tp_state(world_size) as parallel:  # its streams start anew
            steps.append(step_of(parallel, policy))
    return steps


def test_inputs_are_gathered_one_ahead_of_the_replay():
    for (_, expected), (events, gradients) in run_ranks(_steps, 2):
        assert events == ["gather", "gather", "layer 4", "gather", "layer 2", "layer 0"]
        assert all(map(torch.equal, expected, gradients))
