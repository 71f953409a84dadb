"""The explanation describes equal layers once, so that it is as short for 96 layers as for 12."""

from __future__ import annotations

import pytest

from arguments import parse_args
from megatron_lite.memory.explain.recompute_report import Report, explain
from megatron_lite.memory.explain.report_lines import layers_name
from megatron_lite.memory.explain.report_text import report_text

SIZES = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 12 --max-position-embeddings 12 "
    "--micro-batch-size 3 --vocab-size 98 "
)
ALTERNATING = [
    "every-2:full",
    "every-3:full",
    "every-3+1:pointwise@host; every-3:full@host",
    "0-1,4-5:full/2; every-2:ops(matmul)",
    "every-2:none@host(core_attn); *:core_attn",
]


def explained(policy: str, words: str) -> Report:
    config = parse_args([*(SIZES + words).split(), "--recompute-policy", policy]).config
    return explain(config, "cpu")


@pytest.mark.parametrize(
    ("layers", "name"),
    [
        ([3], "layer 3"),
        (range(8), "layers 0-7"),
        ([0, 2], "layers 0, 2"),
        ([0, 2, 4, 6], "layers 0, 2, 4, 6"),
        ([0, 2, 4, 6, 8], "layers 0, 2, .. 8"),
        (range(1, 80, 3), "layers 1, 4, .. 79"),
        ([1, 2, 4, 5, 7], "layers 1-2, 4-5, 7"),
        ([n for n in range(80) if n % 3], "layers 1-2, 4-5, .. 76-77, 79"),
        ([0, 1, 2, 5, 7, 8, 20], "layers 0-2, 5, 7-8, 20"),
    ],
)
def test_the_name_of_layers_is_short(layers: list[int], name: str) -> None:
    assert layers_name(layers) == name


@pytest.mark.parametrize("policy", ALTERNATING)
@pytest.mark.parametrize("width", [80, 120])
def test_more_layers_need_no_more_lines(policy: str, width: int) -> None:
    small, large = (
        report_text(explained(policy, f"--num-layers {number}"), width).splitlines()
        for number in (12, 96)
    )
    assert len(small) - 3 <= len(large) <= len(small) + 3
    assert max(map(len, large)) <= width


@pytest.mark.parametrize("policy", ALTERNATING)
@pytest.mark.parametrize(
    "layout",
    [
        "",
        "--pipeline-model-parallel-size 2",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3 "
        "--global-batch-size 24",
    ],
)
def test_the_groups_have_each_layer_once_and_add_up(policy: str, layout: str) -> None:
    report = explained(policy, f"--num-layers 36 --position-embedding-type rope {layout}")
    found = [
        (stage, layer)
        for group in report.layer_groups
        for stage in group.stages or (0,)
        for layer in group.layers
    ]
    num_stages = len(report.ranks[report.rank].stages) if report.ranks else 1
    assert len(set(found)) == len(found) == num_stages * (max(layer for _, layer in found) + 1)
    parts = (report.embedding, report.rotary_tables, report.head)
    assert report.own.kept_bytes == sum(part.kept_bytes for part in parts) + sum(
        group.count * group.kept_bytes for group in report.layer_groups
    )
    assert report.own.host_bytes == sum(
        group.count * tensor.num_bytes for group in report.layer_groups for tensor in group.moved
    )


def test_equal_layers_of_several_stages_are_named_together() -> None:
    report = explained(
        "every-2:full",
        "--num-layers 32 --pipeline-model-parallel-size 2 "
        "--num-virtual-stages-per-pipeline-rank 4 --global-batch-size 24",
    )
    assert [(one.stages, one.layers, one.count) for one in report.layer_groups] == [
        ((0, 2, 4, 6), (0, 2), 8),
        ((0, 2, 4, 6), (1, 3), 8),
    ]
    lines = report_text(report).splitlines()
    assert "  layers 1, 3 of stages 0, 2, 4, 6 (8 layers): everything is kept" in lines
    assert [line[:26] for line in lines if line.startswith("  layers") and ":" not in line] == [
        "  layers 0, 2 of stages ..",
        "  layers 1, 3 of stages ..",
    ]
