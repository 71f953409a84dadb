"""docs/training-logs.md shows what the code prints."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_lite.training.iteration_line import PEAK_OF, RunFacts
from megatron_lite.training.metrics import IterationRecord
from megatron_lite.training.short_line import HEADING_EVERY, ShortLines
from megatron_lite.training.slow_work import FIRST_AFTER_S, GROWTH

PAGE = (Path(__file__).parents[2] / "docs" / "training-logs.md").read_text()


def test_the_row_of_the_page_is_what_the_terminal_gets() -> None:
    facts = RunFacts(
        num_iterations=300,
        num_samples=4800,
        batch_size=16,
        tokens=2048,
        world_size=1,
        flops=412_000,
        hardware_flops=412_000,
        peak_flops=412_000 / 0.412 / 0.6772,
        device=torch.device("cpu"),
    )
    record = IterationRecord(
        iteration=100,
        consumed_samples=1600,
        global_batch_size=16,
        lm_loss=2.5063,
        grad_norm=1.661,
        learning_rate=6.16e-4,
        loss_scale=1.0,
        iteration_ms=677.2,
        tokens_per_second=3024.0,
        skipped=0,
        nan=0,
        activation_bytes_predicted=round(14.332 * 2**20),
        activation_bytes_measured=round(14.332 * 2**20),
    )
    lines = ShortLines(facts, columns=120, shows_peak=False).lines([record], None)
    assert "```text\n" + "\n".join(lines) + "\n```" in PAGE


def test_the_names_and_numbers_of_the_page_are_those_of_the_code() -> None:
    assert all(f"`peak GiB {what}`" in PAGE for what in PEAK_OF.values())
    assert f"repeated every {HEADING_EVERY} rows" in PAGE
    assert (FIRST_AFTER_S, GROWTH) == (5.0, 3.0), "the page says five, 15 and 45 seconds"
