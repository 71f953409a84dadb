"""--loss-chunk-size: from the flag to the model's gradients. The Function:
tests/tensor_parallel/test_cross_entropy.py."""

from __future__ import annotations

import pytest
import torch

from megatron_lite.optim.grad_buffer import GradBuffer
from tests.support.equality import differences, variant_config
from tests.support.models import build_tiny_model, loss_and_grads, sample_tokens, tp_state
from tests.support.ranks import run_ranks

LAYOUTS = [(1, False), (2, False), (2, True), (4, False), (4, True)]  # TP size, sequence parallel


@pytest.mark.runs(daily=1, ci=5)
@pytest.mark.parametrize(
    ("variant", "tp_size", "sequence_parallel"),
    [  # tied, untied
        pytest.param(
            variant,
            *layout,
            marks=[pytest.mark.long] * ((number + place) % 2 == 1 or layout[0] == 4),
        )
        for place, variant in enumerate(["gpt2", "llama"])
        for number, layout in enumerate(LAYOUTS)
    ],
)
def test_a_model_trains_alike_with_its_loss_in_chunks(variant, tp_size, sequence_parallel):
    """One chunk: the same bits, in bf16 too. Several: float64 to 1e-12."""

    def work(rank, world_size):
        with tp_state(world_size) as parallel:

            def outcome(dtype, chunk_size):
                model = build_tiny_model(
                    variant_config(variant),
                    parallel,
                    sequence_parallel=sequence_parallel,
                    dtype=dtype,
                    loss_chunk_size=chunk_size,
                )
                return loss_and_grads(model, parallel)

            exact = {
                max(differences(outcome(dtype, None), outcome(dtype, 36)).values())
                for dtype in (torch.float64, torch.bfloat16)
            }
            return exact, max(
                differences(outcome(torch.float64, None), outcome(torch.float64, 7)).values()
            )

    for exact, several in run_ranks(work, tp_size, detail=False) if tp_size > 1 else [work(0, 1)]:
        assert exact == {0.0} and several <= 1e-12


@pytest.mark.runs(daily=1, ci=2)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_under_autocast_a_float32_model_has_the_bits_that_it_has_with_all_logits(tp_size):
    def work(rank, world_size):
        with tp_state(world_size) as parallel:

            def outcome(chunk_size):
                model = build_tiny_model(
                    variant_config("gpt2"),
                    parallel,
                    dtype=torch.float32,
                    loss_chunk_size=chunk_size,
                )
                buffer = GradBuffer(dict(model.named_parameters()), parallel)
                with torch.autocast("cpu", torch.bfloat16):
                    losses = model.loss(*sample_tokens())
                losses.mean().backward()
                return losses.detach(), *(grad.clone() for grad in buffer.grads.values())

            kept, one_chunk, several = outcome(None), outcome(36), outcome(7)
            return (
                all(map(torch.equal, kept, one_chunk)),
                (kept[0] - several[0]).abs().max().item(),
                several[0].dtype,
            )

    for equal, error, dtype in run_ranks(work, tp_size) if tp_size > 1 else [work(0, 1)]:
        assert equal and error <= 2**-6 and dtype == torch.float32
