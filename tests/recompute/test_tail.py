"""Tail skip: a replay leaves out exactly the matmuls and collectives that only its own output
needs, and changes no gradient."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.regions import LAYERNORM, MLP_REGION
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.transformer_layer import describe_layer
from tests.support.collectives import Sent, recorded_collectives
from tests.support.equality import variant_config
from tests.support.models import BATCH, SEQ_LENGTH, sample_tokens, tp_state
from tests.support.planned import planned  # three layers: units of 2 and 1
from tests.support.ranks import run_ranks

MATMULS = ("mm", "addmm", "bmm", "baddbmm")


class _Matmuls(TorchDispatchMode):
    """Counts matmuls by the shape of what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and func.overloadpacket.__name__ in MATMULS:
            self.counts[tuple(output.shape)] += 1
        return output


@dataclass(frozen=True)
class Backward:
    """What one rank did in backward, and its gradients."""

    matmuls: Counter[tuple[int, ...]]
    sent: Counter[Sent]
    grads: list[Tensor]


def full(method: str, count: int, *, split: bool = False) -> dict[str, object]:
    return dict(
        recompute_granularity="full",
        recompute_method=method,
        recompute_num_layers=count,
        distribute_saved_activations=split,
    )


def selective(*modules: str) -> dict[str, object]:
    return dict(recompute_granularity="selective", recompute_modules=modules)


# Of the layers' linear_fc2 matmuls (with their collective), and of their unfused weights x value:
# how many are left out.
POLICIES: dict[str, tuple[dict[str, object], int, int]] = {
    "uniform 2": (full("uniform", 2), 2, 0),
    "block 1": (full("block", 1), 1, 0),
    "mlp": (selective("mlp"), 3, 0),
    "core_attn": (selective("core_attn"), 0, 3),
    "core_attn+mlp": (selective("core_attn", "mlp"), 3, 3),
    "layernorm+activation": (selective("layernorm", "activation"), 0, 0),
}
SPLIT = {"uniform 2 split": (full("uniform", 2, split=True), 2, 0)}


def backward(
    recompute: RecomputeConfig, dropout: float, world_size: int, *, sequence_parallel: bool
) -> Backward:
    with tp_state(world_size) as parallel:
        model = planned(
            recompute,
            parallel=parallel,
            variant="gpt2",
            sequence_parallel=sequence_parallel,
            hidden_dropout=dropout,
            attention_dropout=dropout,
            attention_backend="unfused",
        )
        loss = model.loss(*sample_tokens()).mean()
        with recorded_collectives() as sent, _Matmuls() as matmuls:
            loss.backward()
    return Backward(
        matmuls.counts, Counter(sent), [parameter.grad for parameter in model.parameters()]
    )  # type: ignore[misc]


def faults(
    rank: int, world_size: int, sequence_parallel: bool, dropouts: tuple[float, ...] = (0.0, 0.1)
) -> list[str]:
    """What is not as it should be."""
    found = []
    config = variant_config("gpt2")
    tokens, hidden = SEQ_LENGTH * BATCH, config.hidden_size
    heads = config.num_attention_heads // world_size * BATCH
    named = POLICIES | (SPLIT if world_size > 1 and not sequence_parallel else {})
    for dropout in dropouts:
        kept = backward(RecomputeConfig(), dropout, world_size, sequence_parallel=sequence_parallel)
        for name, (flags, tails, contexts) in named.items():
            skipping, whole = (
                backward(
                    RecomputeConfig(**flags, recompute_tail_skip=skip),
                    dropout,
                    world_size,  # type: ignore[arg-type]
                    sequence_parallel=sequence_parallel,
                )
                for skip in (True, False)
            )
            matmuls = Counter(
                {(tokens, hidden): tails, (heads, SEQ_LENGTH, config.head_dim): contexts}
            )
            collective = "_reduce_scatter_base_" if sequence_parallel else "allreduce_"
            sent = (
                Counter({Sent(collective, (SEQ_LENGTH, BATCH, hidden)): tails})
                if world_size > 1
                else Counter()
            )
            facts = {
                "matmuls": whole.matmuls == skipping.matmuls + matmuls,
                "collectives": whole.sent == skipping.sent + sent,
                "gradients": all(map(torch.equal, kept.grads, skipping.grads)),
                "whole gradients": all(map(torch.equal, kept.grads, whole.grads)),
            }
            found += [
                f"dropout {dropout}, {name}: {fact}" for fact, right in facts.items() if not right
            ]
    return found


@pytest.mark.runs(daily=0, ci=1)
@pytest.mark.parametrize(
    ("tp_size", "sequence_parallel"),
    [(1, False), *(pytest.param(2, split, marks=pytest.mark.long) for split in (False, True))],
)
def test_exactly_the_tails_are_skipped_and_no_gradient_changes(
    tp_size: int, sequence_parallel: bool
) -> None:
    assert run_ranks(faults, tp_size, sequence_parallel, detail=False) == [[]] * tp_size


def test_no_replay_leaves_out_a_matmul_whose_result_a_norm_reads() -> None:
    sizes = Sizes(micro_batch_size=2, seq_length=6, padded_vocab_size=72)
    after = describe_layer(variant_config("olmo"), sizes)
    assert after.tail() == after.tail(MLP_REGION) == frozenset()
    assert not any(LAYERNORM in one.regions for one in after.operations)
    before = describe_layer(variant_config("pythia"), sizes)
    assert {name for name, _ in before.tail()} == {"linear_fc2"}
