"""The planning page shows the planner's figures, marks what fits, and escapes every text."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.pages.plan_grid import Dot, pareto
from megatron_lite.pages.plan_page import plan_page
from megatron_lite.pages.plan_terms import categories
from tests.support.browser import CHROMIUM, Parsed, look

GIB, MIB = 2**30, 2**20
HOSTILE = "</script><script>alert(1)</script><b onclick='x'>\"&"
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
TERMS = [
    ("weights", 4 * GIB, "exact"),
    ("optimizer states", 8 * GIB, "exact"),
    ("activations kept for backward", 20 * GIB, "exact"),
    ("workspace of the loss", 1 * GIB, "bound"),
]


def plan(**values: Any) -> dict[str, Any]:
    parallel = dict(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        context_parallel_size=1,
        num_layers_per_virtual_pipeline_stage=2,
        num_virtual_stages_per_pipeline_rank=None,
    )
    return {
        "command": ["torchrun", "-m", "train", "--recompute-policy", "0-3:full; *:none"],
        "config": {
            "model": dict(num_layers=12),
            "parallel": parallel,
            "data_parallel": dict(use_torch_fsdp2=False, use_distributed_optimizer=True),
            "training": dict(micro_batch_size=2, loss_chunk_size=None),
        },
        "recompute_policy": "0-3:full; *:none",
        "pipeline_rank": 0,
        "moment": "a backward",
        "peak_bytes": 33 * GIB,
        "peak_terms": terms(TERMS),
        "step_seconds": 2.5,
        "step_terms": {"matmuls": 2.0, "waits": 0.5, "nothing": 0.0},
        "tokens_per_second": 12_345.0,
        "mfu": 0.456,
        "extra_flops": 0.125,
        **values,
    }


def terms(rows: list[tuple[str, int, str]]) -> list[dict[str, Any]]:
    return [{"name": name, "bytes": num_bytes, "tag": tag} for name, num_bytes, tag in rows]


def grid() -> dict[str, Any]:
    """Four cells; the one of t = 4 under ZeRO-1 is missing."""
    return {
        "axes": {
            "t": [2, 4],
            "p": [2],
            "states": ["ZeRO-1", "FSDP2"],
            "b": [2],
            "policy": ["keep everything", "fastest that fits"],
        },
        "terms": [["weights", "exact"], ["activations kept for backward", "exact"]],
        "policies": ["*:none", "0-3:full; *:none"],
        "cells": [
            [[0, 0, 0, 0, 0], 2.0, 0, [[0, 4096.0, 40960.0], [1, 4000.0, 30000.0]]],
            [[0, 0, 0, 0, 1], 2.5, 1, [[0, 4096.0, 29696.0], [1, 4000.0, 25000.0]]],
            [[0, 0, 1, 0, 0], 3.0, 0, [[0, 1024.0, 40960.0]]],
            [[1, 0, 1, 0, 0], 4.0, 0, [[0, 1024.0, 10240.0]]],
        ],
        "plan": [0, 0, 0, 0, 1],
    }


def found(**values: Any) -> dict[str, Any]:
    verdict = {
        "verdict": "fits",
        "num_gpus": 8,
        "memory_bytes": 40 * GIB,
        "reserve_bytes": 2 * GIB,
        "num_layouts": 1234,
        "plans": [plan()],
        "smallest": None,
        "next_better": plan(peak_bytes=50 * GIB, step_seconds=2.1),
        "largest_micro_batch_size": 4,
        "neighbours": [
            dict(
                change="halve the micro-batch",
                fits=True,
                peak_bytes=30 * GIB,
                step_seconds=2.75,
                tokens_per_second=10_000.0,
            )
        ],
        "details": {
            "stages": [
                {"rank": 0, "terms": terms(TERMS)},
                {"rank": 1, "terms": terms([("weights", 3 * GIB, "exact")])},
            ],
            "timeline": {
                "rank": 0,
                "drawn": 2,
                "num_microbatches": 9,
                "actions": ["F0", "F1", "B0", "B1"],
                "in_flight": [1, 2, 1, 0],
                "kept_bytes": [10 * GIB, 20 * GIB, 10 * GIB, 0],
            },
            "grid": grid(),
        },
        **values,
    }
    return {"machine": "h100-80gb", "notes": ["--bf16 is assumed"], "verdicts": [verdict]}


def test_the_page_has_the_figures_of_the_plan() -> None:
    parsed = Parsed(plan_page(found()))
    assert parsed.faults == []
    for text in (
        "fits",
        "33 GiB",
        "7 GiB of 40 are free",
        "2.5 s",
        "12,345",
        "45.6 %",
        "tensor-parallel 2, pipeline-parallel 2 with 3 virtual stages, context-parallel 1, "
        "data-parallel 2 (ZeRO-1), micro-batch 2",
        "Rank 0 is the fullest: a backward.",
        "0-3:full; *:none",
        "12.5 % FLOPs",
        "halve the micro-batch",
        "--bf16 is assumed",
        "Every pipeline rank.",
        "2 of the step's 9 micro-batches",
        "'0-3:full; *:none'",
    ):
        assert text in parsed.text, text


def test_each_stage_has_a_bar_whose_widths_are_its_bytes() -> None:
    parsed = Parsed(plan_page(found()))
    labels = [
        str(attributes["aria-label"])
        for _, attributes in parsed.tags
        if attributes.get("class") == "bar"
    ]
    assert labels[0].startswith("rank 0: 33 GiB: weights 4 GiB, optimizer states 8 GiB, ")
    assert "workspace 1 GiB" in labels[0] and labels[1] == "rank 1: 3 GiB: weights 3 GiB"
    widths = {
        str(attributes["title"]): float(str(attributes["style"])[6:-1])
        for _, attributes in parsed.tags
        if str(attributes.get("class")).startswith("part c")
    }
    weights, kept = (
        next(width for title, width in widths.items() if title.startswith(name))
        for name in ("weights: 4 GiB. exact", "activations kept for backward: 20 GiB. exact")
    )
    assert kept == pytest.approx(5 * weights, rel=1e-3)
    capacity = next(
        float(str(attributes["style"])[5:-1])
        for _, attributes in parsed.tags
        if attributes.get("class") == "capacity"
    )
    assert capacity == pytest.approx(10 * weights, rel=1e-3)


def test_every_category_has_one_colour_on_the_whole_page() -> None:
    one = found()
    one["verdicts"][0]["details"]["grid"]["terms"].reverse()
    parsed = Parsed(plan_page(one))
    colors = parsed.data["grids"]["v0"]["colors"]
    drawn = {
        str(attributes["title"]).split(":")[0]: str(attributes["class"]).split("c")[-1]
        for _, attributes in parsed.tags
        if str(attributes.get("class")).startswith("part c")
    }
    assert [drawn["activations kept for backward"], drawn["weights"]] == [str(c) for c in colors]


def test_a_category_has_the_weakest_tag_of_its_terms() -> None:
    rows = [("workspace of A", 3, "bound"), ("workspace of B", 1, "estimate")]
    rows += [("weights", 2, "exact"), ("workspace of C", 1, "exact"), ("nothing", 0, "exact")]
    assert categories(terms(rows)) == {"workspace": "estimate", "weights": "exact"}


def test_the_front_holds_what_no_other_layout_beats() -> None:
    cells = [Dot((7 * k) % 11, (5 * k) % 13, [k]) for k in range(60)]
    front = pareto(cells)

    def beaten(cell: Dot) -> bool:
        return any(
            other[0] <= cell[0] and other[1] <= cell[1] and other[:2] != cell[:2] for other in cells
        )

    expected = {cell[:2] for cell in cells if not beaten(cell)}
    assert [cell[:2] for cell in front] == sorted(expected)


def test_a_verdict_without_details_or_without_any_plan_has_a_page() -> None:
    bare = found()
    del bare["verdicts"][0]["details"]
    none = found(verdict="does not fit", plans=[], next_better=None, neighbours=[])
    none["verdicts"][0] |= {"details": {}}
    smallest = found(
        verdict="does not fit",
        plans=[],
        smallest=plan(peak_bytes=50 * GIB),
        next_better=None,
        neighbours=[],
    )
    for one in (bare, none, smallest):
        parsed = Parsed(plan_page(one))
        assert parsed.faults == [] and one["verdicts"][0]["verdict"] in parsed.text
    assert "10 GiB more than there are" in Parsed(plan_page(smallest)).text


def test_several_verdicts_share_a_page() -> None:
    both = found()
    both["verdicts"].append({**copy.deepcopy(both["verdicts"][0]), "num_gpus": 16})
    parsed = Parsed(plan_page(both))
    assert "8 GPUs" in parsed.text and "16 GPUs" in parsed.text
    assert set(parsed.data["grids"]) == {"v0", "v1"}
    identifiers = [value for _, attributes in parsed.tags if (value := attributes.get("id"))]
    assert len(identifiers) == len(set(identifiers))


def test_hostile_texts_of_a_plan_are_text() -> None:
    one = found(verdict=HOSTILE)
    one["machine"], one["notes"] = HOSTILE, [HOSTILE]
    verdict = one["verdicts"][0]
    verdict["plans"][0]["recompute_policy"] = HOSTILE
    verdict["plans"][0]["peak_terms"][0]["name"] = HOSTILE
    verdict["neighbours"][0]["change"] = HOSTILE
    verdict["details"]["stages"][0]["terms"][0] |= {"name": HOSTILE, "tag": HOSTILE}
    verdict["details"]["grid"]["policies"] = [HOSTILE, HOSTILE]
    verdict["details"]["grid"]["axes"]["policy"] = [HOSTILE, HOSTILE * 2]
    verdict["details"]["timeline"]["actions"][0] = HOSTILE
    parsed = Parsed(plan_page(one))
    assert parsed.faults == [] and len(parsed.scripts) == 2
    assert not any("alert" in script for script in parsed.scripts)
    assert not [key for _, attributes in parsed.tags for key in attributes if key.startswith("on")]


@pytest.mark.long
@needs_chromium
def test_a_browser_explores_the_grid_on_a_phone_without_errors(tmp_path: Path) -> None:
    script = """(page) => {
      const inputs = [...page.querySelectorAll(".explorer input")];
      const result = page.querySelector(".result"), answers = [result.textContent];
      const set = (values) => {
        values.forEach((value, k) => { inputs[k].value = value; });
        inputs[0].dispatchEvent(new Event("input"));
        answers.push(result.textContent, page.querySelectorAll(".explorer .bar").length);
      };
      set([1, 0, 1, 0, 0]);
      set([1, 0, 0, 0, 0]);
      set([0, 0, 1, 0, 1]);
      const plot = page.querySelector("[data-scatter]"), point = page.querySelector("[data-point]");
      const box = plot.getBoundingClientRect();
      plot.dispatchEvent(new PointerEvent("pointermove",
        { clientX: box.left, clientY: box.top }));
      answers.push(point.textContent);
      plot.dispatchEvent(new MouseEvent("click"));
      answers.push(result.textContent);
      const chart = page.querySelector("[data-chart]"), at = chart.getBoundingClientRect();
      chart.dispatchEvent(new PointerEvent("pointermove", { clientX: at.left, clientY: at.top }));
      answers.push(page.querySelector("[data-where]").textContent);
      return answers;
    }"""
    seen = look(plan_page(found()), tmp_path, script=script)
    assert seen.width <= 375 and seen.wide == [] and seen.console == []
    start, moved, bars, missing, none, unfit, _, point, clicked, action = seen.answer
    assert start == ("fits: 33.00 GiB, 7.00 GiB free; 2.500 s a step; policy 0-3:full; *:none")
    assert moved.startswith("fits: 11.00 GiB, 29.00 GiB free; 4.000 s") and bars == 1
    assert missing.startswith("This layout is not in the grid") and none == 0
    assert unfit == "No recompute policy makes this layout fit."
    assert point.startswith("t 2, p 2, ZeRO-1, b 2, keep everything: 44.00 GiB, 2.000 s a step")
    assert clicked.startswith("does not fit: 44.00 GiB, 4.00 GiB too much")
    assert action == "action 1; F0, micro-batches in flight: 1"


def test_all_cells_of_the_grid_are_in_the_page() -> None:
    one = found()
    cells = one["verdicts"][0]["details"]["grid"]["cells"]
    parsed = Parsed(plan_page(one))
    assert parsed.data["grids"]["v0"]["cells"] == cells
    dots = itertools.chain.from_iterable(
        str(attributes["d"]).split("M")[1:]
        for tag, attributes in parsed.tags
        if tag == "path" and attributes.get("class") in ("dots over", "dots under")
    )
    assert len(list(dots)) == len(cells)
