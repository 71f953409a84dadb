"""The planning page shows the planner's figures and escapes every text."""

from megatron_lite.tools.plan import plan_page
from tests.support.parsed_page import ParsedPage

GIB = 2**30
HOSTILE = "</script><script>alert(1)</script><b onclick='x'>\"&$x_$\x00"
TERMS = [("weights", 4, "exact"), ("optimizer states", 8, "exact"), ("workspace", 1, "bound")]
STAGES = [
    {
        "rank": rank,
        "terms": [{"name": name, "bytes": (n + rank) * GIB, "tag": tag} for name, n, tag in TERMS],
    }
    for rank in (0, 1)
]


def plan(**values):
    return {
        "command": ["torchrun", "-m", "train", "--recompute-policy", "0-3:full; *:none"],
        "layout": "t 2, p 2",
        "recompute_policy": "0-3:full; *:none",
        "moment": "a backward",
        "peak_bytes": 13 * GIB,
        "step_seconds": 2.5,
        "step_terms": {"matmuls": 2.0, "waits": 0.5, "nothing": 0.0},
        "tokens_per_second": 12_345.0,
        "mfu": 0.456,
        "band": 0.1,
        "days": 12.34,
        "cost": 5678.0,
        "extra_flops": 0.125,
        **values,
    }


def verdict(**values):
    neighbour = dict(change="t 4", fits=True, peak_bytes=9 * GIB, step_seconds=3.5, band=0.3)
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
        **values,
    }


def test_the_figures_of_the_page_are_the_planners():
    found = {"machine": "h100", "verdicts": [verdict(), verdict()]}
    parsed = ParsedPage(plan_page(found, [STAGES, STAGES]))
    assert parsed.faults == []
    same = ["0-3:full; *:none", "12.3", "5,678"]
    for cells in (
        ["2.5 +-10%", "13.00", "t 2, p 2", *same],
        ["2.75 +-10%", "13.00", "t 2, p 2", *same],
        ["2.5 +-10%", "90.00", "t 1", *same],
        ["3.5 +-30%", "9.00", "plan 1 with t 4", "", "", ""],
        ["step s", "2.5", "2.75"],
        ["tokens/s", "12,345", "12,345"],
        ["cost", "5,678", "5,678"],
        ["1", "optimizer states", "9.00", "exact"],
        ["matmuls", "2"],
    ):
        assert parsed.rows.count(cells) == 2, cells
    for text in ("8 GPUs: fits", "46% +-5%", "12.5%", "--recompute-policy '0-3:full; *:none'"):
        assert text in parsed.text
    assert "nothing" not in parsed.text


def test_a_verdict_without_a_plan_has_a_page_too():
    less = dict(plans=[], next_better=None, neighbours=[], verdict="does not fit")
    found = [verdict(**less, smallest=plan()), verdict(**less)]
    parsed = ParsedPage(plan_page({"machine": "h100", "verdicts": found}, [STAGES, []]))
    assert parsed.faults == [] and parsed.text.count("layouts searched") == 2


def test_hostile_texts_of_a_plan_are_text():
    hostile = plan(
        command=["run", HOSTILE],
        layout=HOSTILE,
        recompute_policy=HOSTILE,
        moment=HOSTILE,
        step_terms={HOSTILE: 1.0},
    )
    stages = [{"rank": 0, "terms": [{"name": HOSTILE, "bytes": GIB, "tag": HOSTILE}]}]
    one = verdict(plans=[hostile], next_better=hostile, verdict=HOSTILE)
    page = plan_page({"machine": HOSTILE, "verdicts": [one]}, [stages], [HOSTILE])
    parsed = ParsedPage(page)
    assert parsed.faults == [] and "\x00" not in page
    assert parsed.text.count("alert(1)") >= 10
