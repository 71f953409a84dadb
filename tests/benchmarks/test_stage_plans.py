"""benchmarks/stage_plans.py: its plans fit, and docs/planning.md has its table."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.stage_plans import BEGIN, END, GIB, Row, main, megatron_settings, rows, run_of
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.memory.predict.step_peak import fullest_step_peak

PAGE = Path(__file__).resolve().parents[2] / "docs" / "planning.md"


@pytest.fixture(scope="module")
def found() -> list[Row]:
    return list(rows([8], [8], [40, 80]))


def peak_of(row: Row, recompute: RecomputeConfig) -> int:
    config = run_of(row.pp_size, row.micro_batch_size, recompute)
    return fullest_step_peak(config, device="cuda", dp_cp_size=8, num_microbatches=64).num_bytes


def test_both_plans_of_a_row_fit_its_memory(found: list[Row]) -> None:
    settings = dict(megatron_settings(96 // 8))
    for row in found:
        assert row.setting is not None and row.policy is not None
        for recompute in (settings[row.setting], RecomputeConfig(recompute_policy=row.policy)):
            assert peak_of(row, recompute) <= row.budget_gib * GIB


def test_a_policy_per_stage_never_adds_more_flops(found: list[Row]) -> None:
    for row in found:
        assert row.setting_extra is not None and row.policy_extra is not None
        assert row.policy_extra <= row.setting_extra


@pytest.mark.long
def test_the_page_has_the_table_that_the_command_makes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    assert main(["--output", str(page)]) == 0
    assert page.read_text() == PAGE.read_text()
    assert PAGE.read_text().count(BEGIN) == PAGE.read_text().count(END) == 1


def test_a_page_without_the_marks_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n")
    with pytest.raises(SystemExit):
        main(["--output", str(page)], lambda *sizes: [])
    assert page.read_text() == "# A page\n" and "has no" in capsys.readouterr().err
