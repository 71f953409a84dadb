"""The planning page shows the planner's figures and escapes every text."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lite.pages.plan_page import plan_page, plans_figure, stages_figure
from tests.support.parsed_page import ParsedPage

GIB = 2**30
HOSTILE = "</script><script>alert(1)</script><b onclick='x'>\"&$x_$\x00"
TERMS = [("weights", 4, "exact"), ("optimizer states", 8, "exact"), ("workspace", 1, "bound")]


def plan(**values: Any) -> dict[str, Any]:
    return {
        "command": ["torchrun", "-m", "train", "--recompute-policy", "0-3:full; *:none"],
        "layout": "t 2, p 2, c 1, ZeRO-1, b 2",
        "recompute_policy": "0-3:full; *:none",
        "pipeline_rank": 0,
        "moment": "a backward",
        "peak_bytes": 13 * GIB,
        "peak_terms": terms(),
        "step_seconds": 2.5,
        "step_terms": {"matmuls": 2.0, "waits": 0.5, "nothing": 0.0},
        "tokens_per_second": 12_345.0,
        "mfu": 0.456,
        "extra_flops": 0.125,
        **values,
    }


def terms(extra: int = 0) -> list[dict[str, Any]]:
    return [{"name": name, "bytes": (gib + extra) * GIB, "tag": tag} for name, gib, tag in TERMS]


def verdict(**values: Any) -> dict[str, Any]:
    neighbour = dict(change="t 4", fits=True, peak_bytes=9 * GIB, step_seconds=3.5)
    return {
        "verdict": "fits",
        "num_gpus": 8,
        "memory_bytes": 80 * GIB,
        "reserve_bytes": 4 * GIB,
        "num_layouts": 99,
        "plans": [plan(), plan(step_seconds=2.75)],
        "smallest": None,
        "next_better": plan(peak_bytes=90 * GIB, layout="t 1"),
        "neighbours": [{**neighbour, "tokens_per_second": 1.0}],
        "details": {
            "stages": [{"rank": rank, "terms": terms(rank)} for rank in (0, 1)],
            "layouts": [{"peak_bytes": 70 * GIB, "step_seconds": 4.5}],
        },
        **values,
    }


def test_the_figures_of_the_page_are_the_planners() -> None:
    parsed = ParsedPage(plan_page({"machine": "h100", "verdicts": [verdict(), verdict()]}))
    assert parsed.faults == []
    same = ["12,345", "0-3:full; *:none"]
    for cells in (
        ["t 2, p 2, c 1, ZeRO-1, b 2", "13.00", "2.5", *same],
        ["t 2, p 2, c 1, ZeRO-1, b 2", "13.00", "2.75", *same],
        ["t 1", "90.00", "2.5", *same],
        ["plan 1 with t 4", "9.00", "3.5", "1", ""],
        ["1", "optimizer states", "9.00", "exact"],
        ["matmuls", "2"],
    ):
        assert parsed.rows.count(cells) == 2, cells
    for text in ("8 GPUs: fits", "45.6 %", "12.5 %", "--recompute-policy '0-3:full; *:none'"):
        assert text in parsed.text
    assert "nothing" not in parsed.text


def test_the_pictures_have_the_bytes_and_the_seconds() -> None:
    one = verdict()
    (axis,) = plans_figure(one, one["plans"][0]).axes
    points = {
        str(line.get_label()): list(zip(line.get_xdata(), line.get_ydata(), strict=True))
        for line in axis.lines
    }
    assert points["plans"] == [(2.5, 13.0), (2.75, 13.0)]
    assert points["best plan"] == [(2.5, 13.0)]
    assert points["other layouts"] == [(4.5, 70.0)] and points["one step away"] == [(3.5, 9.0)]
    assert [list(line.get_ydata()) for line in axis.lines[-2:]] == [[80.0] * 2, [76.0] * 2]
    (axis,) = stages_figure(one, one["details"]["stages"]).axes
    bars = [[(bar.get_x(), bar.get_width()) for bar in bars] for bars in axis.containers]
    assert bars == [[(0, 4), (0, 5)], [(4, 8), (5, 9)], [(12, 1), (14, 2)]]


@pytest.mark.parametrize(
    "changes",
    [
        dict(plans=[], smallest=plan(), next_better=None, neighbours=[], verdict="does not fit"),
        dict(plans=[], smallest=None, next_better=None, neighbours=[], details={}),
        dict(details={}, neighbours=[]),
    ],
    ids=["only the smallest", "no plan at all", "no details"],
)
def test_a_verdict_with_less_has_a_page_too(changes: dict[str, Any]) -> None:
    parsed = ParsedPage(plan_page({"machine": "h100", "verdicts": [verdict(**changes)]}))
    assert parsed.faults == [] and "layouts searched" in parsed.text


def test_hostile_texts_of_a_plan_are_text() -> None:
    hostile = plan(
        command=["run", HOSTILE],
        layout=HOSTILE,
        recompute_policy=HOSTILE,
        moment=HOSTILE,
        peak_terms=[{"name": HOSTILE, "bytes": GIB, "tag": HOSTILE}],
        step_terms={HOSTILE: 1.0},
    )
    one = verdict(plans=[hostile], next_better=hostile, details={}, verdict=HOSTILE)
    page = plan_page({"machine": HOSTILE, "verdicts": [one], "notes": [HOSTILE]})
    parsed = ParsedPage(page)
    assert parsed.faults == [] and "\x00" not in page
    assert parsed.text.count("alert(1)") >= 10
