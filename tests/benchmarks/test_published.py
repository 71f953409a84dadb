"""benchmarks/published.py: its facts and its figures as they are now."""

from __future__ import annotations

import statistics

from benchmarks.published import LLAMA_RUN, MEGATRON_RUNS, rows

# The predicted TFLOP/s of today. A change of the model shows here and in docs/planning.md.
PREDICTED = {
    "GPT 1.7B": 153.6,
    "GPT 3.6B": 149.8,
    "GPT 7.5B": 151.8,
    "GPT 18.4B": 145.2,
    "GPT 39.1B": 151.0,
    "GPT 76.1B": 158.6,
    "GPT 145.6B": 157.7,
    "GPT 310.1B": 165.3,
    "GPT 529.6B": 176.1,
    "GPT 1008.0B": 175.9,
    "Llama 3 405B": 529.4,
}
MEAN_BOUND, LARGEST_BOUND = 0.11, 0.25


def test_every_row_predicts_what_it_did_within_the_bounds() -> None:
    found = list(rows())
    assert {row.run.name: round(row.tflops, 1) for row in found} == PREDICTED
    errors = [abs(row.error) for row in found]
    assert statistics.mean(errors) < MEAN_BOUND and max(errors) < LARGEST_BOUND
    # The order of the ten rows of one machine, as far as it is clear: the three fastest.
    ordered = sorted((row for row in found if row.run is not LLAMA_RUN), key=lambda row: row.tflops)
    fastest = sorted(MEGATRON_RUNS, key=lambda run: run.tflops)[-3:]
    assert {row.run.name for row in ordered[-3:]} == {run.name for run in fastest}
