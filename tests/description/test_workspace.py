"""The workspaces of the description against the real model, module by module, to the byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import cycle, islice, product, starmap
from typing import Any, NamedTuple

import pytest
import torch

# dispatch modes import it when first entered: 3 s, here once for all forked ranks
import torch._dynamo
from torch import Tensor

from megatron_lite.config.model import ModelConfig
from megatron_lite.description.model_ends import embedding_operations, head_operations
from megatron_lite.description.operations import Operation, Workspace, course
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.transformer_layer import describe_layers
from tests.description.test_drift import DIFFERING, NUM_LAYERS, place
from tests.support.courses import Measured, Stretch, measure
from tests.support.documents import batch_of
from tests.support.equality import VARIANTS, variant_config
from tests.support.models import BATCH, SEQ_LENGTH, build_tiny_model, padded_vocab_size, tp_state
from tests.support.pairs import covered
from tests.support.ranks import run_ranks
from tests.support.torch_features import NEEDS_GROUPED_KERNEL

SHARE = 0.5


def mean(losses: Tensor) -> Tensor:
    """Returns what the trainer makes of the token losses."""
    return losses.mean() * SHARE


def joined(stretches: Iterable[Stretch]) -> Iterator[Stretch]:
    """Yields the stretches in which bytes change. Neighbours of one module become one stretch."""
    before: Stretch | None = None
    for module, own in stretches:
        module = place(module)
        if (own.most, own.end) == (0, 0):
            continue
        if before is not None and before.module == module:
            before = Stretch(module, course(before.course, own))
            continue
        if before is not None:
            yield before
        before = Stretch(module, own)
    if before is not None:
        yield before


def described(config: ModelConfig, sizes: Sizes) -> list[tuple[str, Workspace]]:
    """Returns the module and the workspace of every operation of the whole model."""
    operations: list[tuple[str, Operation]] = [
        ("", one) for one in embedding_operations(config, sizes)
    ]
    for number, layer in enumerate(describe_layers(config, sizes, NUM_LAYERS)):
        operations += [(f"decoder.layers.{number}.", one) for one in layer.operations]
    operations += [("", one) for one in head_operations(config, sizes)]
    return [
        (f"{prefix}{one.module}".removesuffix("."), one.workspace) for prefix, one in operations
    ]


def measured(config: ModelConfig, parallel: Any, sizes: Sizes, *, dtype: torch.dtype) -> Measured:
    """Measures a forward and a backward of the whole model."""
    model = build_tiny_model(
        config,
        parallel,
        sequence_parallel=sizes.sequence_parallel,
        dtype=dtype,
        loss_chunk_size=sizes.loss_chunk_size,
        vocab_size=sizes.padded_vocab_size,
    )
    batch = batch_of(sizes)
    sample = batch.tokens, batch.labels, batch.documents
    mean(model.loss(*sample))  # builds the rotary tables, which stay
    return measure(model, lambda: model.loss(*sample), mean)


def differences(config: ModelConfig, parallel: Any, sizes: Sizes, dtype: torch.dtype) -> list[Any]:
    """Returns [(phase, number, measured stretch, described stretch)] where the two differ."""
    real = measured(config, parallel, sizes, dtype=dtype)
    told = described(config, sizes)
    forward = joined(Stretch(module, one.forward) for module, one in told)
    backward = joined(Stretch(module, one.backward) for module, one in reversed(told))
    found = []
    for phase, ours, theirs in (
        ("forward", real.forward, forward),
        ("backward", real.backward, backward),
    ):
        pairs = zip(joined(one for one in ours if one.module != "finish"), theirs, strict=True)
        found += [(phase, *pair) for pair in pairs if pair[0] != pair[1]]
    return found


class Case(NamedTuple):
    """One configuration of the grid."""

    variant: str
    backend: str
    dropout: float
    dtype: torch.dtype
    loss_chunk_size: int | None
    micro_batch_size: int = BATCH

    def config(self, num_layers: int) -> ModelConfig:
        """Returns the config of the model. In a model with rotary embedding the layers differ."""
        rotates = VARIANTS[self.variant].get("position_embedding_type") == "rope"
        differing = {
            name: value if name == "window_size" else tuple(islice(cycle(value), num_layers))
            for name, value in DIFFERING.items()
        }
        return variant_config(
            self.variant,
            num_layers=num_layers,
            attention_backend=self.backend,
            hidden_dropout=self.dropout,
            attention_dropout=self.dropout,
            **(differing if rotates else {}),
        )

    def sizes(self, tp_size: int, *, sequence_parallel: bool) -> Sizes:
        """Returns the sizes of the whole model."""
        return Sizes(
            micro_batch_size=self.micro_batch_size,
            seq_length=SEQ_LENGTH,
            padded_vocab_size=padded_vocab_size(tp_size),
            tp_size=tp_size,
            sequence_parallel=sequence_parallel,
            element_bytes=self.dtype.itemsize,
            loss_chunk_size=self.loss_chunk_size,
        )


GRID = [
    *starmap(
        Case,
        product(
            VARIANTS, ("flash", "unfused"), (0.0, 0.1), (torch.float32, torch.bfloat16), (None, 5)
        ),
    ),
    # One sample needs fewer copies.
    *(Case(variant, "unfused", 0.1, torch.float32, None, 1) for variant in VARIANTS),
    *(Case(variant, "flash", 0.0, torch.bfloat16, 5, 1) for variant in VARIANTS),
]


def wrong(
    rank: int, world_size: int, sequence_parallel: bool, cases: list[Case]
) -> dict[Case, Any]:
    """Returns {configuration: differences} where there are any."""
    found: dict[Case, Any] = {}
    with tp_state(world_size) as parallel:
        for case in cases:
            sizes = case.sizes(world_size, sequence_parallel=sequence_parallel)
            if differ := differences(case.config(NUM_LAYERS), parallel, sizes, case.dtype):
                found[case] = differ
    return found


def wrong_each_time(
    wrong: Callable[..., dict[Case, Any]], tp_size: int, *args: Any, cases: list[Case]
) -> list[dict[Case, Any]]:
    """Returns what each rank finds wrong in each of three measurements of a configuration.

    gloo's thread frees the tensors of a collective at an arbitrary moment. A storage that it holds
    can be missed or counted too long. Then the next measurement differs from this one.
    """
    for _ in range(3):
        found = run_ranks(wrong, tp_size, *args, cases, detail=False)
        cases = [case for case in cases if any(case in one for one in found)]
        if not cases:
            break
    return found


@NEEDS_GROUPED_KERNEL
@pytest.mark.parametrize(
    ("tp_size", "sequence_parallel"),
    [(1, False), *(pytest.param(2, split, marks=pytest.mark.long) for split in (False, True))],
)
def test_every_operation_holds_what_its_workspace_tells(
    tp_size: int, sequence_parallel: bool
) -> None:
    cases = covered(GRID)
    assert wrong_each_time(wrong, tp_size, sequence_parallel, cases=cases) == [{}] * tp_size


@pytest.mark.long
def test_rows_that_are_computed_one_after_the_other_hold_what_the_workspace_tells() -> None:
    found = {}
    with tp_state(1) as parallel:
        cases = product(VARIANTS, (torch.float32, torch.bfloat16), (None, 300))
        for variant, dtype, chunk in covered(cases):
            # 800 rows, of which the loss takes seven parts
            config = variant_config(variant, hidden_size=192, ffn_hidden_size=400)
            config = replace(config, max_position_embeddings=160)
            sizes = Sizes(
                micro_batch_size=5,
                seq_length=160,
                padded_vocab_size=2048,
                element_bytes=dtype.itemsize,
                loss_chunk_size=chunk,
            )
            if differ := differences(config, parallel, sizes, dtype):
                found[variant, dtype, chunk] = differ
    assert not found
