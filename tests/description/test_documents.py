"""The description of a model that keeps documents apart, against the real model, to the byte."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

# dispatch modes import it when first entered: 3 s, here once for all forked ranks
import torch._dynamo

from megatron_lite.config.stages import Stage
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.measure.engine_storages import EngineStorages
from megatron_lite.memory.predict.micro_batch_peak import micro_batch_peak
from megatron_lite.model.embedding import residual_dtype
from megatron_lite.model.gpt import GPTModel
from megatron_lite.optim.loss_scale import scale_backward
from megatron_lite.pipeline.executor import arrive, depart, run_backward
from tests.description.test_workspace import GRID, NUM_LAYERS, Case, differences, wrong_each_time
from tests.support.changes import with_fields
from tests.support.courses import gloo_has_freed
from tests.support.documents import batch_of
from tests.support.models import build_tiny_model, tp_state
from tests.support.pairs import sampled

LAYOUTS = [(1, False), *(pytest.param(2, split, marks=pytest.mark.long) for split in (False, True))]
# Both backends, one sample and three, windows in some layers, dropout, and both precisions.
FEW = [GRID[number] for number in (0, 7, 13, 21, 42, -1)]


def with_documents(case: Case, tp_size: int, *, sequence_parallel: bool) -> Sizes:
    """Returns the sizes of a case under all three flags."""
    return replace(
        case.sizes(tp_size, sequence_parallel=sequence_parallel),
        masks_loss=True,
        resets_positions=case.config(NUM_LAYERS).positions.learned,
        resets_attention=True,
    )


def wrong(
    rank: int, world_size: int, sequence_parallel: bool, cases: list[Case]
) -> dict[Case, Any]:
    """Returns {configuration: differences} where there are any."""
    found: dict[Case, Any] = {}
    with tp_state(world_size) as parallel:
        for case in cases:
            sizes = with_documents(case, world_size, sequence_parallel=sequence_parallel)
            sizes = replace(sizes, masks_loss=False)  # the trainer applies the mask, not the model
            if differ := differences(case.config(NUM_LAYERS), parallel, sizes, case.dtype):
                found[case] = differ
    return found


@pytest.mark.parametrize(("tp_size", "sequence_parallel"), LAYOUTS)
def test_every_operation_holds_what_its_workspace_tells(
    tp_size: int, sequence_parallel: bool
) -> None:
    cases = FEW if tp_size == 1 else sampled(GRID, every=7, at_most=5)
    assert wrong_each_time(wrong, tp_size, sequence_parallel, cases=cases) == [{}] * tp_size


def peak_bytes(model: GPTModel, sizes: Sizes) -> int:
    """Returns the most bytes alive in a forward and a backward, with the micro-batch."""
    shape = (
        sizes.local_tokens // sizes.micro_batch_size,
        sizes.micro_batch_size,
        model.config.hidden_size,
    )
    hidden = partial(torch.ones, shape, dtype=residual_dtype(model.config, model.context))

    def forward() -> tuple[torch.Tensor, list[Any]]:
        tokens, labels, mask, documents = (
            one if not isinstance(one, torch.Tensor) else one.clone() for one in batch
        )
        documents = type(documents)(*(one if one is None else one.clone() for one in documents))
        if not sizes.has_embedding:
            documents = with_fields(documents, position_ids=None)
        held = [documents, *([tokens] if sizes.has_embedding else [])]
        inputs = tokens if sizes.has_embedding else arrive(hidden(), lambda grad: None)
        del tokens
        if not sizes.has_head:
            del labels, mask
            return depart(model.run_stage(inputs, None, None, documents), hidden), held
        held.append(labels)
        total = (model.run_stage(inputs, labels, None, documents) * mask).sum()
        return scale_backward(total, factor), held

    batch, factor = batch_of(sizes), torch.tensor(0.5)
    forward()  # builds the rotary tables, which stay
    with gloo_has_freed(), EngineStorages() as watch:
        end, held = forward()
        run_backward(end)
        del end, held
    return watch.peak_bytes + sum(table.nbytes for table in model.constants())


def wrong_peaks(
    rank: int, world_size: int, sequence_parallel: bool, cases: list[Case]
) -> dict[Case, Any]:
    """Returns {configuration: [(measured, predicted) of each stage]} where any stage differs."""
    found: dict[Case, Any] = {}
    with tp_state(world_size) as parallel:
        for case in cases:
            config, pairs = case.config(3), []
            for number in range(3):
                stage = Stage(
                    number=number, count=3, rank=number, chunk=0, first_layer=number, num_layers=1
                )
                sizes = replace(
                    with_documents(case, world_size, sequence_parallel=sequence_parallel),
                    has_embedding=stage.is_first,
                    has_head=stage.is_last,
                    first_layer=number,
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
                pairs.append((peak_bytes(model, sizes), micro_batch_peak(config, sizes, 1)))
            if any(real != told for real, told in pairs):
                found[case] = pairs
    return found


@pytest.mark.parametrize(("tp_size", "sequence_parallel"), LAYOUTS)
def test_the_peak_of_a_micro_batch_is_predicted_to_the_byte(
    tp_size: int, sequence_parallel: bool
) -> None:
    cases = FEW[:3] if tp_size == 1 else sampled(GRID, every=11, at_most=11)
    assert wrong_each_time(wrong_peaks, tp_size, sequence_parallel, cases=cases) == [{}] * tp_size
