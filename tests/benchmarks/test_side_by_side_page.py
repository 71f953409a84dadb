"""docs/performance-peers.md: targets, tables and pictures are made of the results as they are."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from benchmarks.side_by_side_page import groups_part, of_all_machines, picture, read
from benchmarks.side_by_side_report import PANELS, figure_of
from benchmarks.side_by_side_targets import TARGETS, Figure, targets_table, verdict

EAGER, COMPILED, BF16, TP2, PEAK, QUICKSTART = range(6)


def row(name: str, ratio: float, peak_mib: float = 100.0, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "same_work": True,
        "rounds": 5,
        "wall_ms": 1234.0 * ratio,
        "wall_ratio": [ratio, ratio - 0.01, ratio + 0.01],
        "cpu_ratio": [ratio, ratio, ratio],
        "peak_bytes": int(peak_mib * 2**20),
        "gemm_fraction": 0.8,
        **more,
    }


def block(*rows: dict[str, Any], tp_size: int = 1, dtype: str = "float32") -> dict[str, Any]:
    return {
        "block": {"dtype": dtype, "threads": 1, "tp_size": tp_size, "rounds": 9},
        "title": f"gpt 8x512, {dtype}, 1 thread(s), TP {tp_size}",
        "rows": list(rows),
        "skipped": {},
        "failed": {},
    }


def report(*blocks: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "date": "2026-11-23T00:00:00+00:00",
        "device": "a CPU",
        "bf16_instructions": [],
        "is_quick": False,
        "versions": {"torch": "2.13.0", "litgpt": None},
        "blocks": list(blocks),
        **more,
    }


def found(number: int, *blocks: dict[str, Any], **more: Any) -> list[float]:
    """Returns the figures of a target."""
    return [
        pytest.approx(figure.value) for figure in TARGETS[number].find(report(*blocks, **more), {})
    ]


def test_without_results_every_target_is_not_measured() -> None:
    table = targets_table({}, {})
    assert table.count("| not measured |  |  | not measured |") == len(TARGETS) == 6
    assert groups_part({}) == "Not measured."
    assert "not measured" in picture("time", {})


def test_the_fastest_eager_peer_and_the_fastest_compiled_one_are_told_apart() -> None:
    rows = block(
        row("ours, none", 1.0),
        row("ours, compiled", 0.5),
        row("plain torch, none", 1.25),
        row("transformers GPT-2, none", 1.1),
        row("plain torch, compiled", 0.9),
        row("litgpt, none", 0.2, same_work=False),
    )
    assert found(EAGER, rows) == [1 / 1.1] and found(COMPILED, rows) == [1 / 0.9]
    assert found(EAGER, {**rows, "rows": rows["rows"][1:]}) == []  # ours is missing
    two = {**rows, "block": {**rows["block"], "threads": 2}}
    assert found(EAGER, two) == [] and found(COMPILED, two) == []


def test_bf16_counts_only_with_instructions_for_it() -> None:
    rows = block(row("ours, none", 1.0), row("plain torch, none", 2.0), dtype="bf16")
    assert found(BF16, rows) == [] and found(EAGER, rows) == []
    assert found(BF16, rows, bf16_instructions=["avx512_bf16"]) == [0.5]


def test_every_recompute_setting_is_compared_with_the_faster_attention() -> None:
    rows = block(
        row("ours, none", 1.0),
        row("ours, full", 1.4),
        row("ours, pointwise", 9.0),
        row("megatron-core stock, none", 2.0),
        row("megatron-core SDPA, none", 1.6),
        row("megatron-core stock, full", 2.0),
        row("megatron-core stock, core_attn", 2.0),
        tp_size=2,
    )
    assert found(TP2, rows) == [1 / 1.6, 1.4 / 2.0] and found(EAGER, rows) == []
    assert found(TP2, {**rows, "block": {**rows["block"], "tp_size": 1}}) == []


def test_the_peak_is_compared_with_peers_that_recompute_nothing() -> None:
    rows = block(
        row("ours, none", 1.0, 90.0),
        row("plain torch, none", 1.0, 120.0),
        row("plain torch, compiled", 1.0, 100.0),
        row("transformers GPT-2, full", 1.0, 10.0),
    )
    assert found(PEAK, rows) == [0.9]


def test_the_worst_figure_decides() -> None:
    target = TARGETS[EAGER]
    assert verdict(target, [Figure(0.9, ""), Figure(0.97, "")]) == "met"
    assert verdict(target, [Figure(0.9, ""), Figure(0.97 * 1.05, "")]) == "missed by 5.0%"
    seconds = {"device": "a CPU", "processors": 2, "rows": [{"name": "quickstart", "wall_s": 90.0}]}
    table = targets_table(report(), seconds).splitlines()
    assert table[2 + QUICKSTART].endswith(
        "| 60 s | 90 s |  | a CPU, 2 processors | missed by 50.0% |"
    )
    fast = block(row("ours, none", 1.0), row("plain torch, none", 1.25))
    slow = block(row("ours, none", 1.0), row("plain torch, none", 0.97))
    table = targets_table(report(fast, slow), {}).splitlines()
    assert "| 1.03, the worst of 2; the best is 0.80 |" in table[2 + EAGER]


def test_products_alone_are_those_beside_the_fastest_peer() -> None:
    peers = [
        row("plain torch, none", 0.97, gemm_fraction=0.93),
        row("litgpt, none", 1.0, gemm_fraction=0.9),
        row("megatron-core SDPA, none", 1.0, gemm_fraction=0.7),
        row("megatron-core stock, none", 1.1, gemm_fraction=0.6),
    ]
    ours = row("ours, none", 1.0, gemm_fraction=0.5)
    one, two = block(ours, *peers), block(ours, *peers, tp_size=2)
    table = targets_table(report(one, two), {}).splitlines()
    assert "| 0.93 |" in table[2 + EAGER] and "| 0.70 |" in table[2 + TP2]
    assert table[2 + PEAK].split("|")[4].strip() == ""


def test_the_targets_are_those_of_all_machines_and_each_block_names_its_own() -> None:
    fast = block(row("ours, none", 1.0), row("plain torch, none", 1.25))
    slow = block(row("ours, none", 1.0), row("plain torch, none", 0.97))
    both = of_all_machines({"AVX-512": report(fast), "AVX2": report(slow), "no results": {}})
    assert f"AVX2, {slow['title']}; plain torch, none | missed by" in targets_table(both, {})
    assert [one.value for one in TARGETS[EAGER].find(both, {})] == [1 / 1.25, 1 / 0.97]


def test_bf16_counts_on_the_machines_that_have_its_instructions() -> None:
    one = block(row("ours, none", 1.0), row("plain torch, none", 1.25), dtype="bf16")
    reports = {
        "AVX-512": report(one, bf16_instructions=["avx512_bf16"]),
        "AVX2": report(block(row("ours, none", 1.0), row("plain torch, none", 20.0), dtype="bf16")),
    }
    both = of_all_machines(reports)
    assert [one.value for one in TARGETS[BF16].find(both, {})] == [1 / 1.25]


def test_every_row_failure_and_absence_is_in_the_tables() -> None:
    rows = block(row("ours, none", 1.0), row("plain torch, none", 1.25, rounds=2))
    rows["failed"] = {"megatron-core stock, full": "ValueError: a | b\nmore"}
    rows["skipped"] = {"litgpt": "No module named litgpt"}
    text = groups_part(report(rows, bf16_instructions=["amx_bf16"]))
    for line in (
        "a CPU; bf16 instructions: amx_bf16. torch 2.13.0. 2026-11-23.",
        "### gpt 8x512, float32, 1 thread(s), TP 1",
        "Rounds: 5. A step of `ours, none` takes 1234 ms.",
        "| ours, none | 1.00 | 0.99 to 1.01 | 1.00 | 100.0 | 80% |",
        "| plain torch, none (2 rounds) | 1.25 | 1.24 to 1.26 | 1.25 | 100.0 | 80% |",
        "| megatron-core stock, full | failed: ValueError: a / b | | | | |",
        "| litgpt | left out: No module named litgpt | | | | |",
    ):
        assert line in text.splitlines()


@pytest.mark.parametrize("kind", ["time", "memory"])
def test_a_picture_has_every_row_and_is_the_same_again(kind: str) -> None:
    rows = block(row("ours, none", 1.0), row("plain torch, none", 1.25))
    rows["failed"] = {"litgpt": "died"}
    svg = picture(kind, report(rows))
    assert "plain torch, none" in svg and "wall time" in svg and svg.startswith("<?xml")
    assert svg == picture(kind, report(rows))


def test_no_label_of_the_picture_covers_another_label_or_a_point() -> None:
    rows = block(*(row(f"contestant number {one}", 1.0 + one / 100, 100.0) for one in range(5)))
    figure = figure_of(report(rows), [rows], *PANELS["memory"], clock="wall")
    figure.draw_without_rendering()
    (axis,) = figure.axes
    boxes = [label.get_window_extent() for label in axis.texts]
    points = [axis.transData.transform(label.xy) for label in axis.texts]
    assert len(boxes) == 5
    for one, two in itertools.combinations(boxes, 2):
        assert not one.overlaps(two)
    assert not any(box.contains(*point) for box in boxes for point in points)


def test_a_result_that_does_not_exist_is_empty() -> None:
    assert read("no such result") == {}


@pytest.mark.parametrize("kind", PANELS)
def test_a_picture_has_the_same_bytes_each_time(kind: str) -> None:
    """Else tests.docs.generate --check would call it stale now and then."""
    assert len({picture(kind) for _ in range(6)}) == 1
