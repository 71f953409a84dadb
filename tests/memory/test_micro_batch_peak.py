"""The predicted peak of a forward and a backward against a real one, to the byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

# dispatch modes import it when first entered: 3 s, here once for all forked ranks
import torch._dynamo
from torch import Tensor

from megatron_lite.config.stages import Stage
from megatron_lite.description.sizes import CPU_RNG_STATE, NUM_STREAMS, Sizes
from megatron_lite.memory.measure.allocator_peak import allocator_peak
from megatron_lite.memory.measure.engine_storages import EngineStorages
from megatron_lite.memory.predict.micro_batch_peak import micro_batch_peak
from megatron_lite.model.embedding import residual_dtype
from megatron_lite.model.gpt import GPTModel
from megatron_lite.pipeline.executor import arrive, depart, run_backward
from tests.description.test_workspace import GRID, SHARE, Case, wrong_each_time
from tests.support.courses import gloo_has_freed
from tests.support.models import build_tiny_model, sample_tokens, tp_state
from tests.support.pairs import covered, sampled
from tests.support.ranks import run_ranks


def forward(model: GPTModel, sizes: Sizes, *sample: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Runs the stage's forward. Returns where backward starts, and the micro-batch.

    The trainer holds the micro-batch until backward has ended.
    sample: token ids and labels.
    """
    tokens, labels = sample
    shape = (
        sizes.local_tokens // sizes.micro_batch_size,
        sizes.micro_batch_size,
        model.config.hidden_size,
    )
    hidden = partial(torch.ones, shape, dtype=residual_dtype(model.config, model.context))
    batch = [tokens.clone()] if sizes.has_embedding else []
    batch += [labels.clone()] if sizes.has_head else []
    inputs = batch[0] if sizes.has_embedding else arrive(hidden(), lambda grad: None)
    if not sizes.has_head:
        return depart(model.run_stage(inputs, None), hidden), batch
    return model.run_stage(inputs, batch[-1]).mean() * SHARE, batch


def peak_bytes(model: GPTModel, sizes: Sizes) -> int:
    """Returns the most bytes alive in a forward and a backward."""
    sample = sample_tokens(batch=sizes.micro_batch_size, seq_length=sizes.seq_length)
    forward(model, sizes, *sample)  # builds the rotary tables, which stay
    with gloo_has_freed(), EngineStorages() as watch:
        end, batch = forward(model, sizes, *sample)
        run_backward(end)
        del end, batch
    return watch.peak_bytes + sum(table.nbytes for table in model.constants())


def wrong(
    rank: int, world_size: int, sequence_parallel: bool, layers: Sequence[int], cases: list[Case]
) -> dict[Case, Any]:
    """Returns {configuration: [(measured, predicted) of each stage]} where any stage differs.

    layers: the number of layers of each stage.
    """
    found: dict[Case, Any] = {}
    with tp_state(world_size) as parallel:
        for case in cases:
            pairs = []
            for number, num_layers in enumerate(layers):
                stage = Stage(
                    number=number,
                    count=len(layers),
                    rank=number,
                    chunk=0,
                    first_layer=sum(layers[:number]),
                    num_layers=num_layers,
                )
                config = case.config(sum(layers))
                sizes = replace(
                    case.sizes(world_size, sequence_parallel=sequence_parallel),
                    has_embedding=stage.is_first,
                    has_head=stage.is_last,
                    first_layer=stage.first_layer,
                )
                model = build_tiny_model(
                    config,
                    parallel,
                    sequence_parallel=sequence_parallel,
                    dtype=case.dtype,
                    loss_chunk_size=case.loss_chunk_size,
                    vocab_size=sizes.padded_vocab_size,
                    stage=stage,
                )
                pairs.append(
                    (peak_bytes(model, sizes), micro_batch_peak(config, sizes, num_layers))
                )
            if any(real != told for real, told in pairs):
                found[case] = pairs
    return found


@pytest.mark.parametrize("layers", [pytest.param((3,), marks=pytest.mark.long), (1, 1, 1)])
@pytest.mark.parametrize(
    ("tp_size", "sequence_parallel"),
    [(1, False), *(pytest.param(2, split, marks=pytest.mark.long) for split in (False, True))],
)
def test_the_peak_of_a_micro_batch_is_predicted_to_the_byte(
    tp_size: int, sequence_parallel: bool, layers: tuple[int, ...]
) -> None:
    cases = covered(GRID) if len(layers) == 1 else sampled(GRID, every=7, at_most=5)
    found = wrong_each_time(wrong, tp_size, sequence_parallel, layers, cases=cases)
    assert found == [{}] * tp_size


def allocated(rank: int, world_size: int, cases: list[Case]) -> dict[Case, tuple[int, int]]:
    """Returns {configuration: (bytes that torch's CPU allocator had at most, predicted bytes)}."""
    found = {}
    with tp_state(world_size) as parallel:
        for case in cases:
            config = replace(
                case.config(3), hidden_size=192, ffn_hidden_size=768, max_position_embeddings=128
            )
            sizes = replace(
                case.sizes(world_size, sequence_parallel=False),
                seq_length=128,
                padded_vocab_size=2048,
                inside_operators=True,
                # A kernel for the matmul of very few tokens would copy the weight.
                loss_chunk_size=case.loss_chunk_size and 100,
            )
            model = build_tiny_model(
                config,
                parallel,
                dtype=case.dtype,
                loss_chunk_size=sizes.loss_chunk_size,
                vocab_size=sizes.padded_vocab_size,
            )
            sample = sample_tokens(batch=sizes.micro_batch_size, seq_length=sizes.seq_length)
            run_backward(forward(model, sizes, *sample)[0])
            model.zero_grad(set_to_none=True)
            tables = sum(table.nbytes for table in model.constants())
            with allocator_peak() as watch:
                end, batch = forward(model, sizes, *sample)
                run_backward(end)
                del end, batch
            found[case] = watch.peak_bytes + tables, micro_batch_peak(config, sizes, 3)
    return found


def test_the_allocator_holds_the_predicted_peak_when_nothing_watches_the_operators() -> None:
    # The allocator also counts what kernels allocate inside a call.
    cases = [case for case in GRID if case.backend == "flash" and case.dropout == 0.0]
    (found,) = run_ranks(allocated, 1, sampled(cases, every=9, at_most=3), detail=False)
    assert {case: real for case, (real, _) in found.items()} == {
        case: told for case, (_, told) in found.items()
    }


@pytest.mark.long
def test_with_dropout_the_allocator_also_holds_states_of_generators() -> None:
    cases = [case for case in GRID if case.dropout > 0.0]
    (found,) = run_ranks(allocated, 1, covered(cases), detail=False)
    # A dropout holds the states of the streams that it switches between. No operator makes them.
    states = NUM_STREAMS * CPU_RNG_STATE
    assert all(0 <= real - told <= states for real, told in found.values()), found
