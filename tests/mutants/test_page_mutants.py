"""Mistakes in the HTML pages, each put back: a named test must fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_lite.pages import (
    course,
    line_chart,
    markup,
    plan_grid,
    plan_page,
    run_charts,
    run_page,
    run_record,
)
from megatron_lite.pages.markup import Html
from tests.pages import test_plan_page, test_run_page
from tests.support.mutants import Mutant, assert_seen, replaces


@replaces("escaped", markup)
def text_is_not_escaped(_, text):
    return Html(text)


@replaces("figure", run_record)
def a_number_that_is_infinite_counts(number, value):
    return value if isinstance(value, float) else number(value)


@replaces("forget_after", course.FigureCourse)
def a_course_that_was_left_still_counts(_, self, iteration):
    return None


@replaces("_kept_places", line_chart)
def a_long_curve_keeps_every_nth_point(_, columns, length, most):
    return {place * (length - 1) // (most - 1) for place in range(most)}


@replaces("running_mean", run_charts, test_run_page)
def a_gap_counts_as_zero_in_the_mean(mean, values, window):
    return mean([value or 0.0 for value in values], window)


@replaces("pareto", plan_grid, test_plan_page)
def the_front_keeps_larger_plans(_, cells):
    return sorted(cells)


@replaces("json_element", run_page, plan_page)
def data_may_end_its_script_element(_, values, identifier):
    return Html(f'<script type="application/json" id="{identifier}">{json.dumps(values)}</script>')


MUTANTS = [
    Mutant(text_is_not_escaped, test_run_page.test_hostile_names_are_text),
    Mutant(text_is_not_escaped, test_plan_page.test_hostile_texts_of_a_plan_are_text),
    Mutant(data_may_end_its_script_element, test_run_page.test_hostile_names_are_text),
    Mutant(data_may_end_its_script_element, test_plan_page.test_hostile_texts_of_a_plan_are_text),
    Mutant(
        a_number_that_is_infinite_counts,
        test_run_page.test_rows_that_are_garbled_are_counted_and_numbers_that_are_none_are_gaps,
    ),
    Mutant(
        a_course_that_was_left_still_counts, test_run_page.test_the_log_gives_what_the_metrics_lack
    ),
    Mutant(
        a_long_curve_keeps_every_nth_point,
        test_run_page.test_thinning_keeps_the_smallest_and_the_largest_value_of_each_stretch,
    ),
    Mutant(
        a_gap_counts_as_zero_in_the_mean,
        test_run_page.test_the_running_mean_is_over_the_last_values_and_skips_gaps,
    ),
    Mutant(
        the_front_keeps_larger_plans, test_plan_page.test_the_front_holds_what_no_other_layout_beats
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_named_test_fails(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert_seen(mutant, monkeypatch, tmp_path=tmp_path)
