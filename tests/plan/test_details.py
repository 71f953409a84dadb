"""The details of a plan are the library's own figures, and its layouts are legal runs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.pages.plan_page import plan_page
from megatron_lite.plan.auto_policy import Budget
from megatron_lite.plan.details import details
from megatron_lite.plan.fit_verdict import FITS, FitVerdict, verdict
from megatron_lite.plan.layouts import Problem
from megatron_lite.plan.plan_text import to_json
from megatron_lite.plan.search import Search
from megatron_lite.tools import plan
from tests.plan.runs import H100, small_run
from tests.support.changes import with_fields
from tests.support.parsed_page import ParsedPage

NUM_RANKS = 8
SMALL = Problem(small_run(layers=6, batch=32, hidden_size=2048), H100)
GIB = 2**30


def judged(num_bytes: int, problem: Problem = SMALL) -> FitVerdict:
    return verdict(problem, NUM_RANKS, Budget(num_bytes, num_bytes // 16))


@pytest.fixture(scope="module")
def fits() -> FitVerdict:
    return judged(4 * GIB)


@pytest.fixture(scope="module")
def found(fits: FitVerdict) -> dict[str, Any]:
    return details(Search(SMALL), fits, most_layouts=30)


def test_the_plan_is_a_layout_and_no_fitting_layout_is_faster(
    fits: FitVerdict, found: dict[str, Any]
) -> None:
    best, limit = fits.found.plans[0], fits.budget.plan_bytes
    points = [(one["step_seconds"], one["peak_bytes"]) for one in found["layouts"]]
    assert (best.time.seconds, best.peak.num_bytes) in points and fits.word == FITS
    # A simpler plan wins over one that is less than 0.25 % faster.
    assert min(s for s, peak in points if peak <= limit) >= 0.997 * best.time.seconds
    assert 30 < len(points) <= 90, "30 layouts with up to three policies"
    (keep_seconds, keep_peak), (full_seconds, full_peak) = points[:2]
    assert keep_seconds < full_seconds and keep_peak > full_peak


def test_the_stages_are_the_peaks_of_all_ranks(fits: FitVerdict, found: dict[str, Any]) -> None:
    config = fits.found.plans[0].config
    run = Search(SMALL).run(config, NUM_RANKS)
    assert len(found["stages"]) == config.parallel.pipeline_model_parallel_size
    totals = {
        stage["rank"]: sum(term["bytes"] for term in stage["terms"]) for stage in found["stages"]
    }
    assert totals == {rank: run.rank_peak(config, rank).num_bytes for rank in totals}
    assert max(totals.values()) == fits.found.plans[0].peak.num_bytes


def test_a_fixed_policy_is_the_only_one_of_each_layout() -> None:
    problem = with_fields(
        SMALL,
        base=replace(SMALL.base, recompute=RecomputeConfig(recompute_policy="*:full")),
        recompute=RecomputeConfig(recompute_policy="*:full"),
    )
    assert len(details(Search(problem), judged(4 * GIB, problem), most_layouts=6)["layouts"]) == 6


def test_the_page_of_a_real_verdict_has_its_terms(fits: FitVerdict, found: dict[str, Any]) -> None:
    shown = json.loads(to_json([fits], H100))
    shown["verdicts"][0]["details"] = json.loads(json.dumps(found))
    page = plan_page(shown)
    parsed = ParsedPage(page)
    assert parsed.faults == [] and len(page) < 300_000
    best = fits.found.plans[0]
    for term in best.peak.terms:
        if term.num_bytes:
            cells = [str(best.peak.rank), term.name, f"{term.num_bytes / GIB:,.2f}", term.tag]
            assert cells in parsed.rows


def test_the_command_writes_the_page_beside_its_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "plan.html"
    arguments = ["--model", "gpt2", "--gpu", "h100", "--gpus", "2,4", "--global-batch-size", "64"]
    assert plan.main([*arguments, "--html", str(file)]) == 0
    shown = capsys.readouterr().out
    parsed = ParsedPage(file.read_text())
    assert parsed.faults == []
    assert "2 x h100" in shown and "2 GPUs" in parsed.text and "4 GPUs" in parsed.text
    assert plan.main([*arguments, "--html", str(tmp_path / "plan.txt")]) == 2
    assert "ends in .html" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert plan.main([*arguments, "--html", str(file)]) == 2
    err = capsys.readouterr().err
    assert "needs the package jinja2" in err and "[plot]" in err and "Traceback" not in err
