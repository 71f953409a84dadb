"""The planning page shows the planner's figures and escapes every text."""

import json

import pytest

from megatron_lite.tools import plan
from tests.support.commands import ended
from tests.support.parsed_page import ParsedPage

GIB = 2**30
HOSTILE = "</script><script>alert(1)</script><b onclick='x'>\"&$x_$\x00"
SIZES = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --vocab-size 999 "
    "--global-batch-size 4 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 "
    "--context-parallel-size 1 --micro-batch-size 1 --gpu h100 --gpus 2"
)


def planned(folder, flags):
    """Returns what the planner finds, and the text of its page."""
    page = folder / "plan.html"
    found = ended(plan.main, f"{SIZES} {flags} --json - --html {page}")
    return json.loads(found.out), page.read_text()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    flags = "--train-tokens 1e6 --price-per-gpu-hour 2.5"
    return planned(tmp_path_factory.mktemp("plan"), flags)


def test_the_figures_of_the_page_are_the_planners(found):
    (verdict,), parsed = found[0]["verdicts"], ParsedPage(found[1])
    assert parsed.faults == [] and verdict["plans"] and verdict["neighbours"]
    for one in verdict["plans"]:
        texts = {f"{one['peak_bytes'] / GIB:.2f}", one["layout"], one["recompute_policy"]}
        texts |= {f"{one[name]:.4g}" for name in ("days", "cost")}
        assert any(texts <= {*row} for row in parsed.rows), texts
    assert f"{verdict['plans'][0]['tokens_per_second']:,.0f}" in parsed.text
    for one in verdict["neighbours"]:
        assert f"plan 1 with {one['change']}" in parsed.text


def test_a_verdict_without_a_plan_has_a_page_too(tmp_path):
    less, page = planned(tmp_path, "--memory-budget 20MiB --reserve 0")
    assert less["verdicts"][0]["plans"] == []
    assert ParsedPage(page).faults == [] and "does not fit" in page


def test_hostile_texts_of_a_plan_are_text(found):
    def hostile(value):
        if isinstance(value, dict):
            return {name: hostile(one) for name, one in value.items()}
        if isinstance(value, list):
            return [hostile(one) for one in value]
        return HOSTILE if isinstance(value, str) else value

    stages = [{"rank": 0, "terms": [{"name": HOSTILE, "bytes": GIB, "tag": HOSTILE}]}]
    copy = hostile(found[0])
    copy["verdicts"][0]["plans"][0]["step_terms"] = {HOSTILE: 1.0}
    page = plan.plan_page(copy, [stages], [HOSTILE])
    parsed = ParsedPage(page)
    assert parsed.faults == [] and "\x00" not in page
    assert parsed.text.count("alert(1)") >= 10
