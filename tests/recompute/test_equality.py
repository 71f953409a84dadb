"""No policy changes a bit: loss and every gradient torch.equal to keeping everything, over two accumulated micro-batches."""

from __future__ import annotations

import pytest
import torch

from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.recompute.schedule import plan_stage
from tests.support.models import Outcome, build_tiny_model, loss_and_grads, tiny_config, tp_state
from tests.support.ranks import run_ranks

NUM_LAYERS = 5  # not divisible by the units of 2 and 3
MODELS = {
    "gpt, unfused, dropout": tiny_config(num_layers=NUM_LAYERS, hidden_dropout=0.1, attention_dropout=0.1),
    "llama, SDPA, residual dropout": tiny_config(num_layers=NUM_LAYERS, hidden_dropout=0.1, swiglu=True, qk_layernorm=True,
                                                 position_embedding_type="rope", normalization="RMSNorm"),
    "gpt, SDPA, no dropout": tiny_config(num_layers=NUM_LAYERS),
}


def policies(*, can_split: bool) -> dict[str, RecomputeConfig]:
    """Every policy of Megatron's flags that is legal in the layout."""
    named = {"core_attn": RecomputeConfig(recompute_activations=True)}
    for modules in (("mlp",), ("core_attn", "mlp")):
        named["+".join(modules)] = RecomputeConfig(recompute_granularity="selective", recompute_modules=modules)
    for method, counts in (("uniform", (1, 2, 3)), ("block", (1, 3, NUM_LAYERS + 4))):
        for count in counts:
            for split in (False, True) if can_split else (False,):
                named[f"{method} {count}{' split' if split else ''}"] = RecomputeConfig(
                    recompute_granularity="full", recompute_method=method, recompute_num_layers=count,
                    distribute_saved_activations=split)
    return named


def changed(expected: Outcome, outcome: Outcome) -> list[str]:
    """Names of what is not equal to the bit."""
    names = [name for name, grad in expected.grads.items() if not torch.equal(grad, outcome.grads[name])]
    return names if torch.equal(expected.loss, outcome.loss) else ["loss", *names]


def faults(rank: int, world_size: int, sequence_parallel: bool, dtype: torch.dtype) -> dict[str, list[str]]:
    """{model and policy: what it changed}, empty if nothing did. Four ranks run one model, since their collectives are slow."""
    found = {}
    for model_name, config in list(MODELS.items())[: 1 if world_size == 4 else None]:
        outcomes = {}
        named = policies(can_split=world_size > 1 and not sequence_parallel)
        for name, recompute in {"none": RecomputeConfig(), **named}.items():
            with tp_state(world_size) as parallel:
                model = build_tiny_model(config, parallel, sequence_parallel=sequence_parallel, dtype=dtype,
                                         plan=plan_stage(recompute, NUM_LAYERS))
                outcomes[name] = loss_and_grads(model, parallel)
            if differences := changed(outcomes["none"], outcomes[name]):
                found[f"{model_name}: {name}"] = differences
    return found


@pytest.mark.parametrize(("tp_size", "sequence_parallel", "dtype"), [
    (1, False, torch.float32), (1, False, torch.bfloat16), (2, False, torch.float32), (2, True, torch.bfloat16),
    (4, False, torch.bfloat16)])
def test_gradients_are_unchanged_to_the_bit(tp_size: int, sequence_parallel: bool, dtype: torch.dtype) -> None:
    assert run_ranks(faults, tp_size, sequence_parallel, dtype) == [{}] * tp_size


def _stale_randomness(rank: int, world_size: int) -> dict[str, list[str]]:
    from megatron_lite.recompute import checkpoint

    checkpoint._Randomness._restore = lambda self: None  # type: ignore[method-assign]
    return faults(rank, world_size, False, torch.float32)


def _unit_of_unchained_layers(rank: int, world_size: int) -> dict[str, list[str]]:
    from megatron_lite.recompute import runner

    chain = runner._chain
    runner._chain = lambda layers, regions: chain(layers[-1:], regions)
    return faults(rank, world_size, False, torch.float32)


def _halves_in_the_wrong_order(rank: int, world_size: int) -> dict[str, list[str]]:
    from megatron_lite.recompute import checkpoint

    gather = checkpoint.all_gather_first_dim
    checkpoint.all_gather_first_dim = lambda shard, group: gather(shard, group).roll(shard.shape[0])
    return faults(rank, world_size, False, torch.float32)


@pytest.mark.parametrize(("fault", "tp_size", "seen_in"), [
    (_stale_randomness, 1, {"gpt, unfused, dropout: uniform 1", "gpt, unfused, dropout: core_attn"}),
    (_unit_of_unchained_layers, 1, {"gpt, SDPA, no dropout: uniform 2"}),
    (_halves_in_the_wrong_order, 2, {"gpt, SDPA, no dropout: uniform 2 split"}),
])
def test_the_comparison_sees(fault, tp_size: int, seen_in: set[str]) -> None:  # type: ignore[no-untyped-def]
    assert seen_in <= set(run_ranks(fault, tp_size)[0])
