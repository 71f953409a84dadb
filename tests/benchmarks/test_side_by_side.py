"""benchmarks/side_by_side.py compares equal work, and benchmarks/smoke.py fails on a regression."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import gpu_step, smoke
from benchmarks.contestant import Contestant
from benchmarks.engines import PRESETS, Setting, one_rank, our_model
from benchmarks.recompute_engines import Place
from benchmarks.side_by_side import blocks_of, parse
from benchmarks.side_by_side_block import facts, in_rounds, rows
from benchmarks.side_by_side_engines import GLOO, NO_ONEDNN, OURS, LlamaSetting, build_contestants
from benchmarks.side_by_side_report import table
from benchmarks.side_by_side_task import SHAPES, Block
from benchmarks.step_time import model_gemms
from tests.support.ranks import run_ranks

BLOCK = Block(
    family="gpt",
    shape="tiny",
    dtype="float32",
    threads=1,
    tp_size=1,
    sequence_parallel=False,
    rounds=1,
    compiled=False,
)


def setting_of(family: str) -> Setting:
    return replace(BLOCK, family=family).setting()


def contestants_of(family: str) -> tuple[list[Contestant], Place]:
    setting = setting_of(family)
    place = Place(parallel=one_rank(setting), sequence_parallel=False)
    peers = ["plain", "transformers", "litgpt"]
    return build_contestants(family, setting, place, compiled=False, peers=peers)[0], place


@pytest.mark.long
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_all_contestants_do_the_same_work(family: str) -> None:
    pytest.importorskip("transformers")
    contestants, place = contestants_of(family)
    libraries = replace(BLOCK, family=family).libraries
    assert {one.name for one in contestants} >= {
        name for name, library in libraries.items() if library in ("ours", "plain", "transformers")
    }
    found = {one.name: facts(one, place.parallel.rng) for one in contestants}
    samples = in_rounds(
        contestants,
        model_gemms(setting_of(family)),
        BLOCK,
        place.parallel,
        progress=lambda text: None,  # type: ignore[arg-type]
    )
    result = rows(BLOCK, setting_of(family), found, samples)
    assert len(result) >= 6 and all(row["same_work"] for row in result)
    by_name = {row["name"]: row for row in result}
    assert by_name["ours, full"]["flops"] > by_name[OURS]["flops"]
    # A contestant with other weights is told.
    first = next(one for one in contestants if one.name.startswith("transformers"))
    with torch.no_grad():
        first.parameters[0].mul_(1.5)
    other = {**found, first.name: facts(first, place.parallel.rng)}
    told = {row["name"] for row in rows(BLOCK, setting_of(family), other, samples)}
    wrong = [
        row["name"]
        for row in rows(BLOCK, setting_of(family), other, samples)
        if not row["same_work"]
    ]
    assert wrong == [first.name] and told == set(found)
    lines = list(table({"title": BLOCK.title, "rows": result, "skipped": {"x": "y " * 80}}))
    assert max(map(len, "\n".join(lines).splitlines())) <= 100


@pytest.mark.long
def test_megatron_core_has_our_loss_at_tp_2() -> None:
    pytest.importorskip("megatron.core")

    def run(rank: int, world_size: int) -> dict[str, float]:
        from benchmarks.side_by_side_block import prepare_megatron_core
        from megatron_lite.config.parallel import ParallelConfig
        from megatron_lite.parallel.state import parallel_state

        config = ParallelConfig(tensor_model_parallel_size=2, distributed_backend="gloo")
        with parallel_state(config, seed=1) as parallel:
            prepare_megatron_core(2)
            found, skipped = build_contestants(
                "gpt",
                setting_of("gpt"),
                Place(parallel=parallel, sequence_parallel=True),
                compiled=False,
            )
            # The ranks of this test share no memory, and oneDNN depends on the processor.
            assert {GLOO} <= set(skipped) <= {GLOO, NO_ONEDNN}
            return {one.name: one.run().item() for one in found}

    losses = run_ranks(run, 2, detail=False)[0]
    assert len(losses) >= 8
    assert max(losses.values()) - min(losses.values()) < 1e-4


def test_a_large_run_has_every_block_and_a_quick_one_few() -> None:
    blocks = blocks_of(parse([]))
    assert len({block.title for block in blocks}) == len(blocks) == 3 * 2 * 2 * (2 + 2)
    assert {block.rounds for block in blocks} == {9}
    assert len(blocks_of(parse(["--quick"]))) == 4
    assert set(SHAPES) > set(parse([]).shapes)


def test_a_ratio_above_its_limit_is_told() -> None:
    fast = {OURS: 1.0, smoke.PLAIN: 1.0, "ours, full": 1.3, "ours, pointwise": 1.1}
    assert smoke.above(fast, smoke.TIME_LIMITS) == []
    slow = {**fast, OURS: 1.6}
    assert smoke.above(slow, smoke.TIME_LIMITS) == [(OURS, smoke.PLAIN)]


def test_the_stack_grows_with_the_card() -> None:
    layers = [gpu_step.fitting(size * 2**30).num_layers for size in (1, 24, 80, 140, 10_000)]
    assert layers == sorted(layers) and layers[0] == 1 and layers[-1] == 32
    assert layers[3] > layers[2] > layers[1]


def test_the_llama_of_the_peers_has_an_mlp_in_multiples_of_64() -> None:
    setting = LlamaSetting(
        shape=PRESETS["small"], device=torch.device("cpu"), dtype="float32", dropout=0.0
    )
    assert setting.ffn_size == 704 == setting.model_config().ffn_size


@pytest.mark.parametrize("is_amd", [False, True])
def test_ours_computes_products_as_a_run_on_this_processor_does(
    is_amd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.engines.multiplies_faster_by_onednn", lambda: is_amd)
    monkeypatch.setattr("benchmarks.engines.gains_in_bf16", lambda: not is_amd)
    chosen = []

    def model(*args: Any, onednn: bool | None = None, **options: Any) -> Any:
        chosen.append(onednn)
        return our_model(*args, onednn=onednn, **options)

    monkeypatch.setattr("benchmarks.side_by_side_engines.our_model", model)
    setting = setting_of("gpt")
    place = Place(parallel=one_rank(setting), sequence_parallel=False)
    found, skipped = build_contestants(
        "gpt",
        setting,
        place,
        compiled=False,
        peers=[NO_ONEDNN],
        wanted={OURS, NO_ONEDNN}.__contains__,
    )
    assert chosen == ([None, False] if is_amd else [None])  # None: as in a run
    assert [one.name for one in found] == [OURS, NO_ONEDNN][: len(chosen)]
    assert (NO_ONEDNN in skipped) is not is_amd
    assert (setting.onednn, replace(setting, dtype="bf16").onednn) == (is_amd, not is_amd)
